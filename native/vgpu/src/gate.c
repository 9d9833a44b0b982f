#define _GNU_SOURCE
#include "gate.h"

#include "bucket.h"
#include "devices.h"
#include "hooks.h"
#include "marker.h"
#include "util.h"
#include "watch.h"

#include <errno.h>
#include <pthread.h>

static const uint64_t slice_ns = 200000, nap_ns = 500000, long_nap_ns = 100000000u, poll_ns = 10000000u;
static const uint64_t longest_wait_ns = 30000000000u, marker_wait_ns = 1000000000u;
static const uint64_t dead_man_seconds = 30;

static int sm_count[VG_MAX_DEVICES], threads_per_sm[VG_MAX_DEVICES];

bool vg_gate_capturing(void *stream) {
    int status = VG_CAPTURE_NONE;
    return vg_gate->captures > 0 && vg_call_cuStreamIsCapturing(stream, &status) == VG_CUDA_SUCCESS &&
           status != VG_CAPTURE_NONE;
}

void vg_gate_forget_context(void *context) {
    vg_markers_forget(context);
}

static int launch_device(void) {
    if (vg_gate->single_device >= 0)
        return vg_gate->single_device;
    int device = vg_current_device();
    vg_thread.device = (int16_t)(device + 1);
    return device;
}

/* The region's activity words: a launch happened. A block that arrives in between is never overwritten. */
static void show_activity(uint64_t tick) {
    struct vg_region *region = vg_here()->region;
    int32_t seen = atomic_load(&region->recent_kernel);
    if (seen == 0 || seen == 1)
        atomic_compare_exchange_strong(&region->recent_kernel, &seen, VG_RECENT_KERNEL_ACTIVE);
    uint64_t last = atomic_load(&region->last_kernel_time);
    while (last + vg_process.config.record_interval <= tick &&
           !atomic_compare_exchange_weak(&region->last_kernel_time, &last, tick))
        continue;
}

static void once_a_second(void) {
    uint64_t tick = vg_tick(vg_gate);
    bool changed = tick != vg_thread.tick;
    if (vg_thread.quiet >= VG_LAUNCHES_BETWEEN_LOOKS || changed) {
        vg_thread.quiet = 0;
        vg_watch_look();
    }
    vg_thread.tick = tick;
    show_activity(changed ? tick : 0);
}

/* A higher priority runs on the card. Without a heartbeat of our monitor for 30 s the block is not obeyed. */
static void wait_for_priority(void) {
    struct vg_space *space = vg_here();
    bool told = false;
    while (atomic_load(&space->region->recent_kernel) < 0) {
        uint64_t heartbeat = atomic_load(&space->extension->heartbeat);
        if (heartbeat != 0 && vg_unix_seconds() > heartbeat + dead_man_seconds)
            break;
        if (!told) {
            vg_region_event(space, VG_EVENT_PRIORITY_BLOCK, -1, 1);
            atomic_fetch_or(&space->own_extension->flags, VG_SLOT_FLAG_PRIORITY_BLOCKED);
            told = true;
        }
        vg_pause_ns(poll_ns);
    }
    if (told) {
        atomic_fetch_and(&space->own_extension->flags, ~(uint32_t)VG_SLOT_FLAG_PRIORITY_BLOCKED);
        vg_region_event(space, VG_EVENT_PRIORITY_BLOCK, -1, 0);
    }
    while (atomic_load(&space->own->status) == VG_SLOT_SUSPENDED)
        vg_pause_ns(poll_ns);
}

/* What the bucket takes for `ns` of a launch: times the device's factor. */
static int64_t weighted(int device, int64_t ns) {
    uint64_t g = atomic_load(&vg_here()->extension->devices[device].g);
    return g == 0 || g > 4 * VG_G_ONE ? ns : (int64_t)((double)ns * (double)g / VG_G_ONE);
}

static void add_forgiven(int device, uint64_t forgiven) {
    if (forgiven == 0)
        return;
    atomic_fetch_add(&vg_here()->extension->devices[device].forgiven, forgiven);
    vg_region_event(vg_here(), VG_EVENT_DEBT_FORGIVEN, device, forgiven);
}

static void true_up(int device, uint64_t took, uint64_t charged) {
    struct vg_ext_device *shared = &vg_here()->extension->devices[device];
    unsigned limit = vg_core_limit(device);
    uint64_t forgiven = 0;
    int64_t difference = (int64_t)took - (int64_t)charged;
    if (limit != 0)
        vg_bucket_correct(&shared->due, vg_now(), weighted(device, difference), limit, &forgiven);
    atomic_fetch_add(&shared->charged, (uint64_t)difference);
    add_forgiven(device, forgiven);
}

static unsigned poll_markers(int device) {
    return vg_markers_allowed() ? vg_markers_poll(device, true_up) : 0;
}

static void add_throttled(int device, uint64_t ns) {
    atomic_fetch_add(&vg_here()->extension->devices[device].throttled, ns);
    atomic_fetch_add(&vg_here()->own_extension->throttled, ns);
}

/* Waits until the bucket gives `cost`; limit and policy are looked at again after each pause. */
static void take(int device, uint64_t cost) {
    struct vg_ext_device *shared = &vg_here()->extension->devices[device];
    uint64_t start = vg_now(), forgiven = 0;
    bool slept = false;
    for (uint64_t now = start; now - start < longest_wait_ns; now = vg_now()) {
        unsigned limit = vg_core_limit(device);
        uint64_t weight = (uint64_t)weighted(device, (int64_t)cost);
        uint64_t wait = limit == 0 ? 0 : vg_bucket_take(&shared->due, now, weight, limit, &forgiven);
        if (wait == 0)
            break;
        if (!slept)
            atomic_fetch_or(&vg_here()->own_extension->flags, VG_SLOT_FLAG_CORE_LIMITED);
        slept = true;
        vg_pause_ns(wait < long_nap_ns ? wait : long_nap_ns);
        poll_markers(device);
    }
    if (slept) {
        atomic_fetch_and(&vg_here()->own_extension->flags, ~(uint32_t)VG_SLOT_FLAG_CORE_LIMITED);
        add_throttled(device, vg_now() - start);
    }
    atomic_fetch_add(&shared->charged, cost);
    add_forgiven(device, forgiven);
}

/* A launch that wants a marker waits until one is free: that bounds the queue of a program that never
 * synchronises. After a second in vain it goes on without, and so does every later one until a marker has
 * completed. */
static struct vg_marker *wait_for_marker(struct vg_cost *cost, int device, uint64_t charged,
                                         uint32_t launches) {
    static _Atomic bool in_vain;
    if (poll_markers(device) > 0)
        atomic_store(&in_vain, false);
    bool limited_unknown = atomic_load(&cost->ns) == VG_COST_UNKNOWN && atomic_load(&cost->measuring) >= 2;
    uint64_t deadline = vg_now() + marker_wait_ns;
    while (vg_markers_allowed() && (vg_markers_busy(device) || limited_unknown) && !atomic_load(&in_vain)) {
        vg_pause_ns(nap_ns);
        if (poll_markers(device) > 0)
            atomic_store(&in_vain, false);
        else if (vg_now() >= deadline)
            atomic_store(&in_vain, true);
        limited_unknown = atomic_load(&cost->ns) == VG_COST_UNKNOWN && atomic_load(&cost->measuring) >= 2;
    }
    return vg_marker_take(cost, device, charged, launches);
}

static uint64_t start_value(uintptr_t function, uint64_t work, int device) {
    uint64_t nodes = vg_graph_known_nodes(function);
    if (nodes != 0)
        return vg_cost_start_value_of_graph(nodes);
    if (sm_count[device] == 0) {
        int cuda_device = 0;
        if (vg_call_cuCtxGetDevice(&cuda_device) == VG_CUDA_SUCCESS) {
            vg_call_cuDeviceGetAttribute(&threads_per_sm[device], VG_ATTRIBUTE_THREADS_PER_SM, cuda_device);
            vg_call_cuDeviceGetAttribute(&sm_count[device], VG_ATTRIBUTE_SMS, cuda_device);
        }
    }
    return vg_cost_start_value(work, sm_count[device], threads_per_sm[device]);
}

/* From the thread's slice, which the bucket fills when it is too small. */
static void pay_from_slice(int device, uint64_t charge) {
    if (vg_thread.slice_device != device) {
        vg_thread.slice_device = (int16_t)device;
        vg_thread.slice_ns = 0;
    }
    if (vg_thread.slice_ns < (int64_t)charge) {
        uint64_t lack = charge - (uint64_t)vg_thread.slice_ns, amount = lack > slice_ns ? lack : slice_ns;
        take(device, amount);
        vg_thread.slice_ns += (int64_t)amount;
    }
    vg_thread.slice_ns -= (int64_t)charge;
}

/* Pays for one launch and decides whether it is measured. */
static void pay(struct vg_launch *launch, uintptr_t function, uint64_t work, int device) {
    struct vg_cost *cost = vg_cost_get(function, work, device);
    bool known = cost != NULL && atomic_load(&cost->ns) != VG_COST_UNKNOWN;
    int32_t countdown = cost != NULL ? atomic_fetch_sub(&cost->countdown, 1) : 0;
    poll_markers(device);
    uint64_t charge = known ? atomic_load(&cost->ns) : start_value(function, work, device);
    if (cost != NULL && countdown <= 1) {
        launch->marker = wait_for_marker(cost, device, charge, vg_cost_pending(cost, countdown));
        if (launch->marker != NULL)
            pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &launch->cancel_state);
        if (known && launch->marker == NULL)
            vg_cost_postpone(cost, countdown);
    }
    pay_from_slice(device, charge);
}

static void without_marker(struct vg_launch *launch) {
    launch->marker = NULL;
    pthread_setcancelstate(launch->cancel_state, NULL);
}

int vg_gate_enter(struct vg_launch *launch, uintptr_t function, uint64_t work, void *stream) {
    *launch = (struct vg_launch){.marker = NULL, .stream = stream};
    enum vg_mode mode = vg_ready();
    if (mode != VG_MODE_COUNT)
        return mode == VG_MODE_DENY ? VG_CUDA_UNKNOWN : VG_CUDA_SUCCESS;
    int saved = errno, device = launch_device();
    once_a_second();
    wait_for_priority();
    if (device >= 0 && vg_core_limit(device) != 0 && !vg_gate_capturing(stream)) {
        pay(launch, function, work, device);
        if (launch->marker != NULL && !vg_marker_start(launch->marker, stream))
            without_marker(launch);
    }
    errno = saved;
    return VG_CUDA_SUCCESS;
}

void vg_gate_leave(struct vg_launch *launch, int result) {
    if (launch->marker == NULL)
        return;
    vg_marker_stop(launch->marker, launch->stream, result == VG_CUDA_SUCCESS);
    without_marker(launch);
}

/* One kernel on several devices at once: each device pays its part, none is measured. */
int vg_launch_multi_device(vg_fn_launch_multi_device driver, const struct vg_launch_params *launches,
                           unsigned count, unsigned flags) {
    enum vg_mode mode = vg_ready();
    if (mode == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    if (mode == VG_MODE_FORWARD || launches == NULL)
        return driver(launches, count, flags);
    int saved = errno;
    once_a_second();
    wait_for_priority();
    for (unsigned i = 0; i < count && i < VG_MAX_DEVICES; i++) {
        const struct vg_launch_params *l = &launches[i];
        int cuda_device, device = vg_stream_device(l->stream, &cuda_device) ? vg_device_of(cuda_device) : -1;
        if (device < 0 || vg_core_limit(device) == 0)
            continue;
        uintptr_t function = (uintptr_t)l->function;
        uint64_t work = vg_work(l->grid_x, l->grid_y, l->grid_z, l->block_x, l->block_y, l->block_z);
        struct vg_cost *costs = atomic_load(&vg_costs), *cost = NULL;
        if (costs != NULL)
            cost = vg_cost_find(costs, vg_cost_key(function, work, device));
        uint32_t known = cost != NULL ? atomic_load(&cost->ns) : VG_COST_UNKNOWN;
        pay_from_slice(device, known != VG_COST_UNKNOWN ? known : start_value(function, work, device));
    }
    errno = saved;
    return driver(launches, count, flags);
}

/* While captures are in flight every launch takes the slow path, which asks about its own stream. Counted
 * before the driver begins, so that no event call of another thread falls in between. */
static void count_capture(int change) {
    if (vg_ready() != VG_MODE_COUNT)
        return;
    int after = atomic_fetch_add(&vg_gate->captures, change) + change;
    if (after < 0) { /* the end of a capture that was not begun */
        atomic_fetch_add(&vg_gate->captures, 1);
        after = 0;
    }
    if (after > 0)
        atomic_fetch_or(&vg_gate->word, VG_GATE_CAPTURE);
    else
        atomic_fetch_and(&vg_gate->word, ~(uint32_t)VG_GATE_CAPTURE);
}

static int begun(int result) {
    if (result != VG_CUDA_SUCCESS)
        count_capture(-1);
    return result;
}

int vg_capture_begin_v1(vg_fn_capture_begin_v1 driver, void *stream) {
    count_capture(1);
    return begun(driver(stream));
}

int vg_capture_begin(vg_fn_capture_begin driver, void *stream, int mode) {
    count_capture(1);
    return begun(driver(stream, mode));
}

int vg_capture_to_graph(vg_fn_capture_to_graph driver, void *stream, void *graph, const void *dependencies,
                        const void *data, size_t count, int mode) {
    count_capture(1);
    return begun(driver(stream, graph, dependencies, data, count, mode));
}

static bool captured(void *stream) {
    int status = VG_CAPTURE_NONE;
    return vg_call_cuStreamIsCapturing(stream, &status) == VG_CUDA_SUCCESS && status != VG_CAPTURE_NONE;
}

/* A capture that did not succeed may be over, or, for one thing if this is not its thread, go on. */
static int ended(int result, void *stream, bool before) {
    if (before && (result == VG_CUDA_SUCCESS || !captured(stream)))
        count_capture(-1);
    return result;
}

int vg_capture_end(vg_fn_capture_end driver, void *stream, void **graph, void *on_stream) {
    bool before = captured(on_stream);
    return ended(driver(stream, graph), on_stream, before);
}

int vg_recapture_to_graph(vg_fn_recapture_to_graph driver, void *stream, int mode, void *graph,
                          void *callback, void *data) {
    count_capture(1);
    return begun(driver(stream, mode, graph, callback, data));
}

int vg_capture_to_cig(vg_fn_capture_to_cig driver, void *stream, void *params) {
    count_capture(1);
    return begun(driver(stream, params));
}

int vg_capture_end_cig(vg_fn_capture_end_cig driver, void *stream) {
    int result = driver(stream);
    count_capture(-1);
    return result;
}
