#define _GNU_SOURCE
#include "learn.h"

#include "bucket.h"
#include "factor.h"
#include "process.h"
#include "slots.h"
#include "util.h"

enum { READINGS = 64 };

struct reading {
    uint64_t time_us;
    uint64_t charged[VG_MAX_DEVICES]; /* GPU ns */
};

static struct reading readings[READINGS];
static unsigned newest, count;
static struct vg_factor factors[VG_MAX_DEVICES];
static bool resumed[VG_MAX_DEVICES];

void vg_learn_reading(void) {
    newest = (newest + 1) % READINGS;
    count += count < READINGS;
    readings[newest].time_us = vg_clock(CLOCK_REALTIME) / 1000;
    for (int d = 0; d < VG_MAX_DEVICES; d++)
        readings[newest].charged[d] = atomic_load(&vg_here()->extension->devices[d].charged);
}

/* What was charged up to a moment, between two readings; false: before the first one. */
static bool charged_at(int device, uint64_t time_us, double *ns) {
    const struct reading *later = NULL;
    for (unsigned i = 0; i < count; i++) {
        const struct reading *reading = &readings[(newest + READINGS - i) % READINGS];
        if (reading->time_us <= time_us) {
            *ns = (double)reading->charged[device];
            if (later != NULL)
                *ns += (double)(int64_t)(later->charged[device] - reading->charged[device]) *
                       (double)(time_us - reading->time_us) / (double)(later->time_us - reading->time_us);
            return true;
        }
        later = reading;
    }
    return false;
}

/* The number of live processes, 0 if one of them cannot be found in NVML's lists: then nothing is learned. */
static unsigned identified(void) {
    struct vg_space *space = vg_here();
    uint32_t flags = atomic_load(&space->extension->flags);
    bool own = (flags & VG_FLAG_NVML_SETTLED) != 0 && (flags & VG_FLAG_NVML_OWN_NAMESPACE) != 0;
    unsigned live = 0, used = vg_region_slots(space->region);
    for (unsigned k = 0; k < used; k++) {
        struct vg_slot *slot = &space->region->procs[k];
        if (atomic_load(&slot->status) == VG_SLOT_FREE)
            continue;
        if (!own && atomic_load(&slot->hostpid) == 0)
            return 0;
        live++;
    }
    return live;
}

void vg_learn_window(int device, uint64_t from_us, uint64_t to_us, unsigned percent) {
    struct vg_ext_device *shared = &vg_here()->extension->devices[device];
    unsigned limit = vg_core_limit(device), live = identified();
    double before, after;
    if (limit == 0 || live == 0 || from_us == 0 || to_us <= from_us ||
        !charged_at(device, from_us, &before) || !charged_at(device, to_us, &after))
        return;
    uint64_t g = atomic_load(&shared->g);
    if (!resumed[device])
        vg_factor_resume(&factors[device], (double)g / VG_G_ONE, limit);
    resumed[device] = true;
    double seconds = (double)(to_us - from_us) / 1e6;
    double charged = after > before ? (after - before) / 1e9 : 0;
    double learned = vg_factor_learn(&factors[device], seconds, seconds * percent / 100, charged, live);
    uint64_t next = (uint64_t)(learned * VG_G_ONE + 0.5);
    atomic_store(&shared->g, next);
    vg_bucket_rescale(&shared->due, vg_now(), next, g != 0 ? g : VG_G_ONE);
}
