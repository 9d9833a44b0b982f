/* Event sets; events come from `fakegpud xid` (daemon.c). */
#include "nvml.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fg_nvml_event_set {
    uint32_t magic;
    uint64_t types[FG_MAX_DEVICES], seen[FG_MAX_DEVICES];
};

enum { SET_MAGIC = 0x4E565331 };

static int known(nvmlEventSet_t set) {
    return set && set->magic == SET_MAGIC;
}

FG_NVML(nvmlEventSetCreate, (nvmlEventSet_t * set), {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    if (!*set)
        return NVML_ERROR_MEMORY;
    (*set)->magic = SET_MAGIC;
    return NVML_SUCCESS;
})

FG_NVML(nvmlEventSetFree, (nvmlEventSet_t set), {
    if (!known(set))
        return NVML_ERROR_INVALID_ARGUMENT;
    set->magic = 0;
    free(set);
    return NVML_SUCCESS;
})

FG_NVML(nvmlDeviceRegisterEvents, (nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!known(set) || types == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (types & ~(unsigned long long)(NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC | NVML_EVENT_XID))
        return NVML_ERROR_NOT_SUPPORTED;
    set->types[device->card] |= types;
    set->seen[device->card] = __atomic_load_n(&card->xid_count, __ATOMIC_ACQUIRE);
    return NVML_SUCCESS;
})

static int next_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    for (uint32_t d = 0; d < fg.shared->device_count; d++) {
        struct fg_device *card = &fg.shared->devices[d];
        uint64_t count = __atomic_load_n(&card->xid_count, __ATOMIC_ACQUIRE);
        if (set->types[d] && count > FG_XIDS && set->seen[d] < count - FG_XIDS)
            set->seen[d] = count - FG_XIDS;
        while (set->types[d] && set->seen[d] < count) {
            const struct fg_xid *event = &card->xids[set->seen[d]++ % FG_XIDS];
            if (!(event->type & set->types[d]))
                continue;
            *data = (nvmlEventData_t){.device = fg_nvml_handle(d),
                                      .eventType = event->type,
                                      .eventData = event->data,
                                      .gpuInstanceId = event->gpu_instance,
                                      .computeInstanceId = event->compute_instance};
            return 1;
        }
    }
    return 0;
}

static nvmlReturn_t wait_event(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!known(set) || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t end = fg_now() + (uint64_t)timeout_ms * 1000000;
    for (;;) {
        if (next_event(set, data))
            return NVML_SUCCESS;
        uint64_t now = fg_now();
        if (now >= end)
            return NVML_ERROR_TIMEOUT;
        uint64_t pause = end - now < 10000000 ? end - now : 10000000;
        struct timespec t = {.tv_nsec = (long)pause};
        nanosleep(&t, NULL);
    }
}

FG_NVML(nvmlEventSetWait, (nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms), {
    nvmlEventData_t full;
    nvmlReturn_t result = wait_event(set, data ? &full : NULL, timeout_ms);
    if (result == NVML_SUCCESS)
        memcpy(data, &full, 24); /* version 1 ends before the instances */
    return result;
})
FG_NVML(nvmlEventSetWait_v2, (nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms),
        { return wait_event(set, data, timeout_ms); })
