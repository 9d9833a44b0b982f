/* MIG: the profiles of a card, and the instances that are on it. NVML's numbers and ids. */
#ifndef FAKEGPU_MIG_H
#define FAKEGPU_MIG_H

#include "state.h"

/* One GPU instance profile. Its places are start, start + step, ... up to the last one, each of `size` memory
 * slices. */
struct fg_mig_profile {
    uint32_t number, id, slices, count, multiprocessors, size, step, last;
    uint64_t memory_mib;
    char name[32]; /* 1g.5gb */
};

/* Profile `number` of a card. 0, or -1 if the card has no such profile. */
int fg_mig_profile(const struct fg_device *card, uint32_t number, struct fg_mig_profile *profile);
/* The same by the id that NVML gives it on the card. */
int fg_mig_profile_by_id(const struct fg_device *card, uint32_t id, struct fg_mig_profile *profile);
/* Whether [start, start + size) is a place of the profile. */
int fg_mig_is_place(const struct fg_mig_profile *profile, uint32_t start, uint32_t size);
/* Slices of compute instance profile `number`; 0 if there is none. */
uint32_t fg_mig_compute_slices(uint32_t number);

/* Under the lock of the card; the results are positions in its tables, -1 for none. */
int fg_mig_find(const struct fg_device *card, uint32_t id);
int fg_mig_make(struct fg_device *card, const struct fg_mig_profile *profile, uint32_t start);
int fg_mig_make_compute(struct fg_device *card, uint32_t gpu, uint32_t number);
/* Whether [start, start + size) is free on the card. */
int fg_mig_is_free(const struct fg_device *card, uint32_t start, uint32_t size);
/* Compute slices of GPU instance `gpu` (a position) that no compute instance has. */
uint32_t fg_mig_free_slices(const struct fg_device *card, uint32_t gpu);
/* The `index`-th MIG device of a card: compute instances by id of their GPU instance. */
int fg_mig_device(const struct fg_device *card, uint32_t index);
/* Card and compute instance (positions) of a MIG UUID; 0, or -1 if there is none. */
int fg_mig_by_uuid(const struct fg_shared *shared, const char *uuid, uint32_t *card, uint32_t *compute);
/* Whether a process uses GPU instance `id`, or the card undivided for id = ~0. Dead ones are swept first. */
int fg_mig_in_use(uint32_t card, uint32_t id);

#endif
