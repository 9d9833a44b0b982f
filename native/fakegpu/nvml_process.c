/* Memory, processes and utilisation of a card. */
#include "engine.h"
#include "nvml.h"

#include <stdlib.h>
#include <string.h>

static void memory(const struct fg_device *card, nvmlMemory_v2_t *info) {
    uint64_t available;
    uint64_t total;
    fg_memory_info((uint32_t)(card - fg.shared->devices), &available, &total);
    info->total = total;
    info->reserved = card->reserved_bytes;
    info->free = available;
    info->used = total - available - card->reserved_bytes;
}

FG_NVML(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *info), {
    struct fg_device *card;
    nvmlMemory_v2_t now;
    nvmlReturn_t result = fg_nvml_card_for(device, info != NULL, &card);
    if (result != NVML_SUCCESS)
        return result;
    memory(card, &now); /* version 1 counts the reserve as used */
    *info = (nvmlMemory_t){.total = now.total, .free = now.free, .used = now.used + now.reserved};
    return NVML_SUCCESS;
})

FG_NVML(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *info), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, info != NULL, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (info->version != NVML_MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory(card, info);
    return NVML_SUCCESS;
})

FG_NVML(nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t device, nvmlBAR1Memory_t *info), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, info != NULL, &card);
    if (result == NVML_SUCCESS)
        *info = (nvmlBAR1Memory_t){
            .bar1Total = 128ull << 30, .bar1Free = (128ull << 30) - (2 << 20), .bar1Used = 2 << 20};
    return result;
})

/* --- Processes --- */

static uint64_t held(const struct fg_account *account) {
    uint64_t bytes = 0;
    for (int k = 0; k < FG_KINDS; k++)
        bytes += account->physical[k];
    return bytes;
}

/* Visible processes with a context on the card, or on one GPU instance of it (`only`, id + 1): up to `room`
 * records; returns how many there are. */
static unsigned list(const struct fg_device *card, uint32_t only, nvmlProcessInfo_v2_t *records,
                     unsigned room) {
    uint32_t d = (uint32_t)(card - fg.shared->devices);
    unsigned count = 0;
    fg_sweep();
    for (uint32_t i = 0; i < fg.shared->slot_high && !fg.shared->hide_processes; i++) {
        const struct fg_slot *slot = &fg.shared->slots[i];
        const struct fg_account *account = &slot->on[d];
        uint32_t pid = fg.shared->slot_used[i] ? fg_visible_pid(slot) : 0;
        if (pid == 0 || (account->contexts == 0 && held(account) == 0) || (only && slot->mig_gpu[d] != only))
            continue;
        if (count < room)
            records[count] = (nvmlProcessInfo_v2_t){.pid = pid,
                                                    .usedGpuMemory = held(account),
                                                    .gpuInstanceId = slot->mig_gpu[d] - 1u,
                                                    .computeInstanceId = slot->mig_gpu[d] ? 0 : ~0u};
        count++;
    }
    return count;
}

/* The count protocol: capacity in, number out; INSUFFICIENT_SIZE with the number needed if the capacity is
 * too small. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, void *records, int legacy) {
    enum { MOST = FG_MAX_SLOTS };
    struct fg_device *card;
    struct fg_mig_compute *compute = NULL;
    nvmlReturn_t result =
        fg_nvml_is_mig(device) ? fg_nvml_mig(device, &card, &compute) : fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!count || (*count > 0 && !records))
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlProcessInfo_v2_t *found = malloc(MOST * sizeof *found);
    if (!found)
        return NVML_ERROR_UNKNOWN;
    unsigned room = *count,
             there = list(card, compute ? card->mig_gpus[compute->gpu].id + 1 : 0, found, MOST);
    *count = there;
    for (unsigned i = 0; i < there && there <= room; i++) {
        if (legacy)
            ((nvmlProcessInfo_v1_t *)records)[i] =
                (nvmlProcessInfo_v1_t){.pid = found[i].pid, .usedGpuMemory = found[i].usedGpuMemory};
        else
            ((nvmlProcessInfo_v2_t *)records)[i] = found[i];
    }
    free(found);
    return there <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned *count) {
    struct fg_device *card;
    struct fg_mig_compute *compute;
    nvmlReturn_t result =
        fg_nvml_is_mig(device) ? fg_nvml_mig(device, &card, &compute) : fg_nvml_card(device, &card);
    if (result == NVML_SUCCESS && !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *count = 0;
    return result;
}

FG_NVML(nvmlDeviceGetComputeRunningProcesses,
        (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *records),
        { return processes(device, count, records, 1); })
FG_NVML(nvmlDeviceGetComputeRunningProcesses_v2,
        (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *records),
        { return processes(device, count, records, 0); })
FG_NVML(nvmlDeviceGetComputeRunningProcesses_v3,
        (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *records),
        { return processes(device, count, records, 0); })

#define FG_NVML_NO_PROCESSES(name)                                                                           \
    FG_NVML(name, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *records), {                   \
        (void)records;                                                                                       \
        return no_processes(device, count);                                                                  \
    })
FG_NVML_NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
FG_NVML_NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
FG_NVML_NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
FG_NVML_NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
FG_NVML_NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
FG_NVML_NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

FG_NVML(nvmlSystemGetProcessName, (unsigned pid, char *name, unsigned size), {
    nvmlReturn_t result = fg_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!name || size == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    fg_sweep();
    for (uint32_t i = 0; i < fg.shared->slot_high; i++)
        if (fg.shared->slot_used[i] && fg_visible_pid(&fg.shared->slots[i]) == pid) {
            strncpy(name, fg.shared->slots[i].command, size - 1);
            name[size - 1] = 0;
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
})

/* --- Utilisation --- */

/* Bring the card to the present; the index of the newest sample that NVML
 * shows, or 0 if there is none yet. */
static uint64_t newest_sample(struct fg_device *card) {
    fg_engine_advance(card, fg_now());
    return card->sample_index > fg.shared->sample_lag + 1 ? card->sample_index - 1 - fg.shared->sample_lag
                                                          : 0;
}

/* End of a sample in µs since 1970. */
static uint64_t stamp(uint64_t sample) {
    return ((sample + 1) * fg.shared->sample_ns + fg.shared->realtime_offset_ns) / 1000;
}

FG_NVML(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *rates), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, rates != NULL, &card);
    if (result != NVML_SUCCESS)
        return result;
    fg_lock_device(card);
    unsigned gpu = card->util[newest_sample(card) % FG_SAMPLES] + card->extra_util;
    fg_unlock_device(card);
    rates->gpu = gpu > 100 ? 100 : gpu;
    rates->memory = rates->gpu / 2; /* a model: half as busy as the kernels */
    return NVML_SUCCESS;
})

static nvmlReturn_t codec(nvmlDevice_t device, unsigned *value, unsigned *period) {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, value && period, &card);
    if (result == NVML_SUCCESS) {
        *value = 0;
        *period = (unsigned)(fg.shared->sample_ns / 1000);
    }
    return result;
}

FG_NVML(nvmlDeviceGetEncoderUtilization, (nvmlDevice_t device, unsigned *value, unsigned *period),
        { return codec(device, value, period); })
FG_NVML(nvmlDeviceGetDecoderUtilization, (nvmlDevice_t device, unsigned *value, unsigned *period),
        { return codec(device, value, period); })

/* One record for each process that was busy in the newest sample, if that is newer than `since`. */
static unsigned busy_processes(struct fg_device *card, uint64_t since,
                               nvmlProcessUtilizationSample_t *records, unsigned room) {
    unsigned count = 0;
    fg_sweep();
    fg_lock_device(card);
    uint64_t sample = newest_sample(card), when = stamp(sample);
    for (uint32_t i = 0; sample && when > since && i < card->channel_count; i++) {
        const struct fg_channel *channel = &fg.shared->channels[card->channels[i]];
        unsigned sm = channel->util[sample % FG_SAMPLES];
        uint32_t pid = fg_visible_pid(&fg.shared->slots[channel->slot]);
        if (sm == 0 || pid == 0 || fg.shared->hide_processes)
            continue;
        if (count < room)
            records[count] = (nvmlProcessUtilizationSample_t){
                .pid = pid, .timeStamp = when, .smUtil = sm, .memUtil = sm / 2};
        count++;
    }
    fg_unlock_device(card);
    return count;
}

FG_NVML(nvmlDeviceGetProcessUtilization,
        (nvmlDevice_t device, nvmlProcessUtilizationSample_t *records, unsigned *count,
         unsigned long long since),
        {
            struct fg_device *card;
            nvmlReturn_t result = fg_nvml_card_for(device, count != NULL, &card);
            if (result != NVML_SUCCESS)
                return result;
            unsigned room = records ? *count : 0;
            unsigned there = busy_processes(card, since, records, room);
            *count = there;
            if (there == 0)
                return NVML_ERROR_NOT_FOUND;
            return there > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
        })

FG_NVML(nvmlDeviceGetProcessesUtilizationInfo, (nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info),
        {
            static _Thread_local nvmlProcessUtilizationSample_t found[FG_MAX_CHANNELS];
            struct fg_device *card;
            nvmlReturn_t result = fg_nvml_card_for(device, info != NULL, &card);
            if (result != NVML_SUCCESS)
                return result;
            if (info->version != (sizeof *info | 1u << 24))
                return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
            unsigned room = info->procUtilArray ? info->processSamplesCount : 0;
            unsigned there = busy_processes(card, info->lastSeenTimeStamp, found, FG_MAX_CHANNELS);
            info->processSamplesCount = there;
            if (there == 0)
                return NVML_ERROR_NOT_FOUND;
            if (there > room)
                return NVML_ERROR_INSUFFICIENT_SIZE;
            for (unsigned i = 0; i < there; i++)
                info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){.timeStamp = found[i].timeStamp,
                                                                           .pid = found[i].pid,
                                                                           .smUtil = found[i].smUtil,
                                                                           .memUtil = found[i].memUtil};
            return NVML_SUCCESS;
        })

/* Samples of the whole card; kind 0 power, 1 GPU, 2 memory. Values are unsigned int (type 1). */
FG_NVML(nvmlDeviceGetSamples,
        (nvmlDevice_t device, unsigned kind, unsigned long long since, unsigned *type, unsigned *count,
         nvmlSample_t *samples),
        {
            struct fg_device *card;
            nvmlReturn_t result = fg_nvml_card_for(device, type && count, &card);
            if (result != NVML_SUCCESS)
                return result;
            if (kind != 1 && kind != 2)
                return NVML_ERROR_NOT_SUPPORTED;
            unsigned there = 0;
            fg_lock_device(card);
            uint64_t newest = newest_sample(card);
            for (uint64_t s = newest > 32 ? newest - 31 : 1; newest && s <= newest; s++) {
                if (stamp(s) <= since)
                    continue;
                if (samples && there < *count)
                    samples[there] = (nvmlSample_t){.timeStamp = stamp(s),
                                                    .sampleValue = card->util[s % FG_SAMPLES] / kind};
                there++;
            }
            fg_unlock_device(card);
            *type = 1;
            int fits = samples && there <= *count;
            *count = samples && there > *count ? *count : there;
            return there == 0         ? NVML_ERROR_NOT_FOUND
                   : fits || !samples ? NVML_SUCCESS
                                      : NVML_ERROR_INSUFFICIENT_SIZE;
        })
