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

/* All of a card's, or of a MIG device's, in memory for the caller to free. */
static nvmlReturn_t list_all(nvmlDevice_t device, int valid, nvmlProcessInfo_v2_t **found, unsigned *there) {
    struct fg_device *card;
    struct fg_mig_compute *compute = NULL;
    nvmlReturn_t result =
        fg_nvml_is_mig(device) ? fg_nvml_mig(device, &card, &compute) : fg_nvml_card(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    if (!valid)
        return NVML_ERROR_INVALID_ARGUMENT;
    *found = malloc(FG_MAX_SLOTS * sizeof **found);
    if (!*found)
        return NVML_ERROR_UNKNOWN;
    *there = list(card, compute ? card->mig_gpus[compute->gpu].id + 1 : 0, *found, FG_MAX_SLOTS);
    return NVML_SUCCESS;
}

/* The count protocol: capacity in, number out; INSUFFICIENT_SIZE with the number needed if the capacity is
 * too small. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, void *records, int legacy) {
    nvmlProcessInfo_v2_t *found;
    unsigned there;
    nvmlReturn_t result = list_all(device, count && (*count == 0 || records), &found, &there);
    if (result != NVML_SUCCESS)
        return result;
    unsigned room = *count;
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

FG_NVML(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, nvmlProcessDetailList_v1_t *info), {
    nvmlProcessInfo_v2_t *found;
    unsigned there;
    nvmlReturn_t result = list_all(device, info != NULL, &found, &there);
    if (result != NVML_SUCCESS)
        return result;
    int right = info->version == (sizeof *info | 1u << 24);
    unsigned room = right && info->procArray ? info->numProcArrayEntries : 0;
    if (right && info->mode != 0 && info->mode != 3)
        there = 0;
    for (unsigned i = 0; i < there && i < room; i++)
        info->procArray[i] = (nvmlProcessDetail_v1_t){.pid = found[i].pid,
                                                      .usedGpuMemory = found[i].usedGpuMemory,
                                                      .gpuInstanceId = found[i].gpuInstanceId,
                                                      .computeInstanceId = found[i].computeInstanceId};
    free(found);
    if (!right)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    info->numProcArrayEntries = there;
    return there <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
})

/* --- Accounting: always on, of processes that live --- */

FG_NVML(nvmlDeviceGetAccountingMode, (nvmlDevice_t device, unsigned *mode), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, mode != NULL, &card);
    if (result == NVML_SUCCESS)
        *mode = 1;
    return result;
})

FG_NVML(nvmlDeviceGetAccountingBufferSize, (nvmlDevice_t device, unsigned *size), {
    struct fg_device *card;
    nvmlReturn_t result = fg_nvml_card_for(device, size != NULL, &card);
    if (result == NVML_SUCCESS)
        *size = FG_MAX_SLOTS;
    return result;
})

FG_NVML(nvmlDeviceGetAccountingPids, (nvmlDevice_t device, unsigned *count, unsigned *pids), {
    nvmlProcessInfo_v2_t *found;
    unsigned there;
    nvmlReturn_t result = list_all(device, count != NULL, &found, &there);
    if (result != NVML_SUCCESS)
        return result;
    unsigned room = pids ? *count : 0;
    for (unsigned i = 0; i < there && i < room; i++)
        pids[i] = found[i].pid;
    free(found);
    *count = there;
    return there <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
})

/* What a process holds now stands for the most that it has held. */
static nvmlReturn_t accounted(nvmlDevice_t device, int valid, unsigned pid, unsigned long long *bytes) {
    nvmlProcessInfo_v2_t *found;
    unsigned there;
    nvmlReturn_t result = list_all(device, valid, &found, &there);
    if (result != NVML_SUCCESS)
        return result;
    result = NVML_ERROR_NOT_FOUND;
    for (unsigned i = 0; i < there; i++)
        if (found[i].pid == pid) {
            *bytes = found[i].usedGpuMemory;
            result = NVML_SUCCESS;
        }
    free(found);
    return result;
}

FG_NVML(nvmlDeviceGetAccountingStats, (nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t *stats), {
    unsigned long long bytes;
    nvmlReturn_t result = accounted(device, stats != NULL, pid, &bytes);
    if (result == NVML_SUCCESS)
        *stats = (nvmlAccountingStats_t){.maxMemoryUsage = bytes, .isRunning = 1};
    return result;
})

FG_NVML(nvmlDeviceGetAccountingStats_v2, (nvmlDevice_t device, nvmlAccountingStats_v2_t *stats), {
    unsigned long long bytes;
    nvmlReturn_t result = accounted(device, stats != NULL, stats ? stats->pid : 0, &bytes);
    if (result == NVML_SUCCESS)
        *stats = (nvmlAccountingStats_v2_t){.pid = stats->pid, .maxMemoryUsage = bytes, .isRunning = 1};
    return result;
})

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
