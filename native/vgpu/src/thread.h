/* State of one thread: initial-exec TLS, 64 bytes at most. */
#ifndef VGPU_THREAD_H
#define VGPU_THREAD_H

#include <stdbool.h>
#include <stdint.h>

struct vg_thread_state {
    uint64_t tick;        /* the once-a-second word as this thread saw it last */
    int64_t slice_ns;     /* GPU time taken from the bucket and not used yet */
    uint32_t quiet;       /* launches since the coarse clock was looked at */
    uint32_t allocations; /* admissions since the same */
    uint32_t generation;  /* of `device` */
    int16_t device;       /* region index of the current context's device */
    int16_t slice_device;
    bool in_hook; /* calls from inside a hook reach the driver untouched */
};
_Static_assert(sizeof(struct vg_thread_state) <= 64, "thread state");

extern _Thread_local struct vg_thread_state vg_thread;

#endif
