/* Start and end of NVML, versions, error texts, device handles. */
#include "mig.h"
#include "nvml.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { DEVICE_MAGIC = 0x4E564431 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users;
static struct fg_nvml_device handles[FG_MAX_DEVICES];

static nvmlReturn_t start(void) {
    if (fg_open() != 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < fg.visible_count; i++)
        handles[i] = (struct fg_nvml_device){.magic = DEVICE_MAGIC, .index = i, .card = fg.visible[i]};
    users++;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

FG_NVML(nvmlInit, (void), { return start(); })
FG_NVML(nvmlInit_v2, (void), { return start(); })
FG_NVML(nvmlInitWithFlags, (unsigned flags), {
    (void)flags;
    return start();
})
FG_NVML(nvmlShutdown, (void), {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = users > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    users -= users > 0;
    pthread_mutex_unlock(&lock);
    return result;
})

nvmlReturn_t fg_nvml_ready(void) {
    return __atomic_load_n(&users, __ATOMIC_RELAXED) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t fg_nvml_card(nvmlDevice_t device, struct fg_device **card) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (fg_nvml_is_mig(device))
        return NVML_ERROR_NOT_SUPPORTED;
    if (device < &handles[0] || device >= &handles[FG_MAX_DEVICES] || device->magic != DEVICE_MAGIC)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = &fg.shared->devices[device->card];
    return (*card)->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t fg_nvml_card_for(nvmlDevice_t device, int valid, struct fg_device **card) {
    nvmlReturn_t result = fg_nvml_card(device, card);
    return result == NVML_SUCCESS && !valid ? NVML_ERROR_INVALID_ARGUMENT : result;
}

nvmlDevice_t fg_nvml_at(uint32_t index) {
    return index < fg.visible_count ? &handles[index] : NULL;
}

nvmlDevice_t fg_nvml_handle(uint32_t card) {
    for (uint32_t i = 0; i < fg.visible_count; i++)
        if (fg.visible[i] == card)
            return &handles[i];
    return NULL;
}

nvmlReturn_t fg_nvml_text(char *to, unsigned size, const char *text) {
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

FG_API const char *nvmlErrorString(nvmlReturn_t result);
FG_API const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case 0:
        return "Success";
    case 1:
        return "Uninitialized";
    case 2:
        return "Invalid Argument";
    case 3:
        return "Not Supported";
    case 4:
        return "Insufficient Permissions";
    case 5:
        return "Already Initialized";
    case 6:
        return "Not Found";
    case 7:
        return "Insufficient Size";
    case 8:
        return "Insufficient External Power";
    case 9:
        return "Driver Not Loaded";
    case 10:
        return "Timeout";
    case 11:
        return "Interrupt Request Issue";
    case 12:
        return "NVML Shared Library Not Found";
    case 13:
        return "Function Not Found";
    case 14:
        return "Corrupted infoROM";
    case 15:
        return "GPU is lost";
    case 16:
        return "GPU requires restart";
    case 17:
        return "The operating system has blocked the request";
    case 19:
        return "In use by another client";
    case 23:
        return "Insufficient Resources";
    case 18:
        return "RM has detected an NVML/RM version mismatch";
    case 20:
        return "Insufficient Memory";
    case 25:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}

FG_NVML(nvmlSystemGetDriverVersion, (char *text, unsigned size), {
    nvmlReturn_t result = fg_nvml_ready();
    return result == NVML_SUCCESS ? fg_nvml_text(text, size, fg.shared->driver_text) : result;
})

FG_NVML(nvmlSystemGetNVMLVersion, (char *text, unsigned size), {
    char version[48];
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    snprintf(version, sizeof version, "%u.%s", fg.shared->driver_version / 1000, fg.shared->driver_text);
    return fg_nvml_text(text, size, version);
})

static nvmlReturn_t cuda_version(int *version) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result == NVML_SUCCESS && !version)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *version = (int)fg.shared->driver_version;
    return result;
}

FG_NVML(nvmlSystemGetCudaDriverVersion, (int *version), { return cuda_version(version); })
FG_NVML(nvmlSystemGetCudaDriverVersion_v2, (int *version), { return cuda_version(version); })

static nvmlReturn_t device_count(unsigned *count) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result == NVML_SUCCESS && !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *count = fg.visible_count;
    return result;
}

FG_NVML(nvmlDeviceGetCount, (unsigned *count), { return device_count(count); })
FG_NVML(nvmlDeviceGetCount_v2, (unsigned *count), { return device_count(count); })
FG_NVML(nvmlUnitGetCount, (unsigned *count), {
    nvmlReturn_t result = fg_nvml_ready();
    if (result == NVML_SUCCESS && !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *count = 0;
    return result;
})

static nvmlReturn_t by_index(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!device || index >= fg.visible_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (fg.shared->devices[fg.visible[index]].lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = &handles[index];
    return NVML_SUCCESS;
}

FG_NVML(nvmlDeviceGetHandleByIndex, (unsigned index, nvmlDevice_t *device),
        { return by_index(index, device); })
FG_NVML(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice_t *device),
        { return by_index(index, device); })

enum wanted { BY_UUID, BY_BUS_ID, BY_SERIAL };

static nvmlReturn_t by_text(const char *text, enum wanted what, nvmlDevice_t *device) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!text || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < fg.visible_count; i++) {
        const struct fg_device *card = &fg.shared->devices[fg.visible[i]];
        int same = what == BY_UUID ? strcasecmp(card->uuid, text) == 0
                   : what == BY_SERIAL
                       ? strcmp(card->serial, text) == 0
                       : strcasecmp(card->bus_id, text) == 0 || strcasecmp(card->bus_id + 4, text) == 0;
        if (same)
            return by_index(i, device);
    }
    uint32_t card, compute;
    if (what == BY_UUID && fg_mig_by_uuid(fg.shared, text, &card, &compute) == 0 && fg_nvml_handle(card)) {
        *device = fg_nvml_mig_handle(card, compute);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

FG_NVML(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device),
        { return by_text(uuid, BY_UUID, device); })
FG_NVML(nvmlDeviceGetHandleBySerial, (const char *serial, nvmlDevice_t *device),
        { return by_text(serial, BY_SERIAL, device); })
FG_NVML(nvmlDeviceGetHandleByPciBusId, (const char *bus_id, nvmlDevice_t *device),
        { return by_text(bus_id, BY_BUS_ID, device); })
FG_NVML(nvmlDeviceGetHandleByPciBusId_v2, (const char *bus_id, nvmlDevice_t *device),
        { return by_text(bus_id, BY_BUS_ID, device); })
