#define _GNU_SOURCE
#include "hostpid.h"

#include "broker.h"
#include "devices.h"
#include "hooks.h"
#include "log.h"
#include "node_lock.h"
#include "process.h"
#include "slots.h"
#include "util.h"

#include <sys/mman.h>
#include <unistd.h>

static const uint64_t initial_pid_namespace = 4026531836u;
static const uint64_t not_available = UINT64_MAX;
static const uint64_t poll_pause_ns = 20000000u;
static const uint64_t container_wait_ns = 2000000000u, node_wait_ns = 30000000000u;
static const uint64_t first_retry_ns = 5000000000u, longest_retry_ns = 60000000000u;
enum { POLLS = 5, RECORDS = 1024, MEASURES = 5 };

/* What the looks so far have left: PIDs of which one is ours, and when the next one may be. Only the thread
 * that searches uses it. */
static struct {
    _Atomic bool several;
    uint64_t least; /* bytes that NVML shows for the smallest of them */
    unsigned count;
    uint32_t pids[VG_PIDS_PENDING];
    uint64_t next, pause;
} pending;

static void settle(uint32_t path, int32_t host_pid) {
    struct vg_space *space = vg_here();
    atomic_store(&space->own->hostpid, host_pid);
    atomic_store(&space->own_extension->host_pid_path, path);
}

static void ask_broker(void) {
    struct vg_space *space = vg_here();
    int32_t host_pid = 0;
    int error = vg_broker_ask(&host_pid);
    atomic_store(&space->own_extension->broker_error, (uint32_t)error);
    if (error == 0) {
        settle(VG_HOST_PID_BROKER, host_pid);
        atomic_fetch_add(&space->extension->broker_answers, 1);
        return;
    }
    atomic_fetch_add(&space->extension->broker_fallbacks, 1);
    vg_region_event(space, VG_EVENT_HOST_PID_FALLBACK, -1, (uint64_t)error);
    VG_WARN("the host PID broker is not used: %s (errno %d); the first context will show the host PID",
            vg_broker_reason(error), error);
}

void vg_host_pid_at_init(void) {
    if (vg_here()->pid_namespace == initial_pid_namespace)
        settle(VG_HOST_PID_SAME_NAMESPACE, getpid());
    else if (vg_process.config.hostpid_broker)
        ask_broker();
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
    uint32_t flags = atomic_load(&vg_here()->extension->flags);
    return vg_here()->own->hostpid != 0 || (flags & (VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE)) ==
                                               (VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE);
}

/* Takes turns with the processes of the container, and of the node where that is asked for and the broker
 * failed: NVML's list is the whole node's. Not granted in time: the look goes on without. */
static void take_turn(struct vg_search *search, bool known) {
    struct vg_space *space = vg_here();
    uint64_t start = vg_now();
    const struct vg_config *config = &vg_process.config;
    if (!known && config->hostpid_broker && config->hostpid_node_lock)
        search->node_lock = vg_node_lock_take(start + node_wait_ns);
    uint64_t deadline = vg_now() + container_wait_ns;
    if (deadline > start + node_wait_ns)
        deadline = start + node_wait_ns;
    for (uint64_t pause = poll_pause_ns / 10; !search->locked; pause = poll_pause_ns) {
        enum vg_lock_result result = vg_long_lock_take(&search->lock, &space->locks, VG_LOCK_HOST_PID);
        search->locked = result == VG_LOCK_GRANTED;
        if (result != VG_LOCK_BUSY || vg_now() >= deadline)
            return;
        vg_pause_ns(pause);
    }
}

static void not_found(const uint32_t *pids, unsigned count, uint64_t least) {
    atomic_store(&pending.several, count > 1);
    pending.least = least;
    pending.count = count <= VG_PIDS_PENDING ? count : 0;
    for (unsigned i = 0; i < pending.count; i++)
        pending.pids[i] = pids[i];
    pending.pause = pending.pause == 0 ? first_retry_ns : pending.pause * 2;
    if (pending.pause > longest_retry_ns)
        pending.pause = longest_retry_ns;
    pending.next = vg_now() + pending.pause;
    atomic_store(&vg_here()->own_extension->host_pid_path, VG_HOST_PID_NONE);
}

static bool no_process_data(void) {
    return (atomic_load(&vg_here()->extension->flags) & VG_FLAG_NO_PROCESS_DATA) != 0;
}

void vg_host_pid_before(struct vg_search *search, int device) {
    search->searching = false;
    search->locked = false;
    search->node_lock = -1;
    search->count = 0;
    search->shown = false;
    bool known = own_pid_settled();
    if (known || vg_now() < pending.next) {
        if (no_process_data()) /* the card's memory before and after will be compared */
            take_turn(search, true);
        return;
    }
    take_turn(search, false);
    unsigned count = 0;
    struct vg_nvml_process *records = vg_nvml_list(device, &count);
    if (records == NULL) {
        not_found(NULL, 0, 0);
        return;
    }
    search->searching = true;
    search->count = count < VG_PIDS_SEEN ? count : VG_PIDS_SEEN;
    for (unsigned i = 0; i < search->count; i++)
        search->pids[i] = records[i].pid;
    vg_nvml_list_free(records);
}

static bool listed(const uint32_t *pids, unsigned count, uint32_t pid) {
    for (unsigned i = 0; i < count; i++)
        if (pids[i] == pid)
            return true;
    return false;
}

/* PIDs that can be ours: nobody of the container has them, and they are new, or left over from an earlier
 * look. At most VG_PIDS_PENDING are written; how many there are, and what NVML shows for the smallest. */
static unsigned candidates(const struct vg_search *search, int device, uint32_t *out, uint64_t *least) {
    unsigned count = 0, found = 0;
    *least = 0;
    struct vg_nvml_process *records = vg_nvml_list(device, &count);
    for (unsigned i = 0; records != NULL && i < count && i < RECORDS; i++) {
        uint32_t pid = records[i].pid;
        bool possible = pending.count != 0 ? listed(pending.pids, pending.count, pid)
                                           : !listed(search->pids, search->count, pid);
        unsigned kept = found < VG_PIDS_PENDING ? found : VG_PIDS_PENDING;
        if (!possible || listed(out, kept, pid) || vg_slot_find(vg_here(), (int32_t)pid, false, true) >= 0)
            continue;
        if (found < VG_PIDS_PENDING)
            out[found] = pid;
        if (records[i].used != not_available && (found == 0 || records[i].used < *least))
            *least = records[i].used;
        found++;
    }
    vg_nvml_list_free(records);
    return found;
}

static void look(const struct vg_search *search, int device) {
    uint32_t pids[VG_PIDS_PENDING];
    uint64_t least = 0;
    unsigned count = candidates(search, device, pids, &least);
    for (int poll = 0; poll < POLLS && count == 0; poll++) {
        vg_pause_ns(poll_pause_ns);
        count = candidates(search, device, pids, &least);
    }
    if (count != 1) {
        not_found(pids, count, least);
        return;
    }
    _Atomic uint32_t *flags = &vg_here()->extension->flags;
    if (pids[0] == (uint32_t)getpid()) { /* the driver names PIDs of the caller's namespace */
        atomic_fetch_or(flags, VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE);
        settle(VG_HOST_PID_NONE, 0);
    } else {
        atomic_fetch_or(flags, VG_FLAG_NVML_SETTLED);
        settle(VG_HOST_PID_NVML, (int32_t)pids[0]);
    }
}

/* What is counted beside contexts while NVML is asked. */
struct books {
    uint64_t beside, changes;
};

static struct books look_up_books(int device) {
    return (struct books){vg_slot_beside_contexts(vg_here(), device), vg_slot_changes(vg_here())};
}

static bool same(const struct books *a, const struct books *b) {
    return a->beside == b->beside && a->changes == b->changes;
}

/* The host PID is known by another way. Waits until NVML shows this process, and finds out by which number: a
 * list with both says nothing. */
static void await_entry(struct vg_search *search, int device) {
    uint32_t host = (uint32_t)atomic_load(&vg_here()->own->hostpid), own = (uint32_t)getpid();
    bool host_named = false, own_named = false;
    for (int poll = 0; poll <= POLLS && !host_named && !own_named; poll++) {
        unsigned count = 0;
        struct books before = look_up_books(device);
        struct vg_nvml_process *records = vg_nvml_list(device, &count);
        struct books after = look_up_books(device);
        if (records == NULL)
            return;
        for (unsigned i = 0; i < count && i < RECORDS; i++) {
            host_named |= host != 0 && records[i].pid == host;
            own_named |= records[i].pid == own;
            if (!search->shown && vg_pid_is_own(records[i].pid) && records[i].used != not_available) {
                search->shown = same(&before, &after);
                search->bytes = records[i].used;
                search->beside = after.beside;
            }
        }
        vg_nvml_list_free(records);
        if (!host_named && !own_named)
            vg_pause_ns(poll_pause_ns);
    }
    if (host_named == own_named || host == 0)
        return;
    atomic_fetch_or(&vg_here()->extension->flags,
                    host_named ? VG_FLAG_NVML_SETTLED : VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE);
}

void vg_host_pid_after(struct vg_search *search, int device, bool activated) {
    if (!activated)
        return;
    if (search->searching && !own_pid_settled())
        look(search, device);
    else if (own_pid_settled() && !no_process_data())
        await_entry(search, device);
}

void vg_host_pid_done(struct vg_search *search) {
    if (search->locked)
        vg_long_lock_drop(&search->lock);
    vg_node_lock_drop(search->node_lock);
    search->locked = false;
    search->node_lock = -1;
}

bool vg_host_pid_ambiguous(void) {
    return atomic_load(&pending.several);
}

uint64_t vg_host_pid_least(const struct vg_search *search) {
    return search != NULL && atomic_load(&pending.several) ? pending.least : 0;
}

void vg_nvml_shows_no_processes(void) {
    uint32_t before = atomic_fetch_or(&vg_here()->extension->flags, VG_FLAG_NO_PROCESS_DATA);
    if ((before & VG_FLAG_NO_PROCESS_DATA) == 0)
        vg_region_event(vg_here(), VG_EVENT_NO_PROCESS_DATA, -1, 0);
}

void vg_host_pid_after_fork_child(void) {
    pending.count = 0;
    pending.least = 0;
    pending.next = pending.pause = 0;
    atomic_store(&pending.several, false);
    vg_broker_after_fork_child();
    vg_node_lock_after_fork_child();
}

/* Where NVML names host PIDs, the own PID is that of somebody else on the node. */
bool vg_pid_is_own(uint32_t pid) {
    const struct vg_space *space = vg_here();
    uint32_t host = space->own != NULL ? (uint32_t)atomic_load(&space->own->hostpid) : 0;
    uint32_t settled = VG_FLAG_NVML_SETTLED, both = settled | VG_FLAG_NVML_OWN_NAMESPACE;
    bool by_host = (atomic_load(&space->extension->flags) & both) == settled;
    return pid != 0 && (pid == host || (!by_host && pid == (uint32_t)getpid()));
}

static bool own_namespace_named(const struct vg_space *space) {
    uint32_t both = VG_FLAG_NVML_SETTLED | VG_FLAG_NVML_OWN_NAMESPACE;
    return (atomic_load(&space->extension->flags) & both) == both;
}

uint32_t vg_nvml_pid(uint32_t pid) {
    struct vg_space *space = vg_here();
    int slot = vg_slot_find(space, (int32_t)pid, true, false);
    if (slot < 0)
        return 0;
    return own_namespace_named(space) ? pid : (uint32_t)atomic_load(&space->region->procs[slot].hostpid);
}

int vg_slot_of_nvml_pid(uint32_t pid) {
    struct vg_space *space = vg_here();
    bool own = own_namespace_named(space);
    int slot = vg_slot_find(space, (int32_t)pid, own, !own);
    return slot < 0 && space->own != NULL && vg_pid_is_own(pid) ? space->slot : slot;
}

static bool own_memory(int device, uint64_t *bytes) {
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

/* Memory that comes or goes while NVML is asked is in one of the two numbers only. It is no context: of
 * several answers that with the least left over counts. */
bool vg_nvml_own_memory(int device, uint64_t *bytes, uint64_t *beside) {
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < MEASURES; i++) {
        uint64_t shown;
        struct books before = look_up_books(device);
        if (!own_memory(device, &shown))
            break;
        struct books after = look_up_books(device);
        uint64_t most = after.beside > before.beside ? after.beside : before.beside;
        uint64_t left = shown > most ? shown - most : 0;
        if (left < least) {
            least = left;
            *bytes = shown;
            *beside = most;
        }
        if (same(&before, &after))
            break;
    }
    return least != UINT64_MAX;
}
