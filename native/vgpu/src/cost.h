/* What a launch costs, in nanoseconds of the card, learned per (function, size class, device) by events
 * around some launches. The bucket of the core limit is charged with it. */
#ifndef VGPU_COST_H
#define VGPU_COST_H

#include "thread.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { VG_COST_ENTRIES = 4096, VG_COST_PROBES = 8 };
#define VG_COST_UNKNOWN UINT32_MAX

struct vg_cost {
    _Atomic uint64_t key;        /* 0 = free */
    _Atomic uint32_t ns;         /* VG_COST_UNKNOWN before the first sample */
    _Atomic int32_t countdown;   /* launches until the next one is measured */
    _Atomic uint32_t samples;    /* launches that the mean stands for */
    _Atomic int32_t interval;    /* what the countdown started from */
    _Atomic uint16_t measuring;  /* unfinished markers */
    _Atomic uint16_t doubtful;   /* markers in a row that say next to nothing */
    _Atomic uint32_t unmeasured; /* launches of earlier countdowns that ended without a marker */
};

struct vg_marker;

/* All entries, made with the first limited launch; NULL before. */
extern _Atomic(struct vg_cost *) vg_costs;

static inline uint64_t vg_cost_key(uintptr_t function, uint64_t work, int device) {
    unsigned size_class = work == 0 ? 0 : 63 - (unsigned)__builtin_clzll(work);
    return ((uint64_t)function ^ (uint64_t)size_class << 48 ^ (uint64_t)(unsigned)device << 54) | (uint64_t)1
                                                                                                      << 63;
}

static inline struct vg_cost *vg_cost_find(struct vg_cost *costs, uint64_t key) {
    uint64_t at = key * 0x9e3779b97f4a7c15u >> 52;
    for (unsigned i = 0; i < VG_COST_PROBES; i++) {
        struct vg_cost *cost = &costs[(at + i) % VG_COST_ENTRIES];
        uint64_t found = atomic_load_explicit(&cost->key, memory_order_relaxed);
        if (found == key)
            return cost;
        if (found == 0)
            break;
    }
    return NULL;
}

/* Pays from the thread's slice. False: the slow path has to look. */
static inline bool vg_cost_pay(uintptr_t function, uint64_t work, int device) {
    struct vg_cost *costs = atomic_load_explicit(&vg_costs, memory_order_acquire);
    if (costs == NULL || vg_thread.slice_device != device)
        return false;
    struct vg_cost *cost = vg_cost_find(costs, vg_cost_key(function, work, device));
    if (cost == NULL)
        return false;
    int32_t countdown = atomic_load_explicit(&cost->countdown, memory_order_relaxed);
    uint32_t ns = atomic_load_explicit(&cost->ns, memory_order_relaxed);
    if (countdown <= 1 || vg_thread.slice_ns < (int64_t)ns)
        return false;
    atomic_store_explicit(&cost->countdown, countdown - 1, memory_order_relaxed);
    vg_thread.slice_ns -= (int64_t)ns;
    return true;
}

/* The entry, made if need be; NULL: the table is full there. */
struct vg_cost *vg_cost_get(uintptr_t function, uint64_t work, int device);

/* What a launch is charged before anything is known of it, ns. */
uint64_t vg_cost_start_value(uint64_t work, int sms, int threads_per_sm);

/* The same for an executable graph. */
uint64_t vg_cost_start_value_of_graph(uint64_t nodes);

/* What was learned of the function is not true any more. */
void vg_cost_forget(uintptr_t function, uint64_t work);

/* The launches since the last marker, the one at hand included. */
uint32_t vg_cost_pending(const struct vg_cost *cost, int32_t countdown);

/* The countdown is over and there is no marker to be had: it starts again. */
void vg_cost_postpone(struct vg_cost *cost, int32_t countdown);

/* A measured launch took `ns` and stands for `launches`. Weighted mean; sets the next countdown. */
void vg_cost_learn(struct vg_cost *cost, uint64_t ns, uint32_t launches);

/* The same where no more is known than that it took from `least` to `most` ns: what is nearest to `charged`
 * is learned and returned. An entry without a sample stays without: the next launch is measured too. If it
 * goes on like that and `most` is four times as much and more, unless `sure` of the least, then at least a
 * quarter of the most is: the device's factor makes up for four times too little and for 64 times too much.
 */
uint64_t vg_cost_learn_between(struct vg_cost *cost, uint64_t least, uint64_t most, bool sure,
                               uint64_t charged, uint32_t launches);

#endif
