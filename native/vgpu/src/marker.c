#include "marker.h"

#include "hooks.h"
#include "process.h"
#include "region_abi.h"
#include "util.h"

enum { MARKERS = 8, UNKNOWN_AT_ONCE = 2, MOST_HELD_BACK = 64 };
static const int64_t marker_ns = 4000, saved_up_ns = 1000000, overdraft_ns = 1000000;
static const uint64_t usual_span_ns = 50000;

enum marker_state { MARKER_FREE, MARKER_BUSY, MARKER_RUNNING };

struct vg_marker {
    _Atomic int state;
    int device;
    void *context;      /* of the events */
    _Atomic bool stale; /* which is gone */
    void *start, *stop;
    struct vg_cost *cost;
    uint64_t charged;
    uint64_t began; /* the start event was given to the driver */
    uint64_t lost;  /* of the time between the events the card may have waited for the host so long, ns */
    bool idle;      /* the card was, at the start event */
    bool sure;      /* that it waited so long */
    uint32_t launches;
};

static struct vg_marker markers[VG_MAX_DEVICES][MARKERS];

/* One per cent of the time gone by may be spent on event calls. */
static struct {
    _Atomic uint64_t since;
    _Atomic int64_t credit;
} budget;

/* Launches that were not measured because of captures, since one was measured without. */
static _Atomic uint32_t held_back;

static bool capturing(void) {
    return atomic_load(&vg_gate->captures) > 0;
}

bool vg_markers_allowed(void) {
    return !capturing() || (atomic_load(&held_back) >= MOST_HELD_BACK &&
                            vg_target(VG_T_cuThreadExchangeStreamCaptureMode) != NULL);
}

/* A capture can begin in another thread at any time. In this mode what this thread asks of its own events
 * spoils none. -1: the driver has no modes. */
static int relax(void) {
    int mode = VG_CAPTURE_MODE_RELAXED;
    return vg_call_cuThreadExchangeStreamCaptureMode(&mode) == VG_CUDA_SUCCESS ? mode : -1;
}

static void restore(int mode) {
    if (mode >= 0)
        vg_call_cuThreadExchangeStreamCaptureMode(&mode);
}

static bool afford(bool unknown) {
    uint64_t now = vg_now(), since = atomic_exchange(&budget.since, now);
    int64_t earned = since == 0 || now < since ? saved_up_ns : (int64_t)((now - since) / 100);
    int64_t credit = atomic_fetch_add(&budget.credit, earned) + earned;
    if (credit > saved_up_ns) {
        atomic_fetch_sub(&budget.credit, credit - saved_up_ns);
        credit = saved_up_ns;
    }
    if (credit < (unknown ? marker_ns - overdraft_ns : marker_ns))
        return false;
    atomic_fetch_sub(&budget.credit, marker_ns);
    return true;
}

/* Costs stay at their start values then; the flag tells who looks at the region. */
static void show_events(bool possible) {
    _Atomic uint32_t *flags = &vg_here()->own_extension->flags;
    bool shown = (atomic_load_explicit(flags, memory_order_relaxed) & VG_SLOT_FLAG_NO_MARKERS) == 0;
    if (possible && !shown)
        atomic_fetch_and(flags, ~(uint32_t)VG_SLOT_FLAG_NO_MARKERS);
    else if (!possible && shown)
        atomic_fetch_or(flags, VG_SLOT_FLAG_NO_MARKERS);
}

static bool make_events(struct vg_marker *marker) {
    if (vg_call_cuEventCreate(&marker->start, VG_EVENT_DEFAULT) != VG_CUDA_SUCCESS) {
        marker->start = NULL;
        return false;
    }
    if (vg_call_cuEventCreate(&marker->stop, VG_EVENT_DEFAULT) == VG_CUDA_SUCCESS)
        return true;
    vg_call_cuEventDestroy_v2(marker->start);
    marker->start = NULL;
    return false;
}

static void drop_events(struct vg_marker *marker) {
    marker->start = marker->stop = NULL;
    marker->context = NULL;
}

static bool has_events(struct vg_marker *marker, void *context) {
    if (atomic_exchange(&marker->stale, false))
        drop_events(marker);
    if (marker->context == context && marker->start != NULL)
        return true;
    if (marker->start != NULL) {
        vg_call_cuEventDestroy_v2(marker->start);
        vg_call_cuEventDestroy_v2(marker->stop);
    }
    marker->start = marker->stop = NULL;
    marker->context = context;
    bool made = make_events(marker);
    show_events(made);
    return made;
}

struct vg_marker *vg_marker_take(struct vg_cost *cost, int device, uint64_t charged, uint32_t launches) {
    bool unknown = atomic_load(&cost->ns) == VG_COST_UNKNOWN, captures = capturing();
    if (!vg_markers_allowed()) {
        atomic_fetch_add(&held_back, 1);
        return NULL;
    }
    if (unknown && atomic_load(&cost->measuring) >= UNKNOWN_AT_ONCE)
        return NULL;
    for (int i = 0; i < MARKERS; i++) {
        struct vg_marker *marker = &markers[device][i];
        int expected = MARKER_FREE;
        if (!atomic_compare_exchange_strong(&marker->state, &expected, MARKER_BUSY))
            continue;
        void *context = NULL;
        if (!afford(unknown) || vg_call_cuCtxGetCurrent(&context) != VG_CUDA_SUCCESS || context == NULL ||
            !has_events(marker, context)) {
            atomic_store(&marker->state, MARKER_FREE);
            return NULL;
        }
        marker->device = device;
        marker->cost = cost;
        marker->charged = charged;
        marker->launches = launches;
        atomic_fetch_add(&cost->measuring, 1);
        if (!captures)
            atomic_store(&held_back, 0);
        return marker;
    }
    return NULL;
}

static void release(struct vg_marker *marker) {
    atomic_fetch_sub(&marker->cost->measuring, 1);
    atomic_store(&marker->state, MARKER_FREE);
}

/* False also where nothing may be asked now. */
static bool passed(void *event) {
    if (!vg_markers_allowed())
        return false;
    int mode = relax(), result = vg_call_cuEventQuery(event);
    restore(mode);
    return result == VG_CUDA_SUCCESS;
}

bool vg_marker_start(struct vg_marker *marker, void *stream) {
    marker->began = vg_now();
    if (atomic_load(&marker->stale) || vg_call_cuEventRecord(marker->start, stream) != VG_CUDA_SUCCESS) {
        release(marker);
        return false;
    }
    marker->idle = passed(marker->start);
    return true;
}

/* The host may have been away between its calls (another thread had the processor, the driver loaded the
 * kernel), and a card without work waited for it. Not where earlier work still keeps the start event back:
 * everything was in the queue then before the card came to it. If it was idle at first and is at work now,
 * the host was away before that began. */
static void look_for_lost_time(struct vg_marker *marker) {
    uint64_t span = vg_now() - marker->began;
    bool away = span > usual_span_ns;
    bool kept_back = away && !marker->idle && vg_markers_allowed() && !passed(marker->start);
    marker->sure = away && marker->idle && !passed(marker->stop);
    marker->lost = away && !kept_back ? span : 0;
}

void vg_marker_stop(struct vg_marker *marker, void *stream, bool launched) {
    if (!launched || atomic_load(&marker->stale) ||
        vg_call_cuEventRecord(marker->stop, stream) != VG_CUDA_SUCCESS) {
        release(marker);
        return;
    }
    look_for_lost_time(marker);
    atomic_store(&marker->state, MARKER_RUNNING);
}

bool vg_markers_busy(int device) {
    for (int i = 0; i < MARKERS; i++)
        if (atomic_load(&markers[device][i].state) == MARKER_FREE)
            return false;
    return true;
}

unsigned vg_markers_poll(int device, void (*finished)(int device, uint64_t took, uint64_t charged)) {
    unsigned done = 0, asked = 0;
    int mode = -1;
    for (int i = 0; i < MARKERS; i++) {
        struct vg_marker *marker = &markers[device][i];
        int expected = MARKER_RUNNING;
        if (!atomic_compare_exchange_strong(&marker->state, &expected, MARKER_BUSY))
            continue;
        if (asked++ == 0)
            mode = relax();
        float milliseconds = 0;
        int result = vg_call_cuEventQuery(marker->stop);
        if (result == VG_CUDA_NOT_READY) {
            atomic_store(&marker->state, MARKER_RUNNING);
            continue;
        }
        if (result == VG_CUDA_SUCCESS &&
            vg_call_cuEventElapsedTime(&milliseconds, marker->start, marker->stop) == VG_CUDA_SUCCESS) {
            uint64_t took =
                milliseconds > 0 && milliseconds < 1e9F ? (uint64_t)((double)milliseconds * 1e6) : 0;
            if (marker->lost <= took / 8)
                vg_cost_learn(marker->cost, took, marker->launches);
            else
                took = vg_cost_learn_between(marker->cost, took > marker->lost ? took - marker->lost : 0,
                                             took, marker->sure, marker->charged, marker->launches);
            finished(device, took, marker->charged);
            done++;
        }
        release(marker);
    }
    restore(mode);
    return done;
}

void vg_markers_forget(void *context) {
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        for (int i = 0; i < MARKERS; i++) {
            struct vg_marker *marker = &markers[d][i];
            int state = atomic_load(&marker->state);
            if (marker->context != context)
                continue;
            /* Another thread has it, on its way to a launch perhaps that waits for the limit: it will see. */
            if (state == MARKER_BUSY ||
                !atomic_compare_exchange_strong(&marker->state, &state, MARKER_BUSY)) {
                atomic_store(&marker->stale, true);
                continue;
            }
            drop_events(marker);
            if (state == MARKER_RUNNING)
                release(marker);
            else
                atomic_store(&marker->state, MARKER_FREE);
        }
    }
}
