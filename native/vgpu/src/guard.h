/* A lock for a few instructions, in a word that a forked child can inherit: whoever waits gives the processor
 * away. */
#ifndef VGPU_GUARD_H
#define VGPU_GUARD_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

static inline void vg_guard_take(_Atomic uint32_t *guard) {
    while (atomic_exchange_explicit(guard, 1, memory_order_acquire) != 0)
        sched_yield();
}

static inline void vg_guard_leave(_Atomic uint32_t *guard) {
    atomic_store_explicit(guard, 0, memory_order_release);
}

#endif
