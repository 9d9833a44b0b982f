#include "mig.h"

#include "setup.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define MIB ((uint64_t)1 << 20)

/* Profiles of cards with seven slices. The share of the memory is in eighths, what is lost of it in MiB. */
static const struct row {
    uint32_t number, id, slices, count, eighths, step, last;
    uint64_t lost_mib;
    const char *suffix;
} rows[] = {
    {0, 19, 1, 7, 1, 1, 6, 256, ""}, {1, 14, 2, 3, 2, 2, 4, 384, ""}, {2, 9, 3, 2, 4, 4, 4, 512, ""},
    {3, 5, 4, 1, 4, 4, 0, 512, ""},  {4, 0, 7, 1, 8, 8, 0, 768, ""},  {7, 20, 1, 1, 1, 1, 6, 256, "+me"},
    {9, 15, 1, 4, 2, 2, 6, 384, ""},
};

static const uint32_t compute_slices[] = {1, 2, 3, 4, 7, 8, 6};

static uint32_t multiprocessors(const struct fg_model *model, uint32_t slices) {
    if (model->major >= 9)
        return slices == 7 ? model->sm_count : slices == 3 ? 60 : slices * 16;
    return slices * 14;
}

int fg_mig_profile(const struct fg_device *card, uint32_t number, struct fg_mig_profile *profile) {
    const struct fg_model *model = fg_model_of(card);
    for (size_t i = 0; model->mig_capable && i < sizeof rows / sizeof rows[0]; i++) {
        const struct row *row = &rows[i];
        if (row->number != number)
            continue;
        uint64_t total = card->total_bytes / MIB, share = total * row->eighths / 8;
        uint64_t gib = (total + 1023) / 1024;
        *profile = (struct fg_mig_profile){
            .number = number,
            .id = row->id,
            .slices = row->slices,
            .count = row->count,
            .multiprocessors = multiprocessors(model, row->slices),
            .size = row->eighths,
            .step = row->step,
            .last = row->last,
            .memory_mib = share > row->lost_mib ? share - row->lost_mib : share,
        };
        snprintf(profile->name, sizeof profile->name, "%ug.%llugb%s", row->slices,
                 (unsigned long long)((gib * row->eighths + 4) / 8), row->suffix);
        return 0;
    }
    return -1;
}

int fg_mig_profile_by_id(const struct fg_device *card, uint32_t id, struct fg_mig_profile *profile) {
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].id == id)
            return fg_mig_profile(card, rows[i].number, profile);
    return -1;
}

int fg_mig_is_place(const struct fg_mig_profile *profile, uint32_t start, uint32_t size) {
    return size == profile->size && start <= profile->last && start % profile->step == 0;
}

uint32_t fg_mig_compute_slices(uint32_t number) {
    return number < sizeof compute_slices / sizeof compute_slices[0] ? compute_slices[number] : 0;
}

int fg_mig_find(const struct fg_device *card, uint32_t id) {
    for (int i = 0; i < FG_MIG; i++)
        if (card->mig_gpus[i].in_use && card->mig_gpus[i].id == id)
            return i;
    return -1;
}

int fg_mig_is_free(const struct fg_device *card, uint32_t start, uint32_t size) {
    for (int i = 0; i < FG_MIG; i++) {
        const struct fg_mig_gpu *other = &card->mig_gpus[i];
        if (other->in_use && start < other->start + other->size && other->start < start + size)
            return 0;
    }
    return 1;
}

int fg_mig_make(struct fg_device *card, const struct fg_mig_profile *profile, uint32_t start) {
    uint32_t id = profile->slices == 7 ? 0 : profile->slices >= 3 ? 1 : profile->slices == 2 ? 3 : 7;
    while (fg_mig_find(card, id) >= 0)
        id++;
    for (int i = 0; i < FG_MIG; i++)
        if (!card->mig_gpus[i].in_use) {
            card->mig_gpus[i] = (struct fg_mig_gpu){
                .in_use = 1, .id = id, .profile = profile->number, .start = start, .size = profile->size};
            return i;
        }
    return -1;
}

uint32_t fg_mig_free_slices(const struct fg_device *card, uint32_t gpu) {
    struct fg_mig_profile profile;
    if (fg_mig_profile(card, card->mig_gpus[gpu].profile, &profile) != 0)
        return 0;
    uint32_t left = profile.slices;
    for (int i = 0; i < FG_MIG; i++)
        if (card->mig_computes[i].in_use && card->mig_computes[i].gpu == gpu)
            left -= fg_mig_compute_slices(card->mig_computes[i].profile);
    return left;
}

int fg_mig_make_compute(struct fg_device *card, uint32_t gpu, uint32_t number) {
    uint32_t id = 0;
    for (int i = 0; i < FG_MIG; i++)
        if (card->mig_computes[i].in_use && card->mig_computes[i].gpu == gpu &&
            card->mig_computes[i].id == id)
            id++, i = -1;
    for (int i = 0; i < FG_MIG; i++) {
        struct fg_mig_compute *made = &card->mig_computes[i];
        if (made->in_use)
            continue;
        *made = (struct fg_mig_compute){.in_use = 1, .id = id, .gpu = gpu, .profile = number};
        snprintf(made->uuid, sizeof made->uuid, "MIG-%.8s-%04x-%04x-%04x-%012x", card->uuid + 4,
                 card->mig_gpus[gpu].id, id, card->minor, ++card->mig_made);
        return i;
    }
    return -1;
}

int fg_mig_device(const struct fg_device *card, uint32_t index) {
    for (uint32_t id = 0; id < 64; id++)
        for (uint32_t compute = 0; compute < FG_MIG; compute++)
            for (int i = 0; i < FG_MIG; i++) {
                const struct fg_mig_compute *each = &card->mig_computes[i];
                if (each->in_use && each->id == compute && card->mig_gpus[each->gpu].id == id && index-- == 0)
                    return i;
            }
    return -1;
}

int fg_mig_by_uuid(const struct fg_shared *shared, const char *uuid, uint32_t *card, uint32_t *compute) {
    for (uint32_t d = 0; d < shared->device_count; d++)
        for (uint32_t i = 0; i < FG_MIG; i++) {
            const struct fg_mig_compute *each = &shared->devices[d].mig_computes[i];
            if (each->in_use && strcasecmp(each->uuid, uuid) == 0) {
                *card = d;
                *compute = i;
                return 0;
            }
        }
    return -1;
}

int fg_mig_in_use(uint32_t card, uint32_t id) {
    fg_sweep();
    for (uint32_t i = 0; i < fg.shared->slot_high; i++) {
        const struct fg_slot *slot = &fg.shared->slots[i];
        if (!fg.shared->slot_used[i] || slot->on[card].contexts == 0)
            continue;
        if (slot->mig_gpu[card] == (id == ~0u ? 0 : id + 1))
            return 1;
    }
    return 0;
}
