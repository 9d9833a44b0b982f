/* Contexts: measured when they appear, given back with all they held when they are gone, never refused. */
#include "ctx.h"

#include "devices.h"
#include "gate.h"
#include "guard.h"
#include "hooks.h"
#include "hostpid.h"
#include "mem.h"
#include "process.h"
#include "slots.h"
#include "sorted.h"
#include "thread.h"
#include "watch.h"

#include <errno.h>
#include <pthread.h>

static _Atomic(void *) primary[VG_MAX_DEVICES];

/* Contexts that the program made -> CUDA device. */
static struct vg_sorted created;
static _Atomic uint32_t guard;

static bool primary_active(int cuda_device) {
    unsigned flags = 0;
    int active = 0;
    return vg_call_cuDevicePrimaryCtxGetState(cuda_device, &flags, &active) == VG_CUDA_SUCCESS && active != 0;
}

/* A list of PIDs is too large for a stack; of several threads that activate at once one looks for the host
 * PID. */
static struct vg_search search;
static _Atomic uint32_t searching;

struct vg_activation vg_activation_begin(int cuda_device) {
    struct vg_activation activation = {.device = -1, .saved_errno = errno};
    if (vg_ready() != VG_MODE_COUNT)
        return activation;
    activation.device = vg_device_of(cuda_device);
    if (activation.device < 0)
        return activation;
    /* A thread that ended in the driver would leave locks of the container behind. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &activation.cancel_state);
    activation.searching = atomic_exchange(&searching, 1) == 0;
    if (activation.searching)
        vg_host_pid_before(&search, activation.device);
    vg_ctx_size_before(&activation.size, activation.device);
    return activation;
}

void vg_activation_end(const struct vg_activation *activation, int result) {
    vg_thread.device = 0;
    if (activation->device < 0)
        return;
    if (activation->searching)
        vg_host_pid_after(&search, activation->device, result == VG_CUDA_SUCCESS);
    if (result == VG_CUDA_SUCCESS)
        vg_ctx_size_after(&activation->size, activation->device, activation->searching ? &search : NULL);
    if (activation->searching) {
        vg_host_pid_done(&search);
        atomic_store(&searching, 0);
    }
    if (result == VG_CUDA_SUCCESS)
        vg_watch_look();
    pthread_setcancelstate(activation->cancel_state, NULL);
    errno = activation->saved_errno;
}

void vg_ctx_after_fork_child(void) {
    atomic_store(&searching, 0);
    for (int device = 0; device < VG_MAX_DEVICES; device++)
        atomic_store(&primary[device], NULL);
    created.count = 0;
    atomic_store(&guard, 0);
    vg_ctx_size_after_fork_child();
    vg_host_pid_after_fork_child();
}

int vg_primary_retain(vg_fn_primary_retain driver, void **context, int device) {
    enum vg_mode mode = vg_ready();
    if (mode == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    if (mode == VG_MODE_FORWARD)
        return driver(context, device);
    bool active = primary_active(device);
    struct vg_activation activation = {.device = -1};
    if (!active)
        activation = vg_activation_begin(device);
    int result = driver(context, device);
    if (!active)
        vg_activation_end(&activation, result);
    int index = vg_device_of(device);
    if (result == VG_CUDA_SUCCESS && index >= 0)
        atomic_store(&primary[index], *context);
    return result;
}

/* Contexts of the process on the device. */
static unsigned count_contexts(int cuda_device) {
    unsigned count = primary_active(cuda_device);
    vg_guard_take(&guard);
    for (size_t i = 0; i < created.count; i++)
        count += created.entries[i].length == (uint64_t)cuda_device;
    vg_guard_leave(&guard);
    return count;
}

/* Gives back what belonged to the device's primary context unless that is still there. */
static void primary_look(int cuda_device) {
    int index = vg_device_of(cuda_device);
    if (index < 0 || primary_active(cuda_device))
        return;
    void *context = atomic_exchange(&primary[index], NULL);
    if (context != NULL) {
        vg_gate_forget_context(context);
        vg_memory_drop_context(context, index);
    }
    vg_green_drop_device(index);
    unsigned others = count_contexts(cuda_device);
    uint64_t shown = 0, beside;
    if (others == 0 && !(vg_nvml_own_memory(index, &shown, &beside) && shown > 0))
        vg_pools_without_context(index);
    vg_ctx_size_gone(index, others);
}

void vg_primary_look(void) {
    for (int cuda_device = 0; cuda_device < VG_MAX_DEVICES; cuda_device++) {
        int index = vg_device_of(cuda_device);
        if (index >= 0 && vg_own_bytes(vg_here(), index) != 0)
            primary_look(cuda_device);
    }
}

int vg_primary_drop(vg_fn_primary_drop driver, int device) {
    int result = driver(device);
    vg_thread.device = 0;
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        primary_look(device);
    return result;
}

/* Without memory for the entry what the context leaves stays charged. */
static int made(const struct vg_activation *activation, int result, void *const *context, int cuda_device) {
    if (result == VG_CUDA_SUCCESS && activation->device >= 0) {
        vg_guard_take(&guard);
        vg_sorted_put(&created, (uint64_t)(uintptr_t)*context, (uint64_t)cuda_device, NULL);
        vg_guard_leave(&guard);
    }
    vg_activation_end(activation, result);
    return result;
}

int vg_ctx_create(vg_fn_ctx_create driver, void **context, unsigned flags, int device) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct vg_activation activation = vg_activation_begin(device);
    int result = driver(context, flags, device);
    return made(&activation, result, context, device);
}

int vg_ctx_create_affinity(vg_fn_ctx_create_affinity driver, void **context, void *affinity, int count,
                           unsigned flags, int device) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct vg_activation activation = vg_activation_begin(device);
    int result = driver(context, affinity, count, flags, device);
    return made(&activation, result, context, device);
}

int vg_ctx_create_params(vg_fn_ctx_create_params driver, void **context, void *params, unsigned flags,
                         int device) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct vg_activation activation = vg_activation_begin(device);
    int result = driver(context, params, flags, device);
    return made(&activation, result, context, device);
}

static void context_gone(void *context) {
    vg_guard_take(&guard);
    const struct vg_sorted_entry *entry = vg_sorted_find(&created, (uint64_t)(uintptr_t)context);
    int cuda_device = entry != NULL ? (int)entry->length : -1, device = vg_device_of(cuda_device);
    vg_sorted_remove(&created, (uint64_t)(uintptr_t)context);
    vg_guard_leave(&guard);
    vg_gate_forget_context(context);
    if (device < 0)
        return;
    vg_memory_drop_context(context, device);
    vg_ctx_size_gone(device, count_contexts(cuda_device));
}

int vg_ctx_destroy(vg_fn_ctx_destroy driver, void *context) {
    int result = driver(context);
    vg_thread.device = 0;
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        context_gone(context);
    return result;
}

/* The context has to be the current one, and stays that as long as others are attached to it. */
int vg_ctx_detach(vg_fn_ctx_detach driver, void *context) {
    int result = driver(context), device;
    void *current = NULL;
    vg_thread.device = 0;
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT &&
        (vg_call_cuCtxGetCurrent(&current) != VG_CUDA_SUCCESS || current != context ||
         vg_call_cuCtxGetDevice(&device) != VG_CUDA_SUCCESS))
        context_gone(context);
    return result;
}

int vg_ctx_switch(vg_fn_ctx_switch driver, void *context) {
    vg_thread.device = 0;
    return driver(context);
}

int vg_ctx_pop(vg_fn_ctx_pop driver, void **context) {
    vg_thread.device = 0;
    return driver(context);
}

int vg_ctx_attach(vg_fn_ctx_attach driver, void **context, unsigned flags) {
    vg_thread.device = 0;
    return driver(context, flags);
}
