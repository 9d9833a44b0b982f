#define _GNU_SOURCE
#include "residual.h"

#include "charge.h"
#include "log.h"
#include "process.h"
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { TICKS_OVER = 3, CGROUP_TEXT = 4096 };

uint64_t vg_residual_counted(const struct vg_slot *slot, int device) {
    return atomic_load_explicit(&slot->used[device].context, memory_order_relaxed) +
           atomic_load_explicit(&slot->used[device].data, memory_order_relaxed);
}

uint64_t vg_residual_publish(struct vg_slot *slot, int device, uint64_t counted, uint64_t shown) {
    uint64_t after = vg_residual_counted(slot, device), residual = 0;
    if (after > counted) /* allocated in between: NVML may have seen it or not */
        counted = after;
    if (vg_process.config.residual != VG_RESIDUAL_OFF && shown > counted)
        residual = shown - counted;
    if (atomic_load_explicit(&slot->used[device].residual, memory_order_relaxed) != residual)
        atomic_store(&slot->used[device].residual, residual);
    return residual;
}

void vg_residual_charge(void) {
    struct vg_space *space = vg_here();
    for (int d = 0; d < VG_MAX_DEVICES && vg_process.config.residual == VG_RESIDUAL_CHARGE; d++) {
        uint64_t residual = atomic_load(&space->own->used[d].residual);
        uint64_t shown = atomic_load(&space->own->monitorused[d]);
        vg_charge_set(d, VG_KIND_MODULE, residual < shown ? residual : shown);
    }
}

void vg_residual_drop(int device) {
    atomic_store(&vg_here()->own->used[device].residual, 0);
    vg_charge_set(device, VG_KIND_MODULE, 0);
}

static ssize_t read_cgroup(const char *process, char *text) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/cgroup", process);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, CGROUP_TEXT);
    close(fd);
    return length;
}

/* The PID stands in a file that every process of the container can write: only one of the own cgroup is
 * meant. */
static bool same_container(int32_t pid) {
    static char own[CGROUP_TEXT], other[CGROUP_TEXT]; /* used by the leader's thread alone */
    char name[16];
    snprintf(name, sizeof name, "%d", pid);
    ssize_t length = read_cgroup("self", own);
    return length > 0 && read_cgroup(name, other) == length && memcmp(own, other, (size_t)length) == 0;
}

static void end_largest(int device, uint64_t measured, uint64_t limit) {
    struct vg_space *space = vg_here();
    uint64_t most = 0;
    int32_t victim = 0;
    unsigned used = vg_region_slots(space->region);
    for (unsigned k = 0; k < used; k++) {
        struct vg_slot *slot = &space->region->procs[k];
        uint64_t residual = atomic_load(&slot->used[device].residual);
        if (atomic_load(&slot->status) != VG_SLOT_FREE && residual > most) {
            most = residual;
            victim = atomic_load(&slot->pid);
        }
    }
    if (victim <= 1 || !same_container(victim))
        return;
    VG_ERROR(
        "device %d: %llu bytes in use, limit %llu: process %d with %llu bytes that were never asked for is "
        "killed",
        device, (unsigned long long)measured, (unsigned long long)limit, victim, (unsigned long long)most);
    kill(victim, SIGKILL);
}

void vg_residual_police(int device, uint64_t measured) {
    static unsigned over[VG_MAX_DEVICES];
    uint64_t limit = vg_memory_limit(device);
    bool on = vg_process.config.oom_killer && vg_process.config.residual == VG_RESIDUAL_CHARGE && limit != 0;
    over[device] = on && measured > limit + limit / 10 ? over[device] + 1 : 0;
    if (over[device] < TICKS_OVER)
        return;
    over[device] = 0;
    end_largest(device, measured, limit);
}
