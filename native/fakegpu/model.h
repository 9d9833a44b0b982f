/* The cards that can be simulated. */
#ifndef FAKEGPU_MODEL_H
#define FAKEGPU_MODEL_H

#include <stdint.h>

struct fg_model {
    const char *key;  /* the word in FAKEGPU_MODEL */
    const char *name; /* what NVML and CUDA call the card */
    uint64_t memory_bytes;
    uint64_t reserved_bytes; /* held back by driver and firmware; part of the total */
    uint32_t sm_count, threads_per_sm;
    uint32_t major, minor; /* compute capability */
    uint32_t clock_mhz, memory_clock_mhz, bus_width_bits;
    uint32_t power_limit_mw;
    uint32_t pci_device_id, pci_subsystem_id; /* device << 16 | vendor */
    uint32_t architecture, brand;             /* NVML numbers */
    uint32_t mig_capable, nvlinks, l2_kib, shared_kib;
};

/* The model called `key`, in any case of letters; NULL if there is none. */
const struct fg_model *fg_model_find(const char *key);
/* The i-th model of the table, NULL behind the last one. */
const struct fg_model *fg_model_at(unsigned index);

#endif
