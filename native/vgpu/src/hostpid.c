#define _GNU_SOURCE
#include "hostpid.h"

#include "devices.h"
#include "hooks.h"
#include "process.h"
#include "slots.h"
#include "util.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t initial_pid_namespace = 4026531836u;
static const uint64_t not_available = UINT64_MAX;
static const uint64_t poll_pause_ns = 20000000u;
enum { POLLS = 5, RECORDS = 1024 };

static bool in_initial_namespace(void) {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 && st.st_ino == initial_pid_namespace;
}

static void settle(uint32_t path, int32_t host_pid) {
    struct vg_space *space = &vg_process.space;
    atomic_store(&space->own->hostpid, host_pid);
    atomic_store(&space->own_extension->host_pid_path, path);
}

void vg_host_pid_at_init(void) {
    if (in_initial_namespace())
        settle(VG_HOST_PID_SAME_NAMESPACE, getpid());
}

struct vg_nvml_process *vg_nvml_list(int device, unsigned *count) {
    void *nvml = vg_nvml_device(device);
    if (nvml == NULL)
        return NULL;
    size_t length = RECORDS * sizeof(struct vg_nvml_process);
    struct vg_nvml_process *records =
        mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (records == MAP_FAILED)
        return NULL;
    *count = RECORDS;
    if (vg_call_nvmlDeviceGetComputeRunningProcesses_v3(nvml, count, records) == VG_NVML_SUCCESS)
        return records;
    munmap(records, length);
    return NULL;
}

void vg_nvml_list_free(struct vg_nvml_process *records) {
    if (records != NULL)
        munmap(records, RECORDS * sizeof *records);
}

static bool own_pid_settled(void) {
    uint32_t flags = atomic_load(&vg_process.space.extension->flags);
    return vg_process.space.own->hostpid != 0 ||
           (flags & (VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE)) ==
               (VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE);
}

void vg_host_pid_before(struct vg_pids *before, int device) {
    before->valid = false;
    if (own_pid_settled())
        return;
    unsigned count = 0;
    struct vg_nvml_process *records = vg_nvml_list(device, &count);
    if (records == NULL)
        return;
    before->valid = true;
    before->count = count < VG_PIDS_SEEN ? count : VG_PIDS_SEEN;
    for (unsigned i = 0; i < before->count; i++)
        before->pids[i] = records[i].pid;
    vg_nvml_list_free(records);
}

static bool listed(const struct vg_pids *pids, uint32_t pid) {
    for (unsigned i = 0; i < pids->count; i++)
        if (pids->pids[i] == pid)
            return true;
    return false;
}

/* The one PID that is new and nobody else's, 0: none, -1: more than one. */
static int64_t only_new(const struct vg_pids *before, int device) {
    unsigned count = 0;
    int64_t found = 0;
    struct vg_nvml_process *records = vg_nvml_list(device, &count);
    for (unsigned i = 0; records != NULL && i < count && found >= 0; i++) {
        uint32_t pid = records[i].pid;
        if (!listed(before, pid) && vg_slot_find(&vg_process.space, (int32_t)pid, false, true) < 0)
            found = found == 0 ? (int64_t)pid : -1;
    }
    vg_nvml_list_free(records);
    return found;
}

void vg_host_pid_after(const struct vg_pids *before, int device) {
    if (!before->valid || own_pid_settled())
        return;
    int64_t found = only_new(before, device);
    for (int poll = 0; poll < POLLS && found == 0; poll++) {
        vg_pause_ns(poll_pause_ns);
        found = only_new(before, device);
    }
    if (found <= 0) {
        atomic_store(&vg_process.space.own_extension->host_pid_path, VG_HOST_PID_NONE);
        return;
    }
    _Atomic uint32_t *flags = &vg_process.space.extension->flags;
    if (found == getpid()) { /* the driver names PIDs of the caller's namespace */
        atomic_fetch_or(flags, VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE);
        settle(VG_HOST_PID_NONE, 0);
    } else {
        atomic_fetch_or(flags, VG_FLAG_NVML_SETTLED);
        settle(VG_HOST_PID_NVML, (int32_t)found);
    }
}

bool vg_pid_is_own(uint32_t pid) {
    const struct vg_slot *own = vg_process.space.own;
    int32_t host = own != NULL ? atomic_load(&own->hostpid) : 0;
    return pid != 0 && (pid == (uint32_t)host || pid == (uint32_t)getpid());
}

int vg_slot_of_nvml_pid(uint32_t pid) {
    struct vg_space *space = &vg_process.space;
    uint32_t flags = atomic_load(&space->extension->flags);
    bool own = (flags & VG_FLAG_NVML_SETTLED) != 0 && (flags & VG_FLAG_NVML_OWN_NAMESPACE) != 0;
    int slot = vg_slot_find(space, (int32_t)pid, own, !own);
    return slot < 0 && space->own != NULL && vg_pid_is_own(pid) ? space->slot : slot;
}

bool vg_nvml_own_memory(int device, uint64_t *bytes) {
    unsigned count = 0;
    bool found = false;
    struct vg_nvml_process *records = vg_nvml_list(device, &count);
    for (unsigned i = 0; records != NULL && i < count && !found; i++) {
        found = vg_pid_is_own(records[i].pid) && records[i].used != not_available;
        if (found)
            *bytes = records[i].used;
    }
    vg_nvml_list_free(records);
    return found;
}
