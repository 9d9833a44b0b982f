/* NVML as the container should see it: its limit, its usage, its own processes. */
#define _GNU_SOURCE
#include "devices.h"
#include "hooks.h"
#include "hostpid.h"
#include "process.h"
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RECORDS = 8192 }; /* accounting keeps 4,000 */

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

/* The records of a list: how long one is and where in it the PID is. */
struct shape {
    size_t size, pid;
};

/* Room of our own for all that the driver lists. */
static char *room_for_all(struct shape shape) {
    char *all =
        mmap(NULL, MAX_RECORDS * shape.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return all != MAP_FAILED ? all : NULL;
}

/* Of the `found` records that the driver has put into such a room the container's own, with the PIDs in it,
 * by the protocol of NVML's lists; the room is given back. */
static int hand_over(int result, struct shape shape, char *all, unsigned found, unsigned *count,
                     void *records) {
    unsigned capacity = *count, kept = 0;
    for (unsigned i = 0; result == VG_NVML_SUCCESS && i < found; i++) {
        char *record = all + i * shape.size;
        uint32_t pid;
        memcpy(&pid, record + shape.pid, sizeof pid);
        pid = container_pid(pid);
        if (pid == 0)
            continue;
        memcpy(record + shape.pid, &pid, sizeof pid);
        if (kept < capacity && records != NULL)
            memcpy((char *)records + kept * shape.size, record, shape.size);
        kept++;
    }
    munmap(all, MAX_RECORDS * shape.size);
    if (result == VG_NVML_SUCCESS || result == VG_NVML_NOT_FOUND)
        *count = kept;
    return kept > capacity || (kept > 0 && records == NULL) ? VG_NVML_INSUFFICIENT_SIZE : result;
}

/* A list of samples is never empty; who asks how long it is gets room for all processes of the container, of
 * which one may become busy before the next call. */
static int of_samples(int result, unsigned *count) {
    if (result == VG_NVML_INSUFFICIENT_SIZE && vg_region_attached()) {
        unsigned processes = vg_region_slots(vg_here()->region);
        *count = *count < processes ? processes : *count;
    }
    return result == VG_NVML_SUCCESS && *count == 0 ? VG_NVML_NOT_FOUND : result;
}

typedef int (*process_list)(void *device, unsigned *count, void *records);

static int own_processes(process_list driver, void *device, unsigned *count, void *records, size_t size) {
    if (count == NULL || shows_all_processes())
        return driver(device, count, records);
    struct shape shape = {size, 0};
    char *all = room_for_all(shape);
    if (all == NULL)
        return VG_NVML_MEMORY;
    unsigned found = MAX_RECORDS;
    int result = driver(device, &found, all);
    return hand_over(result, shape, all, found, count, records);
}

int vg_nvml_processes_v1(vg_fn_nvml_processes_v1 driver, void *device, unsigned *count, void *records) {
    return own_processes(driver, device, count, records, sizeof(struct vg_nvml_process_v1));
}

int vg_nvml_processes(vg_fn_nvml_processes driver, void *device, unsigned *count, void *records) {
    return own_processes(driver, device, count, records, sizeof(struct vg_nvml_process));
}

int vg_nvml_accounting_pids(vg_fn_nvml_accounting_pids driver, void *device, unsigned *count, void *pids) {
    return own_processes(driver, device, count, pids, sizeof(uint32_t));
}

int vg_nvml_process_details(vg_fn_nvml_process_details driver, void *device,
                            struct vg_nvml_process_details *list) {
    if (list == NULL || shows_all_processes())
        return driver(device, list);
    if (list->version != VG_NVML_VERSION(*list, 1))
        return VG_NVML_VERSION_MISMATCH;
    struct shape shape = {sizeof(struct vg_nvml_process_detail),
                          offsetof(struct vg_nvml_process_detail, pid)};
    struct vg_nvml_process_details all = *list;
    all.count = MAX_RECORDS;
    all.records = room_for_all(shape);
    if (all.records == NULL)
        return VG_NVML_MEMORY;
    int result = driver(device, &all);
    return hand_over(result, shape, all.records, all.count, &list->count, list->records);
}

int vg_nvml_utilization(vg_fn_nvml_utilization driver, void *device, struct vg_nvml_sample *samples,
                        unsigned *count, uint64_t since) {
    if (count == NULL || shows_all_processes())
        return driver(device, samples, count, since);
    struct shape shape = {sizeof(struct vg_nvml_sample), offsetof(struct vg_nvml_sample, pid)};
    char *all = room_for_all(shape);
    if (all == NULL)
        return VG_NVML_MEMORY;
    unsigned found = MAX_RECORDS;
    int result = driver(device, (struct vg_nvml_sample *)all, &found, since);
    result = hand_over(result, shape, all, found, count, samples);
    return of_samples(result, count);
}

int vg_nvml_utilization_info(vg_fn_nvml_utilization_info driver, void *device,
                             struct vg_nvml_utilization_info *info) {
    if (info == NULL || shows_all_processes())
        return driver(device, info);
    if (info->version != VG_NVML_VERSION(*info, 1))
        return VG_NVML_VERSION_MISMATCH;
    struct shape shape = {sizeof(struct vg_nvml_utilization), offsetof(struct vg_nvml_utilization, pid)};
    struct vg_nvml_utilization_info all = *info;
    all.count = MAX_RECORDS;
    all.records = room_for_all(shape);
    if (all.records == NULL)
        return VG_NVML_MEMORY;
    int result = driver(device, &all);
    result = hand_over(result, shape, all.records, all.count, &info->count, info->records);
    return of_samples(result, &info->count);
}

/* The driver's PID of a process of the container; 0, which nobody has, for those of others. */
static uint32_t accounted_pid(uint32_t pid) {
    return shows_all_processes() ? pid : vg_region_attached() ? vg_nvml_pid(pid) : 0;
}

int vg_nvml_accounting(vg_fn_nvml_accounting driver, void *device, unsigned pid, void *stats) {
    return driver(device, accounted_pid(pid), stats);
}

int vg_nvml_accounting_v2(vg_fn_nvml_accounting_v2 driver, void *device, unsigned *pid_and_stats) {
    if (pid_and_stats == NULL)
        return driver(device, NULL);
    unsigned pid = *pid_and_stats;
    *pid_and_stats = accounted_pid(pid);
    int result = driver(device, pid_and_stats);
    *pid_and_stats = pid;
    return result;
}

/* The program of a process that /proc shows, as NVML names it: without its arguments, cut to the room. */
static bool program_of(unsigned pid, char *name, unsigned size) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int saved = errno, fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, name, size - 1) : -1;
    if (fd >= 0)
        close(fd);
    errno = saved;
    if (length > 0)
        name[length] = '\0';
    return length > 0 && name[0] != '\0';
}

int vg_nvml_process_name(vg_fn_nvml_process_name driver, unsigned pid, char *name, unsigned size) {
    if (name == NULL || size < 2 || shows_all_processes())
        return driver(pid, name, size);
    if (driver(0, name, size) == VG_NVML_UNINITIALIZED)
        return VG_NVML_UNINITIALIZED;
    return program_of(pid, name, size) ? VG_NVML_SUCCESS : VG_NVML_NOT_FOUND;
}
