/* The launch gate: what a kernel launch passes before it reaches the driver. */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H

#include "abi.h"
#include "cost.h"
#include "graph.h"
#include "process.h"
#include "region_abi.h"
#include "thread.h"

enum { VG_LAUNCHES_BETWEEN_LOOKS = 1024 };

/* Blocks x threads of a launch; saturates. */
static inline uint64_t vg_work(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz) {
    uint64_t blocks, threads, work;
    if (__builtin_mul_overflow((uint64_t)gx * gy, (uint64_t)gz, &blocks) ||
        __builtin_mul_overflow((uint64_t)bx * by, (uint64_t)bz, &threads) ||
        __builtin_mul_overflow(blocks, threads, &work))
        return UINT64_MAX;
    return work;
}

static inline uint64_t vg_work_of_config(const struct vg_launch_config *c) {
    return c == NULL ? 0 : vg_work(c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z);
}

/* Fast path: no clock, no system call, no write to shared memory. True: go straight to the driver. */
static inline bool vg_gate_open(uintptr_t function, uint64_t work) {
    struct vg_gate *gate = atomic_load_explicit(&vg_gate, memory_order_relaxed);
    uint32_t word = atomic_load_explicit(&gate->word, memory_order_acquire);
    if ((word & ~(uint32_t)VG_GATE_LIMITED) != (VG_GATE_READY | VG_GATE_REGION))
        return false;
    _Atomic int32_t *recent = atomic_load_explicit(&gate->recent_kernel, memory_order_relaxed);
    if (atomic_load_explicit(recent, memory_order_relaxed) != VG_RECENT_KERNEL_ACTIVE ||
        vg_tick(gate) != vg_thread.tick || ++vg_thread.quiet >= VG_LAUNCHES_BETWEEN_LOOKS)
        return false;
    if ((word & VG_GATE_LIMITED) == 0)
        return true;
    int device = gate->single_device >= 0 ? gate->single_device : vg_thread.device - 1;
    if (device < 0)
        return false;
    if (((atomic_load_explicit(&gate->limited_mask, memory_order_relaxed) >> device) & 1) == 0)
        return true;
    return vg_cost_pay(function, work, device);
}

/* One launch on the slow path. */
struct vg_launch {
    struct vg_marker *marker; /* NULL: not measured */
    int cancel_state;         /* of the thread, which is not cancelled while it has a marker */
    void *stream;
};

/* Waits as long as priority, suspension and the core limit ask for. Returns 0, or what the program gets
 * instead. */
int vg_gate_enter(struct vg_launch *launch, uintptr_t function, uint64_t work, void *stream);

/* After the driver's answer. */
void vg_gate_leave(struct vg_launch *launch, int result);

/* True if captures are in flight in this process and this stream is being captured. */
bool vg_gate_capturing(void *stream);

/* The context is gone, and with it the events made in it. */
void vg_gate_forget_context(void *context);

#endif
