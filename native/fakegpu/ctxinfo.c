/* What programs ask of and set in contexts. */
#include "stream.h"

FG_FUNCTION(cuCtxGetDevice, (CUdevice * device), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS && !device)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *device = context->ordinal;
    return result;
})

FG_FUNCTION(cuCtxGetDevice_v2, (CUdevice * device, CUcontext wanted), {
    struct fg_context *context = wanted;
    CUresult result = wanted ? (fg_context_known(wanted) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT)
                             : fg_need_context(&context);
    if (result == CUDA_SUCCESS && !device)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *device = context->ordinal;
    return result;
})

static CUresult synchronize(CUcontext wanted) {
    struct fg_context *context = wanted;
    CUresult result = wanted ? (fg_context_known(wanted) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT)
                             : fg_need_context(&context);
    if (result == CUDA_SUCCESS)
        result = fg_forbidden_in_capture();
    if (result != CUDA_SUCCESS || fg_driver.zero_cost)
        return result;
    fg_engine_wait(context->card, fg_engine_mark(context->card));
    fg_pools_settle(context->card);
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuCtxSynchronize, (void), { return synchronize(NULL); })
FG_FUNCTION(cuCtxSynchronize_v2, (CUcontext context), { return synchronize(context); })

FG_FUNCTION(cuCtxGetFlags, (unsigned *flags), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS && !flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *flags = context->flags;
    return result;
})

FG_FUNCTION(cuCtxSetFlags, (unsigned flags), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS)
        context->flags = flags;
    return result;
})

FG_FUNCTION(cuCtxGetId, (CUcontext wanted, unsigned long long *id), {
    struct fg_context *context = wanted;
    CUresult result = wanted ? (fg_context_known(wanted) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT)
                             : fg_need_context(&context);
    if (result == CUDA_SUCCESS && !id)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *id = context->id;
    return result;
})

FG_FUNCTION(cuCtxGetApiVersion, (CUcontext wanted, unsigned *version), {
    struct fg_context *context = wanted;
    CUresult result = wanted ? (fg_context_known(wanted) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT)
                             : fg_need_context(&context);
    if (result == CUDA_SUCCESS && !version)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *version = context->api_version;
    return result;
})

/* Limits: stack 0, printf FIFO 1, malloc heap 2. Settings are accepted and not kept: nothing here depends on
 * them. */
FG_FUNCTION(cuCtxGetLimit, (size_t *value, int number), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || number < 0 || number > 6)
        return CUDA_ERROR_INVALID_VALUE;
    *value = number == 0 ? 1024 : number == 1 ? 1048576 : number == 2 ? 8388608 : 0;
    return CUDA_SUCCESS;
})
FG_FUNCTION(cuCtxSetLimit, (int number, size_t value), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    (void)value;
    return result != CUDA_SUCCESS       ? result
           : number >= 0 && number <= 6 ? CUDA_SUCCESS
                                        : CUDA_ERROR_INVALID_VALUE;
})

FG_FUNCTION(cuCtxGetCacheConfig, (int *value), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS && value)
        *value = 0;
    return result == CUDA_SUCCESS && !value ? CUDA_ERROR_INVALID_VALUE : result;
})
FG_FUNCTION(cuCtxSetCacheConfig, (int value), {
    struct fg_context *context;
    (void)value;
    return fg_need_context(&context);
})
FG_FUNCTION(cuCtxGetSharedMemConfig, (int *value), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS && value)
        *value = 1;
    return result == CUDA_SUCCESS && !value ? CUDA_ERROR_INVALID_VALUE : result;
})
FG_FUNCTION(cuCtxSetSharedMemConfig, (int value), {
    struct fg_context *context;
    (void)value;
    return fg_need_context(&context);
})

FG_FUNCTION(cuCtxGetStreamPriorityRange, (int *least, int *greatest), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    return flags == 0 && peer && fg_context_known(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
})
FG_FUNCTION(cuCtxDisablePeerAccess, (CUcontext peer), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    return peer && fg_context_known(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
})
