/* MIG in NVML: mode, profiles, GPU and compute instances, MIG devices. */
#include "mig.h"
#include "nvml.h"

#include <stdio.h>
#include <string.h>

enum { GPU_MAGIC = 0x4E564732, COMPUTE_MAGIC = 0x4E564332, DEVICE_MAGIC = 0x4E564D32 };

struct fg_nvml_instance {
    uint32_t magic, card, position, id;
};

static struct fg_nvml_device devices[FG_MAX_DEVICES][FG_MIG];
static struct fg_nvml_instance gpus[FG_MAX_DEVICES][FG_MIG], computes[FG_MAX_DEVICES][FG_MIG];

static int within(const void *pointer, const void *table, size_t size, size_t each) {
    size_t offset = (size_t)((const char *)pointer - (const char *)table);
    return (const char *)pointer >= (const char *)table && offset < size && offset % each == 0;
}

int fg_nvml_is_mig(nvmlDevice_t device) {
    return within(device, devices, sizeof devices, sizeof devices[0][0]) && device->magic == DEVICE_MAGIC;
}

nvmlReturn_t fg_nvml_mig(nvmlDevice_t device, struct fg_device **card, struct fg_mig_compute **compute) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!fg_nvml_is_mig(device))
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = &fg.shared->devices[device->card];
    *compute = &(*card)->mig_computes[device->index];
    return (*card)->lost ? NVML_ERROR_GPU_IS_LOST : (*compute)->in_use ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t mig_for(nvmlDevice_t device, int valid, struct fg_device **card,
                            struct fg_mig_compute **compute) {
    nvmlReturn_t result = fg_nvml_mig(device, card, compute);
    return result == NVML_SUCCESS && !valid ? NVML_ERROR_INVALID_ARGUMENT : result;
}

nvmlDevice_t fg_nvml_mig_handle(uint32_t card, uint32_t compute) {
    devices[card][compute] = (struct fg_nvml_device){.magic = DEVICE_MAGIC, .index = compute, .card = card};
    return &devices[card][compute];
}

void fg_nvml_mig_name(const struct fg_device *card, const struct fg_mig_compute *compute, char *text,
                      size_t size) {
    struct fg_mig_profile profile = {.name = ""};
    fg_mig_profile(card, card->mig_gpus[compute->gpu].profile, &profile);
    snprintf(text, size, "%.60s MIG %s", card->name, profile.name);
}

/* --- handles --- */

static nvmlGpuInstance_t gpu_handle(uint32_t card, uint32_t position) {
    gpus[card][position] =
        (struct fg_nvml_instance){GPU_MAGIC, card, position, fg.shared->devices[card].mig_gpus[position].id};
    return &gpus[card][position];
}

static nvmlComputeInstance_t compute_handle(uint32_t card, uint32_t position) {
    computes[card][position] = (struct fg_nvml_instance){COMPUTE_MAGIC, card, position,
                                                         fg.shared->devices[card].mig_computes[position].id};
    return &computes[card][position];
}

/* A divided card; NOT_SUPPORTED if it is not. */
static nvmlReturn_t divided(nvmlDevice_t device, struct fg_device **card) {
    nvmlReturn_t result = fg_nvml_card(device, card);
    return result == NVML_SUCCESS && !(*card)->mig_mode ? NVML_ERROR_NOT_SUPPORTED : result;
}

static nvmlReturn_t gpu_of(nvmlGpuInstance_t handle, struct fg_device **card, struct fg_mig_gpu **gpu) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!within(handle, gpus, sizeof gpus, sizeof gpus[0][0]) || handle->magic != GPU_MAGIC)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = &fg.shared->devices[handle->card];
    *gpu = &(*card)->mig_gpus[handle->position];
    if ((*card)->lost)
        return NVML_ERROR_GPU_IS_LOST;
    return (*gpu)->in_use && (*gpu)->id == handle->id ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t compute_of(nvmlComputeInstance_t handle, struct fg_device **card,
                               struct fg_mig_compute **compute) {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!within(handle, computes, sizeof computes, sizeof computes[0][0]) || handle->magic != COMPUTE_MAGIC)
        return NVML_ERROR_INVALID_ARGUMENT;
    *card = &fg.shared->devices[handle->card];
    *compute = &(*card)->mig_computes[handle->position];
    if ((*card)->lost)
        return NVML_ERROR_GPU_IS_LOST;
    return (*compute)->in_use && (*compute)->id == handle->id ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static uint32_t number_of(const struct fg_device *card) {
    return (uint32_t)(card - fg.shared->devices);
}

/* --- mode --- */

FG_NVML(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned *current, unsigned *pending), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, current && pending, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!fg_model_of(card)->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = card->mig_mode;
    *pending = card->mig_pending;
    return NVML_SUCCESS;
})

/* Changes at once, unless the state says that this needs a reset (fakegpud set CARD mig_needs_reset 1). */
FG_NVML(nvmlDeviceSetMigMode, (nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, activation && mode <= 1, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!fg_model_of(card)->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    int busy = fg_mig_in_use(number_of(card), ~0u);
    fg_lock_device(card);
    for (int i = 0; i < FG_MIG; i++)
        busy |= card->mig_gpus[i].in_use;
    *activation = NVML_SUCCESS;
    if (mode != card->mig_mode && busy)
        result = NVML_ERROR_IN_USE;
    else {
        card->mig_pending = mode;
        if (!card->mig_needs_reset)
            card->mig_mode = mode;
    }
    fg_unlock_device(card);
    return result;
})

/* --- profiles --- */

static nvmlReturn_t profile_of(nvmlDevice_t device, unsigned number, struct fg_mig_profile *profile) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    return fg_mig_profile(card, number, profile) == 0 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

FG_NVML(nvmlDeviceGetGpuInstanceProfileInfo,
        (nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_t *info), {
            struct fg_mig_profile profile;
            nvmlReturn_t result = profile_of(device, number, &profile);
            if (result == NVML_SUCCESS && !info)
                return NVML_ERROR_INVALID_ARGUMENT;
            if (result == NVML_SUCCESS)
                *info = (nvmlGpuInstanceProfileInfo_t){.id = profile.id,
                                                       .sliceCount = profile.slices,
                                                       .instanceCount = profile.count,
                                                       .multiprocessorCount = profile.multiprocessors,
                                                       .memorySizeMB = profile.memory_mib};
            return result;
        })

FG_NVML(nvmlDeviceGetGpuInstanceProfileInfoV,
        (nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_v2_t *info), {
            struct fg_mig_profile profile;
            nvmlReturn_t result = profile_of(device, number, &profile);
            if (result != NVML_SUCCESS)
                return result;
            if (!info)
                return NVML_ERROR_INVALID_ARGUMENT;
            if (info->version != (sizeof *info | 2u << 24))
                return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
            *info = (nvmlGpuInstanceProfileInfo_v2_t){.version = info->version,
                                                      .id = profile.id,
                                                      .sliceCount = profile.slices,
                                                      .instanceCount = profile.count,
                                                      .multiprocessorCount = profile.multiprocessors,
                                                      .memorySizeMB = profile.memory_mib};
            snprintf(info->name, sizeof info->name, "MIG %s", profile.name);
            return NVML_SUCCESS;
        })

FG_NVML(nvmlDeviceGetGpuInstancePossiblePlacements_v2,
        (nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *places, unsigned *count), {
            struct fg_device *card;
            struct fg_mig_profile profile;
            nvmlReturn_t result = divided(device, &card);
            if (result != NVML_SUCCESS)
                return result;
            if (!count || fg_mig_profile_by_id(card, id, &profile) != 0)
                return NVML_ERROR_INVALID_ARGUMENT;
            unsigned room = places ? *count : 0;
            *count = profile.last / profile.step + 1;
            if (places && room < *count)
                return NVML_ERROR_INSUFFICIENT_SIZE;
            for (unsigned i = 0; places && i < *count; i++)
                places[i] = (nvmlGpuInstancePlacement_t){i * profile.step, profile.size};
            return NVML_SUCCESS;
        })

/* --- GPU instances --- */

static nvmlReturn_t create(nvmlDevice_t device, unsigned id, const nvmlGpuInstancePlacement_t *place,
                           nvmlGpuInstance_t *instance) {
    struct fg_device *card;
    struct fg_mig_profile profile;
    nvmlReturn_t result = divided(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!instance || fg_mig_profile_by_id(card, id, &profile) != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place && !fg_mig_is_place(&profile, place->start, place->size))
        return NVML_ERROR_INVALID_ARGUMENT;
    fg_lock_device(card);
    int made = -1;
    for (unsigned start = 0; start <= profile.last && made < 0; start += profile.step)
        if ((!place || place->start == start) && fg_mig_is_free(card, start, profile.size))
            made = fg_mig_make(card, &profile, start);
    fg_unlock_device(card);
    if (made < 0)
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    *instance = gpu_handle(number_of(card), (uint32_t)made);
    return NVML_SUCCESS;
}

FG_NVML(nvmlDeviceCreateGpuInstance, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance),
        { return create(device, id, NULL, instance); })
FG_NVML(nvmlDeviceCreateGpuInstanceWithPlacement,
        (nvmlDevice_t device, unsigned id, const nvmlGpuInstancePlacement_t *place,
         nvmlGpuInstance_t *instance),
        { return place ? create(device, id, place, instance) : NVML_ERROR_INVALID_ARGUMENT; })

FG_NVML(nvmlGpuInstanceDestroy, (nvmlGpuInstance_t instance), {
    struct fg_device *card;
    struct fg_mig_gpu *gpu;
    nvmlReturn_t result = gpu_of(instance, &card, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    fg_lock_device(card);
    for (int i = 0; i < FG_MIG; i++)
        if (card->mig_computes[i].in_use && card->mig_computes[i].gpu == instance->position)
            result = NVML_ERROR_IN_USE;
    if (result == NVML_SUCCESS)
        gpu->in_use = 0;
    fg_unlock_device(card);
    return result;
})

FG_NVML(nvmlDeviceGetGpuInstances,
        (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count), {
            struct fg_device *card;
            struct fg_mig_profile profile;
            nvmlReturn_t result = divided(device, &card);
            if (result != NVML_SUCCESS)
                return result;
            if (!instances || !count || fg_mig_profile_by_id(card, id, &profile) != 0)
                return NVML_ERROR_INVALID_ARGUMENT;
            *count = 0;
            for (uint32_t i = 0; i < FG_MIG; i++)
                if (card->mig_gpus[i].in_use && card->mig_gpus[i].profile == profile.number)
                    instances[(*count)++] = gpu_handle(number_of(card), i);
            return NVML_SUCCESS;
        })

FG_NVML(nvmlDeviceGetGpuInstanceById, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance), {
    struct fg_device *card;
    nvmlReturn_t result = divided(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    int position = fg_mig_find(card, id);
    if (!instance || position < 0)
        return instance ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
    *instance = gpu_handle(number_of(card), (uint32_t)position);
    return NVML_SUCCESS;
})

FG_NVML(nvmlGpuInstanceGetInfo, (nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info), {
    struct fg_device *card;
    struct fg_mig_gpu *gpu;
    struct fg_mig_profile profile;
    nvmlReturn_t result = gpu_of(instance, &card, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    if (!info || fg_mig_profile(card, gpu->profile, &profile) != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    *info = (nvmlGpuInstanceInfo_t){
        fg_nvml_handle(number_of(card)), gpu->id, profile.id, {gpu->start, gpu->size}};
    return NVML_SUCCESS;
})

/* --- compute instances; a profile's id is its number --- */

static nvmlReturn_t compute_profile(nvmlGpuInstance_t instance, unsigned number, unsigned engine,
                                    nvmlComputeInstanceProfileInfo_t *info) {
    struct fg_device *card;
    struct fg_mig_gpu *gpu;
    struct fg_mig_profile profile;
    nvmlReturn_t result = gpu_of(instance, &card, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    uint32_t slices = fg_mig_compute_slices(number);
    if (engine != 0 || fg_mig_profile(card, gpu->profile, &profile) != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (slices == 0 || slices > profile.slices)
        return NVML_ERROR_NOT_SUPPORTED;
    *info = (nvmlComputeInstanceProfileInfo_t){.id = number,
                                               .sliceCount = slices,
                                               .instanceCount = profile.slices / slices,
                                               .multiprocessorCount =
                                                   profile.multiprocessors * slices / profile.slices};
    return NVML_SUCCESS;
}

FG_NVML(nvmlGpuInstanceGetComputeInstanceProfileInfo,
        (nvmlGpuInstance_t instance, unsigned number, unsigned engine,
         nvmlComputeInstanceProfileInfo_t *info),
        { return info ? compute_profile(instance, number, engine, info) : NVML_ERROR_INVALID_ARGUMENT; })

FG_NVML(nvmlGpuInstanceGetComputeInstanceProfileInfoV,
        (nvmlGpuInstance_t instance, unsigned number, unsigned engine,
         nvmlComputeInstanceProfileInfo_v2_t *info),
        {
            nvmlComputeInstanceProfileInfo_t plain = {.id = 0};
            if (!info)
                return NVML_ERROR_INVALID_ARGUMENT;
            if (info->version != (sizeof *info | 2u << 24))
                return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
            nvmlReturn_t result = compute_profile(instance, number, engine, &plain);
            if (result == NVML_SUCCESS) {
                info->profile = plain;
                snprintf(info->name, sizeof info->name, "MIG %uc", plain.sliceCount);
            }
            return result;
        })

FG_NVML(nvmlGpuInstanceCreateComputeInstance,
        (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *compute), {
            struct fg_device *card;
            struct fg_mig_gpu *gpu;
            nvmlReturn_t result = gpu_of(instance, &card, &gpu);
            if (result != NVML_SUCCESS)
                return result;
            uint32_t slices = fg_mig_compute_slices(id);
            if (!compute || slices == 0)
                return NVML_ERROR_INVALID_ARGUMENT;
            fg_lock_device(card);
            int made = slices <= fg_mig_free_slices(card, instance->position)
                           ? fg_mig_make_compute(card, instance->position, id)
                           : -1;
            fg_unlock_device(card);
            if (made < 0)
                return NVML_ERROR_INSUFFICIENT_RESOURCES;
            *compute = compute_handle(number_of(card), (uint32_t)made);
            return NVML_SUCCESS;
        })

FG_NVML(nvmlComputeInstanceDestroy, (nvmlComputeInstance_t handle), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    nvmlReturn_t result = compute_of(handle, &card, &compute);
    if (result != NVML_SUCCESS)
        return result;
    if (fg_mig_in_use(number_of(card), card->mig_gpus[compute->gpu].id))
        return NVML_ERROR_IN_USE;
    fg_lock_device(card);
    compute->in_use = 0;
    fg_unlock_device(card);
    return NVML_SUCCESS;
})

FG_NVML(nvmlGpuInstanceGetComputeInstances,
        (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found, unsigned *count), {
            struct fg_device *card;
            struct fg_mig_gpu *gpu;
            nvmlReturn_t result = gpu_of(instance, &card, &gpu);
            if (result != NVML_SUCCESS)
                return result;
            if (!found || !count)
                return NVML_ERROR_INVALID_ARGUMENT;
            *count = 0;
            for (uint32_t i = 0; i < FG_MIG; i++) {
                const struct fg_mig_compute *each = &card->mig_computes[i];
                if (each->in_use && each->gpu == instance->position && each->profile == id)
                    found[(*count)++] = compute_handle(number_of(card), i);
            }
            return NVML_SUCCESS;
        })

FG_NVML(nvmlGpuInstanceGetComputeInstanceById,
        (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found), {
            struct fg_device *card;
            struct fg_mig_gpu *gpu;
            nvmlReturn_t result = gpu_of(instance, &card, &gpu);
            if (result != NVML_SUCCESS)
                return result;
            if (!found)
                return NVML_ERROR_INVALID_ARGUMENT;
            for (uint32_t i = 0; i < FG_MIG; i++) {
                const struct fg_mig_compute *each = &card->mig_computes[i];
                if (each->in_use && each->gpu == instance->position && each->id == id) {
                    *found = compute_handle(number_of(card), i);
                    return NVML_SUCCESS;
                }
            }
            return NVML_ERROR_NOT_FOUND;
        })

FG_NVML(nvmlComputeInstanceGetInfo_v2, (nvmlComputeInstance_t handle, nvmlComputeInstanceInfo_t *info), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    nvmlReturn_t result = compute_of(handle, &card, &compute);
    if (result != NVML_SUCCESS)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    *info = (nvmlComputeInstanceInfo_t){fg_nvml_handle(number_of(card)),
                                        gpu_handle(number_of(card), compute->gpu),
                                        compute->id,
                                        compute->profile,
                                        {0, fg_mig_compute_slices(compute->profile)}};
    return NVML_SUCCESS;
})

/* --- MIG devices --- */

FG_NVML(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t device, unsigned index, nvmlDevice_t *mig), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    int found = card->mig_mode ? fg_mig_device(card, index) : -1;
    if (!mig || found < 0)
        return mig ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
    *mig = fg_nvml_mig_handle(number_of(card), (uint32_t)found);
    return NVML_SUCCESS;
})

FG_NVML(nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, unsigned *is_mig), {
    nvmlReturn_t result = fg_nvml_ready();
    if (result == NVML_SUCCESS && (!is_mig || !device))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *is_mig = (unsigned)fg_nvml_is_mig(device);
    return result;
})

FG_NVML(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t device, nvmlDevice_t *parent), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    nvmlReturn_t result = mig_for(device, parent != NULL, &card, &compute);
    if (result == NVML_SUCCESS)
        *parent = fg_nvml_handle(number_of(card));
    return result;
})

FG_NVML(nvmlDeviceGetGpuInstanceId, (nvmlDevice_t device, unsigned *id), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    nvmlReturn_t result = mig_for(device, id != NULL, &card, &compute);
    if (result == NVML_SUCCESS)
        *id = card->mig_gpus[compute->gpu].id;
    return result;
})

FG_NVML(nvmlDeviceGetComputeInstanceId, (nvmlDevice_t device, unsigned *id), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    nvmlReturn_t result = mig_for(device, id != NULL, &card, &compute);
    if (result == NVML_SUCCESS)
        *id = compute->id;
    return result;
})

FG_NVML(nvmlDeviceGetAttributes_v2, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes), {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    struct fg_mig_profile profile;
    nvmlReturn_t result = fg_nvml_mig(device, &card, &compute);
    if (result != NVML_SUCCESS)
        return result;
    if (!attributes || fg_mig_profile(card, card->mig_gpus[compute->gpu].profile, &profile) != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint32_t slices = fg_mig_compute_slices(compute->profile);
    *attributes =
        (nvmlDeviceAttributes_t){.multiprocessorCount = profile.multiprocessors * slices / profile.slices,
                                 .gpuInstanceSliceCount = profile.slices,
                                 .computeInstanceSliceCount = slices,
                                 .memorySizeMB = profile.memory_mib};
    return NVML_SUCCESS;
})
