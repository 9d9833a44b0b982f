#define _GNU_SOURCE
#include "sample.h"

#include "devices.h"
#include "hooks.h"
#include "hostpid.h"
#include "learn.h"
#include "process.h"
#include "residual.h"
#include "slots.h"
#include "util.h"

#include <sys/mman.h>

enum { SAMPLES = 1024 };
static const uint64_t missing_after_us = 2000000, longest_period_us = 1000000, shortest_period_us = 50000;

/* The latest sample of each slot on one device. */
struct latest {
    uint64_t time_us;
    unsigned sm, encoder, decoder;
};

static uint64_t last_seen[VG_MAX_DEVICES];   /* time stamp of the newest sample, us */
static uint64_t last_change[VG_MAX_DEVICES]; /* our own clock at that moment, us */
static uint64_t period[VG_MAX_DEVICES]; /* between NVML's samples, us: the least distance seen; 0: none */

static unsigned percent(unsigned value) {
    return value > 100 ? 100 : value;
}

static void store(struct vg_util *util, const struct latest *latest) {
    atomic_store_explicit(&util->sm, percent(latest->sm), memory_order_relaxed);
    atomic_store_explicit(&util->encoder, percent(latest->encoder), memory_order_relaxed);
    atomic_store_explicit(&util->decoder, percent(latest->decoder), memory_order_relaxed);
}

static void memory(int device, unsigned used) {
    static uint64_t counted[VG_MAX_SLOTS]; /* one leader, one thread */
    struct vg_space *space = vg_here();
    struct vg_slot *slots = space->region->procs;
    unsigned count = 0;
    uint64_t residual = 0, measured = 0;
    for (unsigned k = 0; k < used; k++)
        counted[k] = vg_residual_counted(&slots[k], device);
    struct vg_nvml_process *records = vg_nvml_list(device, &count);
    if (records == NULL)
        return;
    for (unsigned k = 0; k < used; k++) {
        uint64_t bytes = 0;
        for (unsigned i = 0; i < count; i++)
            if (vg_slot_of_nvml_pid(records[i].pid) == (int)k && records[i].used != UINT64_MAX)
                bytes += records[i].used;
        if (atomic_load_explicit(&slots[k].monitorused[device], memory_order_relaxed) != bytes)
            atomic_store_explicit(&slots[k].monitorused[device], bytes, memory_order_relaxed);
        if (atomic_load_explicit(&slots[k].status, memory_order_relaxed) == VG_SLOT_FREE)
            continue;
        residual += vg_residual_publish(&slots[k], device, counted[k], bytes);
        measured += bytes;
    }
    vg_nvml_list_free(records);
    atomic_store(&space->extension->devices[device].residual, residual);
    vg_residual_police(device, measured);
}

/* NVML says nothing of processes that were idle in a sample. So between two that name ours lie idle ones
 * where they are further apart than samples are: only the last period has this utilisation. */
static void learn(int device, uint64_t newest, unsigned sum) {
    uint64_t from = last_seen[device], distance = newest - from;
    if (from != 0 && distance >= shortest_period_us && (period[device] == 0 || distance < period[device]))
        period[device] = distance;
    uint64_t length =
        period[device] != 0 && period[device] < longest_period_us ? period[device] : longest_period_us;
    if (from != 0 && distance > length + length / 2) {
        vg_learn_window(device, from, newest - length, 0);
        from = newest - length;
    }
    vg_learn_window(device, from, newest, sum);
}

/* `latest` has room for every slot; only those with a sample newer than the last look are changed. */
static void utilisation(int device, unsigned used, struct vg_nvml_sample *samples, struct latest *latest) {
    unsigned count = SAMPLES;
    void *nvml = vg_nvml_device(device);
    struct vg_slot *slots = vg_here()->region->procs;
    uint64_t now = vg_now() / 1000, newest = last_seen[device];
    if (nvml == NULL)
        return;
    int result = vg_call_nvmlDeviceGetProcessUtilization(nvml, samples, &count, last_seen[device]);
    for (unsigned k = 0; k < used; k++)
        latest[k] = (struct latest){0};
    for (unsigned i = 0; result == VG_NVML_SUCCESS && i < count && i < SAMPLES; i++) {
        int k = vg_slot_of_nvml_pid(samples[i].pid);
        if (samples[i].time_us > newest)
            newest = samples[i].time_us;
        if (k >= 0 && (unsigned)k < used && samples[i].time_us >= latest[k].time_us)
            latest[k] =
                (struct latest){samples[i].time_us, samples[i].sm, samples[i].encoder, samples[i].decoder};
    }
    bool fresh = newest != last_seen[device];
    if (fresh) {
        unsigned sum = 0;
        for (unsigned k = 0; k < used; k++)
            sum += percent(latest[k].sm);
        learn(device, newest, sum);
        last_seen[device] = newest;
        last_change[device] = now;
    }
    if (fresh || now - last_change[device] > missing_after_us)
        for (unsigned k = 0; k < used; k++)
            store(&slots[k].util[device], &latest[k]);
}

void vg_sample_memory(void) {
    unsigned used = vg_region_slots(vg_here()->region);
    uint64_t devices = vg_here()->region->device_count;
    for (int d = 0; d < VG_MAX_DEVICES && (uint64_t)d < devices; d++)
        memory(d, used);
}

void vg_sample_utilisation(void) {
    unsigned used = vg_region_slots(vg_here()->region);
    uint64_t devices = vg_here()->region->device_count;
    size_t samples = SAMPLES * sizeof(struct vg_nvml_sample);
    size_t length = samples + VG_MAX_SLOTS * sizeof(struct latest);
    char *work = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (work == MAP_FAILED)
        return;
    for (int d = 0; d < VG_MAX_DEVICES && (uint64_t)d < devices; d++)
        utilisation(d, used, (struct vg_nvml_sample *)work, (struct latest *)(work + samples));
    munmap(work, length);
}
