/* cuDevice*, versions and error texts. */
#include "driver.h"
#include "setup.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static struct fg_device *card_of(CUdevice device) {
    return &fg.shared->devices[fg_driver.card[device]];
}

FG_FUNCTION(cuDriverGetVersion, (int *version), {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = (int)fg_cuda_version();
    return *version ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
})

FG_FUNCTION(cuDeviceGetCount, (int *count), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = (int)fg_driver.count;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuDeviceGet, (CUdevice * device, int ordinal), {
    CUresult result = fg_need_device(ordinal);
    if (result == CUDA_SUCCESS && !device)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return result;
})

FG_FUNCTION(cuDeviceGetName, (char *name, int size, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!name || size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)size, "%s", card_of(device)->name);
    return CUDA_SUCCESS;
})

static CUresult get_uuid(CUuuid *uuid, CUdevice device) {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(uuid->bytes, card_of(device)->uuid_bytes, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuDeviceGetUuid, (CUuuid * uuid, CUdevice device), { return get_uuid(uuid, device); })
FG_FUNCTION(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device), { return get_uuid(uuid, device); })

FG_FUNCTION(cuDeviceGetLuid, (char *luid, unsigned *mask, CUdevice device), {
    (void)luid, (void)mask, (void)device;
    return CUDA_ERROR_NOT_SUPPORTED;
})

FG_FUNCTION(cuDeviceTotalMem, (unsigned *bytes, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS && !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *bytes =
            card_of(device)->total_bytes > UINT32_MAX ? UINT32_MAX : (unsigned)card_of(device)->total_bytes;
    return result;
})

FG_FUNCTION(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS && !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *bytes = card_of(device)->total_bytes;
    return result;
})

static int pci_bus(const struct fg_device *card) {
    unsigned bus = 0;
    sscanf(card->bus_id, "%*x:%x", &bus);
    return (int)bus;
}

/* Numbers of CUdevice_attribute; those not listed are features, answered 0 unless in the list of ones. */
static int attribute(const struct fg_device *card, int number) {
    const struct fg_model *model = fg_model_of(card);
    static const uint8_t ones[] = {15, 19, 31,  35,  41,  78,  79,  80,  83,  84,  85,  86,  88, 89,
                                   91, 95, 102, 103, 105, 107, 109, 110, 113, 115, 117, 119, 121};
    switch (number) {
    case 1:
        return 1024; /* threads a block */
    case 2:
    case 3:
        return 1024; /* block x, y */
    case 4:
        return 64; /* block z */
    case 5:
        return INT32_MAX; /* grid x */
    case 6:
    case 7:
        return 65535; /* grid y, z */
    case 8:
        return 49152; /* shared memory a block */
    case 9:
        return 65536; /* constant memory */
    case 10:
        return 32; /* warp */
    case 11:
        return INT32_MAX; /* pitch */
    case 12:
        return 65536; /* registers a block */
    case 13:
        return (int)model->clock_mhz * 1000;
    case 14:
        return 512; /* texture alignment */
    case 16:
        return (int)model->sm_count;
    case 23:
        return 32; /* texture pitch alignment */
    case 32:
        return 1; /* ECC */
    case 33:
        return pci_bus(card);
    case 36:
        return (int)model->memory_clock_mhz * 1000;
    case 37:
        return (int)model->bus_width_bits;
    case 38:
        return (int)model->l2_kib * 1024;
    case 39:
        return (int)model->threads_per_sm;
    case 40:
        return 3; /* asynchronous engines */
    case 75:
        return (int)model->major;
    case 76:
        return (int)model->minor;
    case 81:
        return (int)model->shared_kib * 1024; /* shared memory an SM */
    case 82:
        return 65536; /* registers an SM */
    case 97:
        return (int)(model->shared_kib - 1) * 1024; /* opt-in shared memory a block */
    case 106:
        return 32; /* blocks an SM */
    case 111:
        return 1024; /* reserved shared memory a block */
    case 134:
        return (int)card->numa_node;
    default:
        break;
    }
    return number < 256 && memchr(ones, number, sizeof ones) != NULL;
}

FG_FUNCTION(cuDeviceGetAttribute, (int *value, int number, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || number < 1 || number > 200)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute(card_of(device), number);
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuDeviceGetProperties, (CUdevprop * properties, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    *properties = (CUdevprop){
        1024, {1024, 1024, 64}, {INT32_MAX, 65535, 65535}, 49152, 65536, 32, INT32_MAX, 65536, 0, 512};
    properties->clock_rate = (int)fg_model_of(card_of(device))->clock_mhz * 1000;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuDeviceComputeCapability, (int *major, int *minor, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = (int)fg_model_of(card_of(device))->major;
    *minor = (int)fg_model_of(card_of(device))->minor;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuDeviceGetPCIBusId, (char *text, int size, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!text || size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)size, "%s", card_of(device)->bus_id + 4); /* CUDA prints a domain of four digits */
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuDeviceGetByPCIBusId, (CUdevice * device, const char *text), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!device || !text)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < fg_driver.count; i++)
        if (strcasecmp(card_of((CUdevice)i)->bus_id, text) == 0 ||
            strcasecmp(card_of((CUdevice)i)->bus_id + 4, text) == 0) {
            *device = (CUdevice)i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
})

FG_FUNCTION(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer), {
    CUresult result = fg_need_device(device) != CUDA_SUCCESS ? fg_need_device(device) : fg_need_device(peer);
    if (result == CUDA_SUCCESS && !can)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *can = device != peer;
    return result;
})

FG_FUNCTION(cuDeviceGetP2PAttribute, (int *value, int number, CUdevice device, CUdevice peer), {
    CUresult result = fg_need_device(device) != CUDA_SUCCESS ? fg_need_device(device) : fg_need_device(peer);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || device == peer)
        return CUDA_ERROR_INVALID_VALUE;
    *value = number != 1; /* access, atomics and arrays yes; performance rank 0 */
    return CUDA_SUCCESS;
})

struct error_text {
    CUresult code;
    const char *name, *text;
};

static const struct error_text errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {103, "CUDA_ERROR_INTEGRITY_CHECK_FAILED", "integrity checks failed"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const struct error_text *error_of(CUresult code) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].code == code)
            return &errors[i];
    return NULL;
}

FG_FUNCTION(cuGetErrorName, (CUresult code, const char **name), {
    const struct error_text *error = error_of(code);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = error ? error->name : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
})

FG_FUNCTION(cuGetErrorString, (CUresult code, const char **text), {
    const struct error_text *error = error_of(code);
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = error ? error->text : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
})

/* The tables behind this call carry undocumented interfaces; a simulated driver has none. */
FG_FUNCTION(cuGetExportTable, (const void **table, const CUuuid *id), {
    (void)id;
    if (table)
        *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
})
