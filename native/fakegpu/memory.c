/* Plain, pitched, managed and host memory; what is known about pointers. */
#include "driver.h"

#include <string.h>

#define FREEABLE (1u << FG_BLOCK_PLAIN | 1u << FG_BLOCK_MANAGED | 1u << FG_BLOCK_POOL)

static CUresult allocate(CUdeviceptr *pointer, size_t size, enum fg_block_kind kind) {
    struct fg_context *context;
    uintptr_t start;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pointer || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = fg_forbidden_in_capture();
    if (result == CUDA_SUCCESS)
        result = fg_heap_allocate(context, size, kind, NULL, &start);
    if (result == CUDA_SUCCESS)
        *pointer = start;
    return result;
}

static CUresult free_pointer(CUdeviceptr pointer) {
    struct fg_context *context;
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (pointer == 0)
        return CUDA_SUCCESS;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    result = fg_forbidden_in_capture();
    if (result == CUDA_SUCCESS && !fg_driver.zero_cost)
        fg_engine_wait(context->card, fg_engine_mark(context->card)); /* a free waits for the card */
    return result == CUDA_SUCCESS ? fg_heap_free((uintptr_t)pointer, FREEABLE) : result;
}

FG_FUNCTION(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t size),
            { return allocate(pointer, size, FG_BLOCK_PLAIN); })
FG_FUNCTION(cuMemFree_v2, (CUdeviceptr pointer), { return free_pointer(pointer); })

/* The first generation had 32-bit device pointers; memory that does not fit one is given back and refused. */
static CUresult first_generation(CUdeviceptr wide, unsigned *pointer) {
    if (!pointer || wide > UINT32_MAX) {
        fg_heap_free((uintptr_t)wide, FREEABLE);
        return pointer ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    }
    *pointer = (unsigned)wide;
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuMemAlloc, (unsigned *pointer, unsigned size), {
    CUdeviceptr wide = 0;
    CUresult result = allocate(&wide, size, FG_BLOCK_PLAIN);
    if (result != CUDA_SUCCESS)
        return result;
    return first_generation(wide, pointer);
})
FG_FUNCTION(cuMemFree, (unsigned pointer), { return free_pointer(pointer); })

static CUresult allocate_pitched(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                 unsigned element) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pitch || (element != 4 && element != 8 && element != 16) || width == 0 || height == 0 ||
        fg_round(width, 512) > SIZE_MAX / height)
        return CUDA_ERROR_INVALID_VALUE;
    result = allocate(pointer, fg_round(width, 512) * height, FG_BLOCK_PLAIN);
    if (result == CUDA_SUCCESS)
        *pitch = fg_round(width, 512);
    return result;
}

FG_FUNCTION(cuMemAllocPitch_v2,
            (CUdeviceptr * pointer, size_t *pitch, size_t width, size_t height, unsigned element),
            { return allocate_pitched(pointer, pitch, width, height, element); })

FG_FUNCTION(cuMemAllocPitch,
            (unsigned *pointer, unsigned *pitch, unsigned width, unsigned height, unsigned element), {
                CUdeviceptr wide = 0;
                size_t row = 0;
                CUresult result = allocate_pitched(&wide, &row, width, height, element);
                if (result != CUDA_SUCCESS)
                    return result;
                result = first_generation(wide, pitch ? pointer : NULL);
                if (result == CUDA_SUCCESS)
                    *pitch = (unsigned)row;
                return result;
            })

FG_FUNCTION(cuMemAllocManaged, (CUdeviceptr * pointer, size_t size, unsigned flags), {
    return (flags & 3) == 0 || flags > 7 ? CUDA_ERROR_INVALID_VALUE
                                         : allocate(pointer, size, FG_BLOCK_MANAGED);
})

static CUresult get_info(uint64_t *available, uint64_t *total) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS)
        fg_memory_info(context->card, available, total);
    return result;
}

FG_FUNCTION(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes), {
    uint64_t available;
    uint64_t total;
    CUresult result = get_info(&available, &total);
    if (result != CUDA_SUCCESS)
        return result;
    if (free_bytes)
        *free_bytes = available;
    if (total_bytes)
        *total_bytes = total;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuMemGetInfo, (unsigned *free_bytes, unsigned *total_bytes), {
    uint64_t available;
    uint64_t total;
    CUresult result = get_info(&available, &total);
    if (result != CUDA_SUCCESS)
        return result;
    if (free_bytes)
        *free_bytes = available > UINT32_MAX ? UINT32_MAX : (unsigned)available;
    if (total_bytes)
        *total_bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned)total;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *size, CUdeviceptr pointer), {
    struct fg_context *context;
    struct fg_block block;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!fg_heap_find((uintptr_t)pointer, &block))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = block.start;
    if (size)
        *size = block.size;
    return CUDA_SUCCESS;
})

static CUresult allocate_host(void **pointer, size_t size) {
    struct fg_context *context;
    uintptr_t start;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pointer || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = fg_heap_allocate(context, size, FG_BLOCK_HOST, NULL, &start);
    if (result == CUDA_SUCCESS)
        *pointer = (void *)start;
    return result;
}

FG_FUNCTION(cuMemAllocHost_v2, (void **pointer, size_t size), { return allocate_host(pointer, size); })
FG_FUNCTION(cuMemAllocHost, (void **pointer, unsigned size), { return allocate_host(pointer, size); })
FG_FUNCTION(cuMemHostAlloc, (void **pointer, size_t size, unsigned flags),
            { return flags > 15 ? CUDA_ERROR_INVALID_VALUE : allocate_host(pointer, size); })

FG_FUNCTION(cuMemFreeHost, (void *pointer), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    return pointer ? fg_heap_free((uintptr_t)pointer, 1u << FG_BLOCK_HOST) : CUDA_SUCCESS;
})

static CUresult register_host(void *pointer, size_t size) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pointer || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = fg_heap_enter(context, pointer, size, FG_BLOCK_REGISTERED);
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : result;
}

FG_FUNCTION(cuMemHostRegister, (void *pointer, size_t size, unsigned flags), {
    (void)flags;
    return register_host(pointer, size);
})
FG_FUNCTION(cuMemHostRegister_v2, (void *pointer, size_t size, unsigned flags), {
    (void)flags;
    return register_host(pointer, size);
})

FG_FUNCTION(cuMemHostUnregister, (void *pointer), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = fg_heap_free((uintptr_t)pointer, 1u << FG_BLOCK_REGISTERED);
    return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
})

FG_FUNCTION(cuMemHostGetDevicePointer_v2, (CUdeviceptr * device, void *pointer, unsigned flags), {
    struct fg_block block;
    if (!device || flags != 0 || !fg_heap_find((uintptr_t)pointer, &block))
        return CUDA_ERROR_INVALID_VALUE;
    *device = (uintptr_t)pointer;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuMemHostGetFlags, (unsigned *flags, void *pointer), {
    struct fg_block block;
    if (!flags || !fg_heap_find((uintptr_t)pointer, &block))
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    return CUDA_SUCCESS;
})

/* CUpointer_attribute numbers; those of other kinds answer 0 of their size. */
static CUresult pointer_attribute(void *data, int number, const struct fg_block *block, CUdeviceptr pointer) {
    int host = block->kind == FG_BLOCK_HOST || block->kind == FG_BLOCK_REGISTERED;
    switch (number) {
    case 1:
        *(CUcontext *)data = block->context;
        return CUDA_SUCCESS;
    case 2:
        *(unsigned *)data = host ? 1 : 2;
        return CUDA_SUCCESS;
    case 3:
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case 4:
        if (!host && block->kind != FG_BLOCK_MANAGED)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = (void *)(uintptr_t)pointer;
        return CUDA_SUCCESS;
    case 6:
    case 7:
        *(unsigned long long *)data = block->id;
        return CUDA_SUCCESS;
    case 8:
        *(unsigned char *)data = block->kind == FG_BLOCK_MANAGED;
        return CUDA_SUCCESS;
    case 9:
        *(int *)data = block->context ? block->context->ordinal : 0;
        return CUDA_SUCCESS;
    case 10:
        *(unsigned char *)data = block->kind == FG_BLOCK_PLAIN;
        return CUDA_SUCCESS;
    case 11:
        *(CUdeviceptr *)data = block->start;
        return CUDA_SUCCESS;
    case 12:
        *(size_t *)data = block->size;
        return CUDA_SUCCESS;
    case 13:
        *(unsigned char *)data = 1;
        return CUDA_SUCCESS;
    case 15:
        *(unsigned long long *)data = 3;
        return CUDA_SUCCESS;
    case 17:
        *(CUmemoryPool *)data = block->pool;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

FG_FUNCTION(cuPointerGetAttribute, (void *data, int number, CUdeviceptr pointer), {
    struct fg_block block;
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!data || !fg_heap_find((uintptr_t)pointer, &block))
        return CUDA_ERROR_INVALID_VALUE;
    return pointer_attribute(data, number, &block, pointer);
})

FG_FUNCTION(cuPointerGetAttributes, (unsigned count, int *numbers, void **data, CUdeviceptr pointer), {
    struct fg_block block;
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!numbers || !data || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    int known = fg_heap_find((uintptr_t)pointer, &block);
    for (unsigned i = 0; i < count;
         i++) /* an unknown pointer gives zeros and success, attribute by attribute */
        if (!known || pointer_attribute(data[i], numbers[i], &block, pointer) != CUDA_SUCCESS)
            memset(data[i], 0,
                   numbers[i] == 8 || numbers[i] == 10 || numbers[i] == 13 ? 1
                   : numbers[i] == 2 || numbers[i] == 9                    ? 4
                                                                           : 8);
    return CUDA_SUCCESS;
})
