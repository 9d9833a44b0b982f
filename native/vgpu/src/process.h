/* What this process is: its configuration, its place in the region, its devices, and how hooks find out. */
#ifndef VGPU_PROCESS_H
#define VGPU_PROCESS_H

#include "config.h"
#include "region.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The gate word lives in a page that a forked child sees zeroed: 0 = not initialised here. */
enum {
    VG_GATE_READY = 1,
    VG_GATE_LIMITED = 2,  /* a core limit is in force on some device */
    VG_GATE_CAPTURE = 4,  /* stream captures are in flight */
    VG_GATE_DENIED = 8,   /* the region is foreign: nothing may run */
    VG_GATE_REGION = 16,  /* the region is open (perhaps without a slot) */
    VG_GATE_FORWARD = 32, /* no limits here: every call goes straight to the driver */
};

struct vg_gate {
    _Atomic uint32_t word;
    _Atomic uint32_t limited_mask; /* bit per region device with a core limit */
    _Atomic int32_t *_Atomic recent_kernel;
    _Atomic uint64_t *_Atomic tick;
    int32_t single_device; /* region index where the program sees one device, else -1 */
    _Atomic int32_t captures;
    _Atomic uint64_t looked_at; /* the tick at which files were looked at last */
    _Atomic bool leading;
    struct vg_extension *_Atomic shared;
    _Atomic uint32_t trimmed; /* the region's request for trimming that was obeyed last */
};

extern struct vg_gate *_Atomic vg_gate;

struct vg_process {
    struct vg_config config;
    struct vg_space *_Atomic space; /* where this process is counted; another one after a move */
    _Atomic uint64_t file_memory[VG_MAX_DEVICES]; /* limits file by region index, 0 = none */
    _Atomic uint64_t file_sm[VG_MAX_DEVICES];
};

extern struct vg_process vg_process;

/* The region and this process's place in it. A caller that holds on to it across a move counts in the old
 * one, and what it adds there is moved after it. */
static inline struct vg_space *vg_here(void) {
    return atomic_load_explicit(&vg_process.space, memory_order_acquire);
}

/* The once-a-second word of the region. */
static inline uint64_t vg_tick(const struct vg_gate *gate) {
    return atomic_load_explicit(atomic_load_explicit(&gate->tick, memory_order_relaxed),
                                memory_order_relaxed);
}

enum vg_mode { VG_MODE_FORWARD, VG_MODE_COUNT, VG_MODE_DENY };

/* Once a second (the shared tick has moved): looks at the limits file, at what the region says now and at
 * what the driver has taken or given back of itself. */
void vg_limits_refresh(void);

/* A process of the container was refused memory. */
void vg_trim_asked(void);

/* Initialises this process if the driver is initialised. A hook does what the answer says. */
enum vg_mode vg_ready_slow(void);

static inline enum vg_mode vg_ready(void) {
    struct vg_gate *gate = atomic_load_explicit(&vg_gate, memory_order_relaxed);
    if ((atomic_load_explicit(&gate->word, memory_order_acquire) & VG_GATE_READY) == 0)
        return vg_ready_slow();
    struct vg_extension *shared = atomic_load_explicit(&gate->shared, memory_order_relaxed);
    if (atomic_load_explicit(&shared->trim, memory_order_relaxed) !=
        atomic_load_explicit(&gate->trimmed, memory_order_relaxed))
        vg_trim_asked();
    if (vg_tick(gate) != atomic_load_explicit(&gate->looked_at, memory_order_relaxed))
        vg_limits_refresh();
    return VG_MODE_COUNT;
}

/* True if the process no longer counts in `from`; looks first, if a lock of it led nowhere. */
bool vg_region_moved(const struct vg_space *from);

/* Opens the region without a slot, for programs that only ask NVML. False: there is none. */
bool vg_region_attached(void);

/* Limits in force: the smaller of limits file and region. 0 = none. Cores in percent, 1..99. */
uint64_t vg_memory_limit(int device);
unsigned vg_core_limit(int device);

#endif
