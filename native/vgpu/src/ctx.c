/* Contexts: measured when they appear, given back with all they held when they are gone, never refused. */
#include "admit.h"
#include "devices.h"
#include "gate.h"
#include "hooks.h"
#include "hostpid.h"
#include "mem.h"
#include "process.h"
#include "slots.h"
#include "thread.h"
#include "watch.h"

#include <errno.h>

static _Atomic(void *) primary[VG_MAX_DEVICES];

static void set_context_charge(int device, uint64_t bytes) {
    struct vg_space *space = &vg_process.space;
    uint64_t target = vg_round_charge(bytes);
    uint64_t now = atomic_load(&space->own->used[device].context);
    if (target > now) {
        vg_reserve(space, device, target - now);
        vg_slot_add(space, device, VG_KIND_CONTEXT, target - now);
    } else if (target < now) {
        vg_slot_subtract(space, device, VG_KIND_CONTEXT, now - target);
        vg_unreserve(space, device, now - target);
    }
}

/* What NVML shows for this process beyond what was allocated is context. */
static void measure(int device) {
    uint64_t shown = 0;
    if (!vg_nvml_own_memory(device, &shown))
        return;
    uint64_t data = atomic_load(&vg_process.space.own->used[device].data);
    set_context_charge(device, shown > data ? shown - data : 0);
}

static bool primary_active(int cuda_device) {
    unsigned flags = 0;
    int active = 0;
    return vg_call_cuDevicePrimaryCtxGetState(cuda_device, &flags, &active) == VG_CUDA_SUCCESS && active != 0;
}

struct activation {
    int device; /* -1: nothing to do */
    int saved_errno;
    bool searching; /* this thread has the list below */
};

/* A list of PIDs is too large for a stack; of several threads that activate at once one looks for the host
 * PID. */
static struct vg_pids pids_before;
static _Atomic uint32_t searching;

static struct activation before_activation(int cuda_device) {
    struct activation activation = {.device = -1, .saved_errno = errno};
    if (vg_ready() != VG_MODE_COUNT)
        return activation;
    activation.device = vg_device_of(cuda_device);
    activation.searching = activation.device >= 0 && atomic_exchange(&searching, 1) == 0;
    if (activation.searching)
        vg_host_pid_before(&pids_before, activation.device);
    return activation;
}

static void after_activation(const struct activation *activation, int result) {
    vg_thread.device = 0;
    if (activation->device < 0)
        return;
    if (result == VG_CUDA_SUCCESS) {
        if (activation->searching)
            vg_host_pid_after(&pids_before, activation->device);
        measure(activation->device);
        vg_watch_look();
    }
    if (activation->searching)
        atomic_store(&searching, 0);
    errno = activation->saved_errno;
}

int vg_primary_retain(vg_fn_primary_retain driver, void **context, int device) {
    enum vg_mode mode = vg_ready();
    if (mode == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    if (mode == VG_MODE_FORWARD || primary_active(device))
        return driver(context, device);
    struct activation activation = before_activation(device);
    int result = driver(context, device);
    after_activation(&activation, result);
    if (result == VG_CUDA_SUCCESS && activation.device >= 0)
        atomic_store(&primary[activation.device], *context);
    return result;
}

int vg_primary_drop(vg_fn_primary_drop driver, int device) {
    int result = driver(device);
    vg_thread.device = 0;
    if (result != VG_CUDA_SUCCESS || vg_ready() != VG_MODE_COUNT || primary_active(device))
        return result;
    int index = vg_device_of(device);
    void *context = index >= 0 ? atomic_exchange(&primary[index], NULL) : NULL;
    if (context != NULL) {
        vg_gate_forget_context(context);
        vg_memory_drop_context(context, index);
    }
    if (index >= 0) {
        uint64_t shown = 0;
        if (vg_nvml_own_memory(index, &shown))
            measure(index);
        else
            set_context_charge(index, 0);
    }
    return result;
}

int vg_ctx_create(vg_fn_ctx_create driver, void **context, unsigned flags, int device) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct activation activation = before_activation(device);
    int result = driver(context, flags, device);
    after_activation(&activation, result);
    return result;
}

int vg_ctx_create_affinity(vg_fn_ctx_create_affinity driver, void **context, void *affinity, int count,
                           unsigned flags, int device) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct activation activation = before_activation(device);
    int result = driver(context, affinity, count, flags, device);
    after_activation(&activation, result);
    return result;
}

int vg_ctx_create_params(vg_fn_ctx_create_params driver, void **context, void *params, unsigned flags,
                         int device) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    struct activation activation = before_activation(device);
    int result = driver(context, params, flags, device);
    after_activation(&activation, result);
    return result;
}

int vg_ctx_destroy(vg_fn_ctx_destroy driver, void *context) {
    int result = driver(context);
    vg_thread.device = 0;
    if (result != VG_CUDA_SUCCESS || vg_ready() != VG_MODE_COUNT)
        return result;
    vg_gate_forget_context(context);
    for (int device = 0; device < VG_MAX_DEVICES; device++) {
        uint64_t before = atomic_load(&vg_process.space.own->used[device].total);
        if (before == 0)
            continue;
        vg_memory_drop_context(context, device);
        uint64_t shown = 0;
        if (vg_nvml_own_memory(device, &shown))
            measure(device);
        else
            set_context_charge(device, 0);
    }
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
