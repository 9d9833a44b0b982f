/* What a card is: names, numbers, place in the machine, sensors. */
#include "engine.h"
#include "nvml.h"

#include <stdio.h>
#include <string.h>

/* A function that gives one text or one number of a card, computed by an
 * expression over `card` and `model`. */
#define FG_NVML_TEXT(name, expression)                                                                       \
    FG_NVML(name, (nvmlDevice_t device, char *text, unsigned size), {                                        \
        struct fg_device *card;                                                                              \
        nvmlReturn_t result = fg_nvml_card(device, &card);                                                   \
        return result == NVML_SUCCESS ? fg_nvml_text(text, size, expression) : result;                       \
    })
#define FG_NVML_NUMBER(name, type, expression)                                                               \
    FG_NVML(name, (nvmlDevice_t device, type * value), {                                                     \
        struct fg_device *card;                                                                              \
        nvmlReturn_t result = fg_nvml_card(device, &card);                                                   \
        if (result == NVML_SUCCESS && !value)                                                                \
            return NVML_ERROR_INVALID_ARGUMENT;                                                              \
        if (result == NVML_SUCCESS) {                                                                        \
            const struct fg_model *model = fg_model_of(card);                                                \
            (void)model;                                                                                     \
            *value = (type)(expression);                                                                     \
        }                                                                                                    \
        return result;                                                                                       \
    })

FG_NVML_TEXT(nvmlDeviceGetName, card->name)
FG_NVML_TEXT(nvmlDeviceGetUUID, card->uuid)
FG_NVML_TEXT(nvmlDeviceGetSerial, card->serial)
FG_NVML_TEXT(nvmlDeviceGetVbiosVersion, "92.00.45.00.03")
FG_NVML_TEXT(nvmlDeviceGetBoardPartNumber, "900-00000-0000-000")
FG_NVML_TEXT(nvmlDeviceGetInforomImageVersion, "G506.0200.00.04")

FG_NVML_NUMBER(nvmlDeviceGetIndex, unsigned, device->index)
FG_NVML_NUMBER(nvmlDeviceGetMinorNumber, unsigned, card->minor)
FG_NVML_NUMBER(nvmlDeviceGetBoardId, unsigned, 0x100u * (card->minor + 1))
FG_NVML_NUMBER(nvmlDeviceGetBrand, unsigned, model->brand)
FG_NVML_NUMBER(nvmlDeviceGetArchitecture, unsigned, model->architecture)
FG_NVML_NUMBER(nvmlDeviceGetNumGpuCores, unsigned, model->sm_count * 64)
FG_NVML_NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, model->bus_width_bits)
FG_NVML_NUMBER(nvmlDeviceGetNumaNodeId, unsigned, card->numa_node)
FG_NVML_NUMBER(nvmlDeviceGetPowerUsage, unsigned, model->power_limit_mw / 8)
FG_NVML_NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, model->power_limit_mw)
FG_NVML_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, model->power_limit_mw)
FG_NVML_NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, model->power_limit_mw)
FG_NVML_NUMBER(nvmlDeviceGetPerformanceState, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetPowerState, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetPersistenceMode, unsigned, 1)
FG_NVML_NUMBER(nvmlDeviceGetComputeMode, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetDisplayMode, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetDisplayActive, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetVirtualizationMode, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetMultiGpuBoard, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
FG_NVML_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 4)
FG_NVML_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
FG_NVML_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
FG_NVML_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 0)
FG_NVML_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 0)
FG_NVML_NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long,
               NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC | NVML_EVENT_XID)
FG_NVML_NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long,
               (unsigned long long)model->power_limit_mw / 8 * (fg_now() / 1000000000ull))
FG_NVML_NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, model->mig_capable ? 7 : 0)
FG_NVML_NUMBER(nvmlDeviceIsMigDeviceHandle, unsigned, 0)
FG_NVML_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, 0)

FG_NVML(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t device, unsigned index, nvmlDevice_t *mig), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    (void)index, (void)mig;
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result;
})

FG_NVML(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned *current, unsigned *pending), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!fg_model_of(card)->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = card->mig_mode;
    return NVML_SUCCESS;
})

FG_NVML(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)fg_model_of(card)->major;
    *minor = (int)fg_model_of(card)->minor;
    return NVML_SUCCESS;
})

static void fill_pci(const struct fg_device *card, nvmlPciInfoLegacy_t *pci) {
    const struct fg_model *model = fg_model_of(card);
    memset(pci, 0, sizeof *pci);
    memcpy(pci->busId, card->bus_id + 4, strnlen(card->bus_id + 4, sizeof pci->busId - 1));
    sscanf(card->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    pci->pciDeviceId = model->pci_device_id;
    pci->pciSubSystemId = model->pci_subsystem_id;
}

static nvmlReturn_t pci_of(const struct fg_device *card, nvmlPciInfo_t *pci) {
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlPciInfoLegacy_t legacy;
    fill_pci(card, &legacy);
    memcpy(pci, &legacy, sizeof legacy);
    memcpy(pci->busId, card->bus_id, sizeof pci->busId);
    return NVML_SUCCESS;
}

FG_NVML(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *pci), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    return result == NVML_SUCCESS ? pci_of(card, pci) : result;
})

static nvmlReturn_t legacy_pci(nvmlDevice_t device, nvmlPciInfoLegacy_t *pci) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && !pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        fill_pci(card, pci);
    return result;
}

FG_NVML(nvmlDeviceGetPciInfo, (nvmlDevice_t device, nvmlPciInfoLegacy_t *pci),
        { return legacy_pci(device, pci); })
FG_NVML(nvmlDeviceGetPciInfo_v2, (nvmlDevice_t device, nvmlPciInfoLegacy_t *pci),
        { return legacy_pci(device, pci); })

FG_NVML(nvmlDeviceGetTemperature, (nvmlDevice_t device, unsigned sensor, unsigned *value), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && (!value || sensor != 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *value = card->temperature_c;
    return result;
})

FG_NVML(nvmlDeviceGetTemperatureThreshold, (nvmlDevice_t device, unsigned kind, unsigned *value), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && !value)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *value = kind == 0 ? 92 : 89; /* shutdown, slow down */
    return result;
})

static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned kind, unsigned *value) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && (!value || kind > 3))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *value = kind == 2 ? fg_model_of(card)->memory_clock_mhz : fg_model_of(card)->clock_mhz;
    return result;
}

FG_NVML(nvmlDeviceGetClockInfo, (nvmlDevice_t device, unsigned kind, unsigned *value),
        { return clock_of(device, kind, value); })
FG_NVML(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, unsigned kind, unsigned *value),
        { return clock_of(device, kind, value); })
FG_NVML(nvmlDeviceGetApplicationsClock, (nvmlDevice_t device, unsigned kind, unsigned *value),
        { return clock_of(device, kind, value); })

FG_NVML(nvmlDeviceGetEccMode, (nvmlDevice_t device, unsigned *current, unsigned *pending), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && (!current || !pending))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *current = *pending = 1;
    return result;
})

FG_NVML(nvmlDeviceGetTotalEccErrors,
        (nvmlDevice_t device, unsigned kind, unsigned counter, unsigned long long *value), {
            struct fg_device *card;
            nvmlReturn_t result = fg_nvml_card(device, &card);
            if (result == NVML_SUCCESS && (!value || kind > 1 || counter > 1))
                return NVML_ERROR_INVALID_ARGUMENT;
            if (result == NVML_SUCCESS)
                *value = 0;
            return result;
        })

FG_NVML(nvmlDeviceGetRemappedRows,
        (nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
         unsigned *failed),
        {
            struct fg_device *card;
            nvmlReturn_t result = fg_nvml_card(device, &card);
            if (result == NVML_SUCCESS && (!corrected || !uncorrected || !pending || !failed))
                return NVML_ERROR_INVALID_ARGUMENT;
            if (result == NVML_SUCCESS && fg_model_of(card)->architecture < 7)
                return NVML_ERROR_NOT_SUPPORTED;
            if (result == NVML_SUCCESS)
                *corrected = *uncorrected = *pending = *failed = 0;
            return result;
        })

FG_NVML(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, unsigned counter, unsigned *value), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && (!value || counter > 1))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *value = 0;
    return result;
})

/* --- Topology --- */

FG_NVML(nvmlDeviceGetTopologyCommonAncestor, (nvmlDevice_t one, nvmlDevice_t other, unsigned *level), {
    struct fg_device *a;
    struct fg_device *b;
    nvmlReturn_t result = fg_nvml_card(one, &a);
    if (result == NVML_SUCCESS)
        result = fg_nvml_card(other, &b);
    if (result == NVML_SUCCESS && !level)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) /* internal, several switches, same node, whole system */
        *level = a == b ? 0 : a->minor / 2 == b->minor / 2 ? 20 : a->numa_node == b->numa_node ? 40 : 50;
    return result;
})

FG_NVML(nvmlDeviceGetP2PStatus, (nvmlDevice_t one, nvmlDevice_t other, unsigned index, unsigned *status), {
    struct fg_device *a;
    struct fg_device *b;
    nvmlReturn_t result = fg_nvml_card(one, &a);
    if (result == NVML_SUCCESS)
        result = fg_nvml_card(other, &b);
    if (result == NVML_SUCCESS && (!status || index > 4))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *status = index == 2 && !fg_model_of(a)->nvlinks ? 5 : 0;
    return result;
})

/* Links are spread over the other cards of the machine in turn; 0 cards or no links: NULL. */
static struct fg_device *link_peer(const struct fg_device *card, unsigned link) {
    uint32_t others = fg.shared->device_count - 1;
    if (others == 0 || link >= fg_model_of(card)->nvlinks)
        return NULL;
    uint32_t peer = link % others;
    return &fg.shared->devices[peer < card->minor ? peer : peer + 1];
}

FG_NVML(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned link, unsigned *active), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && (!active || link > 17))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && link >= fg_model_of(card)->nvlinks)
        return NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        *active = link_peer(card, link) != NULL;
    return result;
})

static nvmlReturn_t remote_pci(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    return link_peer(card, link) ? pci_of(link_peer(card, link), pci) : NVML_ERROR_NOT_SUPPORTED;
}

FG_NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2, (nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci),
        { return remote_pci(device, link, pci); })
FG_NVML(nvmlDeviceGetNvLinkVersion, (nvmlDevice_t device, unsigned link, unsigned *version), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && !version)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && link >= fg_model_of(card)->nvlinks)
        return NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        *version = fg_model_of(card)->major >= 9 ? 4 : fg_model_of(card)->major >= 8 ? 3 : 2;
    return result;
})

static nvmlReturn_t affinity(nvmlDevice_t device, unsigned size, unsigned long *set, unsigned long value) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!set || size == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(set, 0, size * sizeof *set);
    set[0] = value == 0 ? 1ul << card->numa_node : value;
    return NVML_SUCCESS;
}

FG_NVML(nvmlDeviceGetCpuAffinity, (nvmlDevice_t device, unsigned size, unsigned long *set),
        { return affinity(device, size, set, 0xFFFFFFFFul); })
FG_NVML(nvmlDeviceGetMemoryAffinity, (nvmlDevice_t device, unsigned size, unsigned long *set, unsigned scope),
        { return scope > 1 ? NVML_ERROR_INVALID_ARGUMENT : affinity(device, size, set, 0); })
