/* The rest of NVML's exported names: present, so that programs see a card that lacks the feature. */
#include "nvml.h"

#define FG_UNSUPPORTED(name)                                                                                 \
    FG_NVML(name, (void), {                                                                                  \
        nvmlReturn_t result = fg_nvml_ready();                                                               \
        return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;                                   \
    })
#include "unsupported_nvml.inc"
