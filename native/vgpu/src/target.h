/* Driver functions: one slot per symbol, filled when a program looks the symbol up or when it is first
 * needed. */
#ifndef VGPU_TARGET_H
#define VGPU_TARGET_H

#include <stdatomic.h>
#include <stdbool.h>

extern _Atomic(void *) vg_targets[];

/* Finds the driver's function in the loaded library, loads the library if need be. NULL: there is none. */
void *vg_resolve(int id);

/* What a hook without a driver function returns: 3 or 500 (CUDA), 12 or 13 (NVML). */
int vg_missing(int id);

/* Remember where the driver's function is. */
void vg_set_target(int id, void *function);

static inline void *vg_target(int id) {
    void *function = atomic_load_explicit(&vg_targets[id], memory_order_relaxed);
    return __builtin_expect(function != 0, 1) ? function : vg_resolve(id);
}

#endif
