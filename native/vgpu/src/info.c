/* cuMemGetInfo and cuDeviceTotalMem: the limit instead of the card. */
#include "admit.h"
#include "devices.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint32_t saturated(uint64_t value) {
    return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

/* The limit of the current device, or 0: the driver's numbers stay. */
static uint64_t current_limit(int *device) {
    *device = vg_ready() == VG_MODE_COUNT ? vg_current_device() : -1;
    return *device >= 0 ? vg_memory_limit(*device) : 0;
}

static uint64_t limited_free(int device, uint64_t total, uint64_t real_free) {
    vg_pools_settle();
    vg_vmm_settle();
    uint64_t used = vg_reserved_total(vg_here(), device);
    uint64_t free_bytes = used < total ? total - used : 0;
    return vg_process.config.oversubscribe ? free_bytes : smaller(free_bytes, real_free);
}

int vg_mem_info(vg_fn_mem_info driver, size_t *free_bytes, size_t *total_bytes) {
    size_t real_free = 0, real_total = 0;
    int device, result = driver(free_bytes, total_bytes);
    uint64_t limit = result == VG_CUDA_SUCCESS ? current_limit(&device) : 0;
    if (limit == 0)
        return result;
    result = driver(&real_free, &real_total);
    if (result != VG_CUDA_SUCCESS)
        return result;
    uint64_t total = vg_process.config.oversubscribe ? limit : smaller(limit, real_total);
    if (free_bytes != NULL)
        *free_bytes = limited_free(device, total, real_free);
    if (total_bytes != NULL)
        *total_bytes = total;
    return result;
}

int vg_mem_info_v1(vg_fn_mem_info_v1 driver, unsigned *free_bytes, unsigned *total_bytes) {
    int device, result = driver(free_bytes, total_bytes);
    uint64_t limit = result == VG_CUDA_SUCCESS ? current_limit(&device) : 0;
    if (limit == 0)
        return result;
    if (free_bytes != NULL)
        *free_bytes =
            saturated(limited_free(device, limit, *free_bytes == UINT32_MAX ? UINT64_MAX : *free_bytes));
    if (total_bytes != NULL)
        *total_bytes =
            *total_bytes == UINT32_MAX ? saturated(limit) : saturated(smaller(limit, *total_bytes));
    return result;
}

static uint64_t device_limit(int cuda_device) {
    int device = vg_ready() == VG_MODE_COUNT ? vg_device_of(cuda_device) : -1;
    return device >= 0 ? vg_memory_limit(device) : 0;
}

int vg_total_mem(vg_fn_total_mem driver, size_t *bytes, int device) {
    int result = driver(bytes, device);
    uint64_t limit = result == VG_CUDA_SUCCESS && bytes != NULL ? device_limit(device) : 0;
    if (limit != 0)
        *bytes = smaller(limit, *bytes);
    return result;
}

int vg_total_mem_v1(vg_fn_total_mem_v1 driver, unsigned *bytes, int device) {
    int result = driver(bytes, device);
    uint64_t limit = result == VG_CUDA_SUCCESS && bytes != NULL ? device_limit(device) : 0;
    if (limit != 0)
        *bytes = *bytes == UINT32_MAX ? saturated(limit) : saturated(smaller(limit, *bytes));
    return result;
}
