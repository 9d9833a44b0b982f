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

/* Name and UUID are also those of MIG devices. */
FG_NVML(nvmlDeviceGetName, (nvmlDevice_t device, char *text, unsigned size), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    char name[128];
    if (!fg_nvml_is_mig(device)) {
        nvmlReturn_t result = fg_nvml_card(device, &card);
        return result == NVML_SUCCESS ? fg_nvml_text(text, size, card->name) : result;
    }
    nvmlReturn_t result = fg_nvml_mig(device, &card, &compute);
    if (result != NVML_SUCCESS)
        return result;
    fg_nvml_mig_name(card, compute, name, sizeof name);
    return fg_nvml_text(text, size, name);
})

FG_NVML(nvmlDeviceGetUUID, (nvmlDevice_t device, char *text, unsigned size), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    int is_mig = fg_nvml_is_mig(device);
    nvmlReturn_t result = is_mig ? fg_nvml_mig(device, &card, &compute) : fg_nvml_card(device, &card);
    return result == NVML_SUCCESS ? fg_nvml_text(text, size, is_mig ? compute->uuid : card->uuid) : result;
})

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
FG_NVML_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, 0)

FG_NVML(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, major && minor, &card);
    if (result != NVML_SUCCESS)
        return result;
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

nvmlReturn_t fg_nvml_pci(const struct fg_device *card, nvmlPciInfo_t *pci) {
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
    return result == NVML_SUCCESS ? fg_nvml_pci(card, pci) : result;
})

static nvmlReturn_t legacy_pci(nvmlDevice_t device, nvmlPciInfoLegacy_t *pci) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, pci != NULL, &card);
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
    nvmlReturn_t result = fg_nvml_card_for(device, value && sensor == 0, &card);
    if (result == NVML_SUCCESS)
        *value = card->temperature_c;
    return result;
})

FG_NVML(nvmlDeviceGetTemperatureThreshold, (nvmlDevice_t device, unsigned kind, unsigned *value), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, value != NULL, &card);
    if (result == NVML_SUCCESS)
        *value = kind == 0 ? 92 : 89; /* shutdown, slow down */
    return result;
})

static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned kind, unsigned *value) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, value && kind <= 3, &card);
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
    nvmlReturn_t result = fg_nvml_card_for(device, current && pending, &card);
    if (result == NVML_SUCCESS)
        *current = *pending = 1;
    return result;
})

FG_NVML(nvmlDeviceGetTotalEccErrors,
        (nvmlDevice_t device, unsigned kind, unsigned counter, unsigned long long *value), {
            struct fg_device *card;
            nvmlReturn_t result = fg_nvml_card_for(device, value && kind <= 1 && counter <= 1, &card);
            if (result == NVML_SUCCESS)
                *value = 0;
            return result;
        })

FG_NVML(nvmlDeviceGetRemappedRows,
        (nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
         unsigned *failed),
        {
            struct fg_device *card;
            nvmlReturn_t result =
                fg_nvml_card_for(device, corrected && uncorrected && pending && failed, &card);
            if (result == NVML_SUCCESS && fg_model_of(card)->architecture < 7)
                return NVML_ERROR_NOT_SUPPORTED;
            if (result == NVML_SUCCESS)
                *corrected = *uncorrected = *pending = *failed = 0;
            return result;
        })

FG_NVML(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, unsigned counter, unsigned *value), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, value && counter <= 1, &card);
    if (result == NVML_SUCCESS)
        *value = 0;
    return result;
})
