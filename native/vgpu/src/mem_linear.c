/* cuMemAlloc, cuMemAllocPitch, cuMemAllocManaged, cuMemFree: charge first, then ask the driver. */
#include "charge.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"

enum { ATTACH_GLOBAL = 1, PREFERRED_LOCATION = 3, CONCURRENT_MANAGED_ACCESS = 89 };

/* The container may hold more than the card has left: managed memory that prefers the card. */
static bool managed_instead(struct vg_charge *charge, uint64_t *pointer, size_t size) {
    int device, able = 0;
    if (!charge->counted || !vg_process.config.oversubscribe ||
        vg_call_cuCtxGetDevice(&device) != VG_CUDA_SUCCESS ||
        vg_call_cuDeviceGetAttribute(&able, CONCURRENT_MANAGED_ACCESS, device) != VG_CUDA_SUCCESS || !able ||
        vg_call_cuMemAllocManaged(pointer, size, ATTACH_GLOBAL) != VG_CUDA_SUCCESS)
        return false;
    vg_call_cuMemAdvise(*pointer, size, PREFERRED_LOCATION, device);
    charge->managed = true;
    return true;
}

int vg_mem_alloc(vg_fn_mem_alloc driver, uint64_t *pointer, size_t size) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, size);
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, size);
    if (result == VG_CUDA_OUT_OF_MEMORY && managed_instead(&charge, pointer, size))
        result = VG_CUDA_SUCCESS;
    return vg_charge_end(&charge, VG_RECORD_LINEAR, result, result == VG_CUDA_SUCCESS ? *pointer : 0);
}

int vg_mem_alloc_v1(vg_fn_mem_alloc_v1 driver, uint32_t *pointer, unsigned size) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, size);
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, size);
    return vg_charge_end(&charge, VG_RECORD_LINEAR, result, result == VG_CUDA_SUCCESS ? *pointer : 0);
}

int vg_mem_managed(vg_fn_mem_managed driver, uint64_t *pointer, size_t size, unsigned flags) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, size);
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, size, flags);
    return vg_charge_end(&charge, VG_RECORD_LINEAR, result, result == VG_CUDA_SUCCESS ? *pointer : 0);
}

/* The least that a pitched allocation can take; above every limit where it overflows; 0 where the driver
 * refuses. */
static uint64_t pitched(uint64_t width, uint64_t height, unsigned element) {
    uint64_t row, size;
    if (element != 4 && element != 8 && element != 16)
        return 0;
    if (__builtin_add_overflow(width, 511, &row) ||
        __builtin_mul_overflow(row & ~(uint64_t)511, height, &size))
        return UINT64_MAX;
    return size;
}

int vg_mem_pitch(vg_fn_mem_pitch driver, uint64_t *pointer, size_t *pitch, size_t width, size_t height,
                 unsigned element) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, pitched(width, height, element));
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, pitch, width, height, element);
    if (result == VG_CUDA_OUT_OF_MEMORY && managed_instead(&charge, pointer, charge.size)) {
        *pitch = (width + 511) & ~(size_t)511;
        result = VG_CUDA_SUCCESS;
    }
    if (result == VG_CUDA_SUCCESS) {
        vg_charge_resize(&charge, *pitch * height);
        vg_charge_keep(&charge, VG_RECORD_LINEAR, *pointer);
    } else {
        vg_charge_abandon(&charge);
    }
    return result;
}

int vg_mem_pitch_v1(vg_fn_mem_pitch_v1 driver, uint32_t *pointer, unsigned *pitch, unsigned width,
                    unsigned height, unsigned element) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, pitched(width, height, element));
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, pitch, width, height, element);
    if (result == VG_CUDA_SUCCESS) {
        vg_charge_resize(&charge, (uint64_t)*pitch * height);
        vg_charge_keep(&charge, VG_RECORD_LINEAR, *pointer);
    } else {
        vg_charge_abandon(&charge);
    }
    return result;
}

int vg_mem_free(vg_fn_mem_free driver, uint64_t pointer) {
    struct vg_record record;
    bool tracked = vg_charge_freeing(VG_RECORD_LINEAR, pointer, &record);
    int result = driver(pointer);
    if (tracked)
        vg_charge_freed(VG_RECORD_LINEAR, pointer, &record, result);
    return result;
}

int vg_mem_free_v1(vg_fn_mem_free_v1 driver, uint32_t pointer) {
    struct vg_record record;
    bool tracked = vg_charge_freeing(VG_RECORD_LINEAR, pointer, &record);
    int result = driver(pointer);
    if (tracked)
        vg_charge_freed(VG_RECORD_LINEAR, pointer, &record, result);
    return result;
}

void vg_memory_drop_context(void *context, int device) {
    vg_track_drop((uint64_t)(uintptr_t)context, device, vg_discharge_record);
    vg_pools_settle();
}
