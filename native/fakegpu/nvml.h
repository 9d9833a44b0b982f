/* What the files of libnvidia-ml.so.1 share. */
#ifndef FAKEGPU_NVML_H
#define FAKEGPU_NVML_H

#include "nvml_abi.h"
#include "setup.h"
#include "trace.h"

#define FG_API __attribute__((visibility("default")))

struct fg_nvml_device {
    uint32_t magic, index,
        card; /* index: in this container; of a MIG device: position of its compute instance */
};

/* One exported function; call log, delays and injected errors (trace.h) come first and may end the call. */
#define FG_NVML(name, parameters, ...)                                                                       \
    FG_API nvmlReturn_t name parameters;                                                                     \
    FG_API nvmlReturn_t name parameters {                                                                    \
        nvmlReturn_t injected_ = fg_enter(#name);                                                            \
        if (injected_ != NVML_SUCCESS)                                                                       \
            return injected_;                                                                                \
        __VA_ARGS__                                                                                          \
    }

/* MIG devices (nvml_mig.c): whether a handle is one; its card and instance, or NOT_FOUND if it is gone. */
int fg_nvml_is_mig(nvmlDevice_t device);
nvmlReturn_t fg_nvml_mig(nvmlDevice_t device, struct fg_device **card, struct fg_mig_compute **compute);
nvmlDevice_t fg_nvml_mig_handle(uint32_t card, uint32_t compute);
void fg_nvml_mig_name(const struct fg_device *card, const struct fg_mig_compute *compute, char *text,
                      size_t size);

/* NVML_SUCCESS, UNINITIALIZED. */
nvmlReturn_t fg_nvml_ready(void);
/* The card of a handle: UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED (a MIG device), GPU_IS_LOST, or
 * NVML_SUCCESS with *card set. */
nvmlReturn_t fg_nvml_card(nvmlDevice_t device, struct fg_device **card);
/* The same for a function whose other arguments are `valid`; else INVALID_ARGUMENT, where the card is fine.
 */
nvmlReturn_t fg_nvml_card_for(nvmlDevice_t device, int valid, struct fg_device **card);
/* Handle of card number `card`; NULL if this container does not see it. */
nvmlDevice_t fg_nvml_handle(uint32_t card);
nvmlDevice_t fg_nvml_at(uint32_t index);
/* Place of a card in the machine; INVALID_ARGUMENT without `pci`. */
nvmlReturn_t fg_nvml_pci(const struct fg_device *card, nvmlPciInfo_t *pci);
/* Copy text with its end; INSUFFICIENT_SIZE if it does not fit. */
nvmlReturn_t fg_nvml_text(char *to, unsigned size, const char *text);

#endif
