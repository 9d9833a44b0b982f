#define _GNU_SOURCE
#include "devices.h"

#include "hooks.h"
#include "process.h"
#include "util.h"

#include <stdio.h>
#include <string.h>

enum { MAX_CUDA_DEVICES = 64 };
static const uint64_t retry_ns = 5000000000u;

static int8_t region_of_cuda[MAX_CUDA_DEVICES];
static char known_uuid[VG_MAX_DEVICES]
                      [VG_UUID_LENGTH]; /* by the driver, of region devices that this process sees */
static int cuda_count;

static bool cuda_uuid(int cuda_device, char *text) {
    unsigned char b[16];
    if (vg_call_cuDeviceGetUuid_v2(b, cuda_device) != VG_CUDA_SUCCESS &&
        vg_call_cuDeviceGetUuid(b, cuda_device) != VG_CUDA_SUCCESS)
        return false;
    snprintf(text, VG_UUID_LENGTH, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
             b[15]);
    return true;
}

void vg_devices_identify(struct vg_region_seed *seed) {
    unsigned count = 0;
    if (vg_call_nvmlInit_v2() == VG_NVML_SUCCESS &&
        vg_call_nvmlDeviceGetCount_v2(&count) == VG_NVML_SUCCESS) {
        for (unsigned n = 0; n < count && n < VG_MAX_DEVICES; n++) {
            void *device;
            if (vg_call_nvmlDeviceGetHandleByIndex_v2(n, &device) == VG_NVML_SUCCESS)
                vg_call_nvmlDeviceGetUUID(device, seed->uuids[n], VG_UUID_LENGTH);
        }
    } else {
        int devices = 0;
        vg_call_cuDeviceGetCount(&devices);
        count = (unsigned)devices;
        for (int c = 0; c < devices && c < VG_MAX_DEVICES; c++)
            cuda_uuid(c, seed->uuids[c]);
    }
    seed->device_count = count < VG_MAX_DEVICES ? count : VG_MAX_DEVICES;
}

static int find_uuid(const struct vg_region *region, const char *uuid) {
    for (int r = 0; r < VG_MAX_DEVICES; r++)
        if (strncmp(region->uuid[r], uuid, VG_UUID_LENGTH) == 0)
            return r;
    return -1;
}

int vg_devices_map(struct vg_space *space) {
    int count = 0;
    vg_call_cuDeviceGetCount(&count);
    cuda_count = count < MAX_CUDA_DEVICES ? count : MAX_CUDA_DEVICES;
    for (int c = 0; c < cuda_count; c++) {
        char uuid[VG_UUID_LENGTH] = "";
        int r = cuda_uuid(c, uuid) ? find_uuid(space->region, uuid) : -1;
        if (r < 0)
            r = c; /* unnamed, or a region of other cards: the same place is the best that is known */
        region_of_cuda[c] = (int8_t)(r < VG_MAX_DEVICES ? r : -1);
        if (region_of_cuda[c] >= 0)
            memcpy(known_uuid[r], uuid, sizeof uuid);
    }
    return cuda_count == 1 ? region_of_cuda[0] : -1;
}

const char *vg_devices_uuid(int device) {
    return known_uuid[device][0] != '\0' ? known_uuid[device] : NULL;
}

int vg_device_of(int cuda_device) {
    return cuda_device >= 0 && cuda_device < cuda_count ? region_of_cuda[cuda_device] : -1;
}

int vg_current_device(void) {
    if (vg_gate->single_device >= 0)
        return vg_gate->single_device;
    int cuda_device;
    return vg_call_cuCtxGetDevice(&cuda_device) == VG_CUDA_SUCCESS ? vg_device_of(cuda_device) : -1;
}

bool vg_stream_device(void *stream, int *cuda_device) {
    void *context = NULL;
    if (vg_gate->single_device >= 0 || vg_call_cuStreamGetCtx(stream, &context) != VG_CUDA_SUCCESS ||
        vg_call_cuCtxPushCurrent_v2(context) != VG_CUDA_SUCCESS)
        return vg_call_cuCtxGetDevice(cuda_device) == VG_CUDA_SUCCESS;
    bool found = vg_call_cuCtxGetDevice(cuda_device) == VG_CUDA_SUCCESS;
    vg_call_cuCtxPopCurrent_v2(&context);
    return found;
}

int vg_device_of_nvml(void *nvml_device) {
    char uuid[VG_UUID_LENGTH] = "";
    if (vg_call_nvmlDeviceGetUUID(nvml_device, uuid, sizeof uuid) != VG_NVML_SUCCESS || uuid[0] == '\0')
        return -1;
    return find_uuid(vg_here()->region, uuid);
}

static void *find_nvml_device(int device) {
    unsigned count = 0;
    if (vg_call_nvmlInit_v2() != VG_NVML_SUCCESS || vg_call_nvmlDeviceGetCount_v2(&count) != VG_NVML_SUCCESS)
        return NULL;
    for (unsigned n = 0; n < count; n++) {
        void *candidate;
        if (vg_call_nvmlDeviceGetHandleByIndex_v2(n, &candidate) == VG_NVML_SUCCESS &&
            vg_device_of_nvml(candidate) == device)
            return candidate;
    }
    return NULL;
}

void *vg_nvml_device(int device) {
    static _Atomic(void *) known[VG_MAX_DEVICES];
    static _Atomic uint64_t not_before[VG_MAX_DEVICES]; /* after a failure NVML is left alone for a while */
    void *found = atomic_load(&known[device]);
    if (found != NULL)
        return found;
    uint64_t now = vg_now();
    if (now < atomic_load(&not_before[device]))
        return NULL;
    found = find_nvml_device(device);
    if (found != NULL)
        atomic_store(&known[device], found);
    else
        atomic_store(&not_before[device], now + retry_ns);
    return found;
}
