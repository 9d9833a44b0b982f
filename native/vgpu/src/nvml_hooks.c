/* NVML as the container should see it: its limit, its usage, its own processes. */
#define _GNU_SOURCE
#include "devices.h"
#include "hooks.h"
#include "hostpid.h"
#include "process.h"
#include "slots.h"

#include <string.h>
#include <sys/mman.h>

enum { MAX_RECORDS = 2048 };

int vg_nvml_init(vg_fn_nvml_init driver) {
    int result = driver();
    if (result == VG_NVML_SUCCESS)
        vg_region_attached();
    return result;
}

int vg_nvml_init_flags(vg_fn_nvml_init_flags driver, unsigned flags) {
    int result = driver(flags);
    if (result == VG_NVML_SUCCESS)
        vg_region_attached();
    return result;
}

/* The limit of an NVML device and its usage by this container; false: the driver's numbers stay. */
static bool limited(void *nvml_device, uint64_t *limit, uint64_t *used) {
    int device = vg_region_attached() ? vg_device_of_nvml(nvml_device) : -1;
    *limit = device >= 0 ? vg_memory_limit(device) : 0;
    if (*limit != 0)
        *used = vg_slots_usage(vg_here(), device);
    return *limit != 0;
}

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* The driver's answer with the limit instead of the card; false: it stays as it is. A card that shares the
 * memory of the host has no total of its own. */
static bool show_limit(int result, void *device, uint64_t *total, uint64_t *used, uint64_t *free) {
    uint64_t limit, in_use;
    bool unified = result == VG_NVML_NOT_SUPPORTED;
    if ((result != VG_NVML_SUCCESS && !unified) || !limited(device, &limit, &in_use))
        return false;
    *total = unified ? limit : smaller(limit, *total);
    *used = smaller(in_use, *total);
    *free = *total - *used;
    return true;
}

int vg_nvml_memory(vg_fn_nvml_memory driver, void *device, struct vg_nvml_memory *memory) {
    int result = driver(device, memory);
    bool shown = memory != NULL && show_limit(result, device, &memory->total, &memory->used, &memory->free);
    return shown ? VG_NVML_SUCCESS : result;
}

int vg_nvml_memory_v2(vg_fn_nvml_memory_v2 driver, void *device, struct vg_nvml_memory_v2 *memory) {
    int result = driver(device, memory);
    if (memory == NULL || !show_limit(result, device, &memory->total, &memory->used, &memory->free))
        return result;
    memory->reserved = 0;
    return VG_NVML_SUCCESS;
}

/* Not where the container's own processes cannot be told just now: then it is shown none. */
static bool shows_all_processes(void) {
    return vg_process.config.nvml_host_processes ||
           (!vg_region_attached() && (atomic_load(&vg_gate->word) & VG_GATE_FORWARD) != 0);
}

/* The PID inside the container of a record's process; 0: it belongs to somebody else. */
static uint32_t container_pid(uint32_t pid) {
    if (!vg_region_attached())
        return 0;
    int slot = vg_slot_of_nvml_pid(pid);
    if (slot >= 0)
        return (uint32_t)vg_here()->region->procs[slot].pid;
    return vg_here()->own != NULL && vg_pid_is_own(pid) ? (uint32_t)vg_here()->own->pid : 0;
}

typedef int (*process_list)(void *device, unsigned *count, void *records);

/* Asks the driver into memory of our own and keeps the container's records; `size` bytes each, the PID first.
 */
static int own_processes(process_list driver, void *device, unsigned *count, void *records, size_t size) {
    if (count == NULL || shows_all_processes())
        return driver(device, count, records);
    size_t length = MAX_RECORDS * size;
    char *all = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        return VG_NVML_MEMORY;
    unsigned capacity = *count, found = MAX_RECORDS, kept = 0;
    int result = driver(device, &found, all);
    if (result == VG_NVML_SUCCESS) {
        for (unsigned i = 0; i < found; i++) {
            char *record = all + i * size;
            uint32_t pid;
            memcpy(&pid, record, sizeof pid);
            pid = container_pid(pid);
            if (pid == 0)
                continue;
            memcpy(record, &pid, sizeof pid);
            if (kept < capacity && records != NULL)
                memcpy((char *)records + kept * size, record, size);
            kept++;
        }
        *count = kept;
        if (kept > capacity || (kept > 0 && records == NULL))
            result = VG_NVML_INSUFFICIENT_SIZE;
    }
    munmap(all, length);
    return result;
}

int vg_nvml_processes_v1(vg_fn_nvml_processes_v1 driver, void *device, unsigned *count, void *records) {
    return own_processes(driver, device, count, records, sizeof(struct vg_nvml_process_v1));
}

int vg_nvml_processes(vg_fn_nvml_processes driver, void *device, unsigned *count, void *records) {
    return own_processes(driver, device, count, records, sizeof(struct vg_nvml_process));
}

int vg_nvml_utilization(vg_fn_nvml_utilization driver, void *device, struct vg_nvml_sample *samples,
                        unsigned *count, uint64_t since) {
    int result = driver(device, samples, count, since);
    if (result != VG_NVML_SUCCESS || samples == NULL || count == NULL || shows_all_processes())
        return result;
    unsigned kept = 0;
    for (unsigned i = 0; i < *count; i++) {
        uint32_t pid = container_pid(samples[i].pid);
        if (pid == 0)
            continue;
        samples[kept] = samples[i];
        samples[kept++].pid = pid;
    }
    memset(samples + kept, 0, (*count - kept) * sizeof *samples);
    *count = kept;
    return result;
}
