/* What the files of libnvidia-ml.so.1 share. */
#ifndef FAKEGPU_NVML_H
#define FAKEGPU_NVML_H

#include "nvml_abi.h"
#include "setup.h"
#include "trace.h"

#define FG_API __attribute__((visibility("default")))

struct fg_nvml_device {
    uint32_t magic, index, card; /* index: in this container */
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

/* NVML_SUCCESS, UNINITIALIZED. */
nvmlReturn_t fg_nvml_ready(void);
/* The card of a handle: UNINITIALIZED, INVALID_ARGUMENT, GPU_IS_LOST, or NVML_SUCCESS with *card set. */
nvmlReturn_t fg_nvml_card(nvmlDevice_t device, struct fg_device **card);
/* Handle of card number `card`; NULL if this container does not see it. */
nvmlDevice_t fg_nvml_handle(uint32_t card);
nvmlDevice_t fg_nvml_at(uint32_t index);
/* Copy text with its end; INSUFFICIENT_SIZE if it does not fit. */
nvmlReturn_t fg_nvml_text(char *to, unsigned size, const char *text);

#endif
