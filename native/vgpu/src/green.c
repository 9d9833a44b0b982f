/* Green contexts hold the primary context of their device; memory made in one belongs to that. */
#define _GNU_SOURCE
#include "ctx.h"

#include "devices.h"
#include "gate.h"
#include "guard.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"
#include "sorted.h"

/* context of a green context -> region index of its device + 1. It stays when the green context is destroyed:
 * what was allocated there lives as long as the primary context. */
static struct vg_sorted contexts;
static _Atomic uint32_t guard;

static void lock(void) {
    vg_guard_take(&guard);
}

static void unlock(void) {
    vg_guard_leave(&guard);
}

static void *context_of(void *green) {
    void *context = NULL;
    return vg_call_cuCtxFromGreenCtx(&context, green) == VG_CUDA_SUCCESS ? context : NULL;
}

/* Any context of a green context on the device, taken out of the table; NULL: there is none. */
static void *take(int device) {
    void *context = NULL;
    lock();
    for (size_t i = 0; i < contexts.count && context == NULL; i++)
        if (contexts.entries[i].length == (uint64_t)device + 1)
            context = (void *)(uintptr_t)contexts.entries[i].key;
    if (context != NULL)
        vg_sorted_remove(&contexts, (uint64_t)(uintptr_t)context);
    unlock();
    return context;
}

void vg_green_drop_device(int device) {
    for (void *context = take(device); context != NULL; context = take(device)) {
        vg_gate_forget_context(context);
        vg_memory_drop_context(context, device);
    }
}

int vg_green_create(vg_fn_green_create driver, void **green, void *resources, int device, unsigned flags) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct vg_activation activation = vg_activation_begin(device);
    int result = driver(green, resources, device, flags);
    vg_activation_end(&activation, result);
    void *context = result == VG_CUDA_SUCCESS && activation.device >= 0 ? context_of(*green) : NULL;
    if (context != NULL) {
        lock();
        vg_sorted_put(&contexts, (uint64_t)(uintptr_t)context, (uint64_t)activation.device + 1, NULL);
        unlock();
    }
    return result;
}

int vg_green_destroy(vg_fn_green_destroy driver, void *green) {
    bool counted = vg_ready() == VG_MODE_COUNT;
    void *context = counted ? context_of(green) : NULL;
    int result = driver(green);
    if (counted && result == VG_CUDA_SUCCESS) {
        if (context != NULL)
            vg_gate_forget_context(context);
        vg_primary_look();
    }
    return result;
}
