/* Start of the driver and contexts. */
#include "driver.h"
#include "setup.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONTEXT_MAGIC = 0x43545831, GREEN_MAGIC = 0x47524531, STACK = 256 };

struct fg_driver fg_driver;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fg_context *all, primary[FG_MAX_DEVICES];
static uint64_t next_id = 1;
static _Thread_local struct fg_context *stack[STACK];
static _Thread_local int depth;

static void forget_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    memset(&fg_driver, 0, sizeof fg_driver);
    memset(primary, 0, sizeof primary);
    all = NULL;
    depth = 0;
    fg_heap_forget();
    fg_pools_forget();
    fg_streams_forget();
    fg_events_forget();
    fg_modules_forget();
    fg_arrays_forget();
    fg_vmm_forget();
    fg_trace_forget();
    fg_forget_slot();
}

uint32_t fg_cuda_version(void) {
    static uint32_t known;
    uint32_t version = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!version && fg_open() == 0) {
        version = (uint32_t)fg_config_number(fg.path, "FAKEGPU_CUDA_VERSION", 10000, 13990,
                                             fg.shared->driver_version);
        __atomic_store_n(&known, version, __ATOMIC_RELAXED);
    }
    return version;
}

static CUresult start(void) {
    static int registered;
    if (fg_attach() != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    fg_driver.count = fg_cuda_devices(fg.shared, fg.visible, fg.visible_count, fg_driver.card);
    if (fg_driver.count == 0)
        return CUDA_ERROR_NO_DEVICE;
    fg_driver.version = fg_cuda_version();
    fg_driver.zero_cost = (int)fg_config_number(fg.path, "FAKEGPU_ZERO_COST", 0, 1, 0);
    if (!registered)
        pthread_atfork(NULL, NULL, forget_in_child);
    registered = 1;
    fg_driver.initialized = 1;
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuInit, (unsigned int flags), {
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = fg_driver.initialized ? CUDA_SUCCESS : start();
    pthread_mutex_unlock(&lock);
    return result;
})

CUresult fg_need_device(CUdevice device) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    return device >= 0 && (uint32_t)device < fg_driver.count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

struct fg_context *fg_current(void) {
    return depth > 0 ? stack[depth - 1] : NULL;
}

CUresult fg_need_context(struct fg_context **context) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = fg_current();
    if (!*context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*context)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

int fg_context_known(const struct fg_context *context) {
    for (uint32_t i = 0; i < FG_MAX_DEVICES; i++)
        if (context == &primary[i])
            return primary[i].alive;
    int known = 0;
    pthread_mutex_lock(&lock);
    for (struct fg_context *c = all; c && !known; c = c->next)
        known = c == context && c->alive;
    pthread_mutex_unlock(&lock);
    return known;
}

static CUresult activate(struct fg_context *context, CUdevice device, unsigned flags) {
    uint32_t card = fg_driver.card[device];
    int64_t size = (int64_t)fg.shared->context_bytes;
    if (fg_account(card, FG_CONTEXT, size, size) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    __atomic_fetch_add(&fg_own(card)->contexts, 1, __ATOMIC_RELAXED);
    context->magic = CONTEXT_MAGIC;
    context->ordinal = device;
    context->card = card;
    context->flags = flags;
    context->api_version = fg_driver.version >= 13000 ? 13000 : 3020;
    context->id = next_id++;
    context->legacy = NULL;
    context->alive = 1;
    return CUDA_SUCCESS;
}

static void deactivate(struct fg_context *context) {
    int64_t size = (int64_t)fg.shared->context_bytes;
    fg_engine_wait(context->card, fg_engine_mark(context->card));
    fg_streams_drop_context(context);
    fg_modules_drop_context(context);
    fg_arrays_drop_context(context);
    fg_heap_drop_context(context);
    fg_pools_release(context->card);
    context->alive = 0;
    context->retained = 0;
    fg_account(context->card, FG_CONTEXT, -size, -size);
    __atomic_fetch_sub(&fg_own(context->card)->contexts, 1, __ATOMIC_RELAXED);
}

static CUresult primary_retain(CUcontext *context, CUdevice device) {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct fg_context *own = &primary[device];
    own->primary = 1;
    if (!own->alive)
        result = activate(own, device, own->flags);
    if (result == CUDA_SUCCESS) {
        own->retained++;
        *context = own;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

FG_FUNCTION(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device),
            { return primary_retain(context, device); })

static CUresult primary_release(CUdevice device) {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    if (!primary[device].alive || primary[device].retained == 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--primary[device].retained == 0)
        deactivate(&primary[device]);
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult primary_reset(CUdevice device) {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    if (primary[device].alive)
        deactivate(&primary[device]);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult primary_flags(CUdevice device, unsigned flags) {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS)
        primary[device].flags = flags;
    return result;
}

FG_FUNCTION(cuDevicePrimaryCtxRelease, (CUdevice device), { return primary_release(device); })
FG_FUNCTION(cuDevicePrimaryCtxRelease_v2, (CUdevice device), { return primary_release(device); })
FG_FUNCTION(cuDevicePrimaryCtxReset, (CUdevice device), { return primary_reset(device); })
FG_FUNCTION(cuDevicePrimaryCtxReset_v2, (CUdevice device), { return primary_reset(device); })
FG_FUNCTION(cuDevicePrimaryCtxSetFlags, (CUdevice device, unsigned flags),
            { return primary_flags(device, flags); })
FG_FUNCTION(cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned flags),
            { return primary_flags(device, flags); })
FG_FUNCTION(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active), {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = primary[device].flags;
    *active = primary[device].alive;
    return CUDA_SUCCESS;
})

/* A green context retains the primary context of its device and is that, with all its multiprocessors: what
 * it divides is not modelled. */
struct green {
    uint32_t magic;
    CUdevice device;
};

FG_FUNCTION(cuGreenCtxCreate,
            (struct green * *handle, const void *resources, CUdevice device, unsigned flags), {
                CUcontext context;
                if (!handle || flags > 1)
                    return CUDA_ERROR_INVALID_VALUE;
                (void)resources;
                CUresult result = primary_retain(&context, device);
                struct green *green = result == CUDA_SUCCESS ? calloc(1, sizeof *green) : NULL;
                if (green) {
                    *green = (struct green){GREEN_MAGIC, device};
                    *handle = green;
                }
                return result;
            })

FG_FUNCTION(cuGreenCtxDestroy, (struct green * green), {
    if (!green || green->magic != GREEN_MAGIC)
        return CUDA_ERROR_INVALID_CONTEXT;
    green->magic = 0; /* never freed: a stale handle must stay recognisable */
    return primary_release(green->device);
})

FG_FUNCTION(cuCtxFromGreenCtx, (CUcontext * context, struct green *green), {
    if (!context || !green || green->magic != GREEN_MAGIC)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = &primary[green->device];
    return CUDA_SUCCESS;
})

static CUresult push(struct fg_context *context) {
    if (depth == STACK)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *handle, unsigned flags, CUdevice device) {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    struct fg_context *context = handle ? calloc(1, sizeof *context) : NULL;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    result = activate(context, device, flags);
    if (result == CUDA_SUCCESS) {
        context->next = all; /* never freed: a stale handle must stay recognisable */
        all = context;
        push(context);
        *handle = context;
    } else {
        free(context);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

FG_FUNCTION(cuCtxCreate, (CUcontext * context, unsigned flags, CUdevice device),
            { return create(context, flags, device); })
FG_FUNCTION(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device),
            { return create(context, flags, device); })
FG_FUNCTION(cuCtxCreate_v3, (CUcontext * context, void *affinity, int count, unsigned flags, CUdevice device),
            {
                return count < 0 || (count > 0 && !affinity) ? CUDA_ERROR_INVALID_VALUE
                                                             : create(context, flags, device);
            })
FG_FUNCTION(cuCtxCreate_v4, (CUcontext * context, void *parameters, unsigned flags, CUdevice device), {
    (void)parameters;
    return create(context, flags, device);
})

static CUresult destroy(CUcontext context) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!context || !fg_context_known(context) || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    deactivate(context);
    pthread_mutex_unlock(&lock);
    if (fg_current() == context)
        depth--;
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuCtxAttach, (CUcontext * context, unsigned flags), {
    struct fg_context *current;
    CUresult result = fg_need_context(&current);
    if (result != CUDA_SUCCESS)
        return result;
    if (!context || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (current->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    current->attached++;
    pthread_mutex_unlock(&lock);
    *context = current;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuCtxDetach, (CUcontext context), {
    struct fg_context *current;
    CUresult result = fg_need_context(&current);
    if (result != CUDA_SUCCESS)
        return result;
    if (context != current || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    int last = context->attached == 0;
    context->attached -= !last;
    pthread_mutex_unlock(&lock);
    return last ? destroy(context) : CUDA_SUCCESS;
})

static CUresult push_checked(CUcontext context) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    return context && fg_context_known(context) ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult pop(CUcontext *context) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuCtxDestroy, (CUcontext context), { return destroy(context); })
FG_FUNCTION(cuCtxDestroy_v2, (CUcontext context), { return destroy(context); })
FG_FUNCTION(cuCtxPushCurrent, (CUcontext context), { return push_checked(context); })
FG_FUNCTION(cuCtxPushCurrent_v2, (CUcontext context), { return push_checked(context); })
FG_FUNCTION(cuCtxPopCurrent, (CUcontext * context), { return pop(context); })
FG_FUNCTION(cuCtxPopCurrent_v2, (CUcontext * context), { return pop(context); })

FG_FUNCTION(cuCtxSetCurrent, (CUcontext context), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (context && !fg_context_known(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth > 0)
        depth--;
    return context ? push(context) : CUDA_SUCCESS;
})

FG_FUNCTION(cuCtxGetCurrent, (CUcontext * context), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = fg_current();
    return CUDA_SUCCESS;
})
