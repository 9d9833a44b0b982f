#define _GNU_SOURCE
#include "process.h"

#include "admit.h"
#include "devices.h"
#include "discover.h"
#include "hooks.h"
#include "hostpid.h"
#include "log.h"
#include "slots.h"
#include "thread.h"
#include "track.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

_Thread_local struct vg_thread_state vg_thread;

static struct vg_gate closed_gate;
struct vg_gate *_Atomic vg_gate = &closed_gate;
struct vg_process vg_process;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) {
    vg_lock_before_fork();
}

static void after_fork_parent(void) {
    vg_lock_after_fork_parent();
}

static void after_fork_child(void) {
    vg_lock_after_fork_child();
    pthread_mutex_init(&mutex, NULL);
    atomic_store(&vg_gate->word, 0); /* where the kernel does not wipe the page */
    memset(&vg_thread, 0, sizeof vg_thread);
    vg_track_reset();
}

/* Once per process image; a forked child inherits the page, wiped, and the handlers. */
static bool make_gate(void) {
    if (vg_gate != &closed_gate)
        return true;
    struct vg_gate *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return false;
    madvise(page, 4096, MADV_WIPEONFORK);
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    vg_gate = page;
    return true;
}

static void seed_limits(struct vg_region_seed *filled) {
    const struct vg_config *config = &vg_process.config;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        uint64_t sm = vg_config_sm(config, filled->uuids[r], r);
        filled->limits[r] = vg_config_memory(config, filled->uuids[r], r);
        filled->sm_limits[r] = sm == 0 || sm > VG_SM_LIMIT_NONE ? VG_SM_LIMIT_NONE : sm;
    }
    filled->priority = config->priority;
}

static void apply_file(void) {
    const struct vg_config *config = &vg_process.config;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        const char *uuid = vg_process.space.region->uuid[r];
        vg_process.file_memory[r] = config->from_file ? vg_config_memory(config, uuid, r) : 0;
        vg_process.file_sm[r] = config->from_file ? vg_config_sm(config, uuid, r) : 0;
    }
}

static void report_mismatch(const struct vg_region_seed *own) {
    const struct vg_region *region = vg_process.space.region;
    for (unsigned r = 0; r < region->device_count && r < VG_MAX_DEVICES; r++)
        if (region->limit[r] != own->limits[r] || region->sm_limit[r] != own->sm_limits[r])
            VG_INFO("device %u: the region's limits (%llu bytes, %llu %%) apply, not this process's own", r,
                    (unsigned long long)region->limit[r], (unsigned long long)region->sm_limit[r]);
}

/* Too large for a stack; used under the mutex. */
static struct vg_region_seed seed, unnamed;

/* The devices of a region that was made before anybody could name them. */
static void name_devices(void) {
    if (vg_process.space.region->uuid[0][0] != '\0')
        return;
    memset(&unnamed, 0, sizeof unnamed);
    memset(&seed, 0, sizeof seed);
    seed_limits(&unnamed);
    vg_devices_identify(&seed);
    seed_limits(&seed);
    if (seed.uuids[0][0] == '\0')
        return;
    vg_region_name_devices(&vg_process.space, &unnamed, &seed);
    apply_file();
}

/* The bit of the gate word that says how it went. */
static uint32_t open_region(void) {
    memset(&seed, 0, sizeof seed);
    vg_config_load(&vg_process.config);
    struct vg_config *config = &vg_process.config;
    static char path[VG_PATH_LENGTH]; /* outlives the configuration: each lock opens it again */
    bool found = config->lost && vg_discover_region((void *)open_region, path, sizeof path);
    if (!found && getauxval(AT_SECURE) != 0 && !config->from_file)
        return VG_GATE_FORWARD; /* a set-user-ID program makes no file at a path that others know */
    if (!found)
        memcpy(path, config->cache_path, sizeof path);
    if (!vg_region_ready(path))
        vg_devices_identify(&seed);
    seed_limits(&seed);
    enum vg_region_result result = vg_region_open(&vg_process.space, path, &seed);
    if (result == VG_REGION_FOREIGN)
        return VG_GATE_DENIED;
    if (result == VG_REGION_UNAVAILABLE) {
        if (config->failure == VG_FAILURE_DENY)
            return VG_GATE_DENIED;
        if (config->failure == VG_FAILURE_OPEN || !vg_region_private(&vg_process.space, &seed))
            return VG_GATE_FORWARD;
        vg_region_event(&vg_process.space, VG_EVENT_PRIVATE_REGION, -1, 0);
    }
    apply_file();
    if (result == VG_REGION_JOINED) {
        memcpy(seed.uuids, vg_process.space.region->uuid, sizeof seed.uuids);
        seed_limits(&seed);
        report_mismatch(&seed);
    }
    return VG_GATE_REGION;
}

static void refresh_gate(void) {
    uint32_t mask = 0;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        unsigned limit = vg_core_limit(r);
        if (limit != 0)
            mask |= (uint32_t)1 << r;
        struct vg_ext_device *shown = &vg_process.space.extension->devices[r];
        atomic_store_explicit(&shown->memory_limit, vg_memory_limit(r), memory_order_relaxed);
        atomic_store_explicit(&shown->core_limit, limit, memory_order_relaxed);
    }
    atomic_store(&vg_gate->limited_mask, mask);
    if (mask != 0)
        atomic_fetch_or(&vg_gate->word, VG_GATE_LIMITED);
    else
        atomic_fetch_and(&vg_gate->word, ~(uint32_t)VG_GATE_LIMITED);
}

static enum vg_mode mode_of(uint32_t word) {
    if (word & VG_GATE_DENIED)
        return VG_MODE_DENY;
    return word & VG_GATE_READY ? VG_MODE_COUNT : VG_MODE_FORWARD;
}

/* Under the mutex. */
static void attach(void) {
    if (!make_gate())
        return;
    if ((vg_gate->word & (VG_GATE_REGION | VG_GATE_DENIED | VG_GATE_FORWARD)) == 0)
        atomic_fetch_or(&vg_gate->word, open_region());
    if (vg_gate->word & VG_GATE_REGION)
        name_devices();
}

static void start(void) {
    attach();
    if ((vg_gate->word & VG_GATE_REGION) == 0 || (vg_gate->word & VG_GATE_READY) != 0)
        return;
    vg_slot_claim(&vg_process.space);
    vg_gate->single_device = vg_devices_map(&vg_process.space);
    vg_gate->recent_kernel = &vg_process.space.region->recent_kernel;
    vg_gate->tick = &vg_process.space.extension->tick;
    refresh_gate();
    vg_host_pid_at_init();
    atomic_fetch_or_explicit(&vg_gate->word, VG_GATE_READY, memory_order_release);
}

enum vg_mode vg_ready_slow(void) {
    uint32_t word = atomic_load(&vg_gate->word);
    if (word & (VG_GATE_DENIED | VG_GATE_FORWARD))
        return mode_of(word);
    int saved = errno, count = 0;
    bool nested = vg_thread.in_hook;
    vg_thread.in_hook = true;
    if (vg_call_cuDeviceGetCount(&count) == VG_CUDA_SUCCESS) {
        pthread_mutex_lock(&mutex);
        start();
        pthread_mutex_unlock(&mutex);
    }
    vg_thread.in_hook = nested;
    errno = saved;
    return mode_of(atomic_load(&vg_gate->word));
}

bool vg_region_attached(void) {
    if ((atomic_load_explicit(&vg_gate->word, memory_order_acquire) & VG_GATE_REGION) != 0 &&
        vg_process.space.region->uuid[0][0] != '\0')
        return true;
    int saved = errno;
    bool nested = vg_thread.in_hook;
    vg_thread.in_hook = true;
    pthread_mutex_lock(&mutex);
    attach();
    pthread_mutex_unlock(&mutex);
    vg_thread.in_hook = nested;
    errno = saved;
    return (vg_gate->word & VG_GATE_REGION) != 0;
}

uint64_t vg_memory_limit(int device) {
    uint64_t file = atomic_load_explicit(&vg_process.file_memory[device], memory_order_relaxed);
    uint64_t region = atomic_load_explicit(&vg_process.space.region->limit[device], memory_order_relaxed);
    if (file == 0 || (region != 0 && region < file))
        return region;
    return file;
}

unsigned vg_core_limit(int device) {
    const struct vg_region *region = vg_process.space.region;
    uint64_t limit = atomic_load_explicit(&region->sm_limit[device], memory_order_relaxed);
    uint64_t file = atomic_load_explicit(&vg_process.file_sm[device], memory_order_relaxed);
    if (file != 0 && (limit == 0 || file < limit))
        limit = file;
    enum vg_policy policy = vg_process.config.policy;
    bool on = policy == VG_POLICY_FORCE || (policy == VG_POLICY_DEFAULT && region->utilization_switch == 1);
    return on && limit > 0 && limit < VG_SM_LIMIT_NONE ? (unsigned)limit : 0;
}

/* A region limit that still is what the file said before follows the file, so that a raise works too. */
static void move_region_limits(void) {
    struct vg_region *region = vg_process.space.region;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        uint64_t old = vg_process.file_memory[r],
                 now = vg_config_memory(&vg_process.config, region->uuid[r], r);
        atomic_compare_exchange_strong(&region->limit[r], &old, now);
        old = vg_process.file_sm[r] == 0 ? VG_SM_LIMIT_NONE : vg_process.file_sm[r];
        now = vg_config_sm(&vg_process.config, region->uuid[r], r);
        atomic_compare_exchange_strong(&region->sm_limit[r], &old, now == 0 ? VG_SM_LIMIT_NONE : now);
    }
}

void vg_limits_refresh(void) {
    uint64_t tick = atomic_load(vg_gate->tick);
    if (atomic_exchange(&vg_gate->looked_at, tick) == tick)
        return;
    int saved = errno;
    pthread_mutex_lock(&mutex);
    if (vg_config_refresh(&vg_process.config)) {
        move_region_limits();
        apply_file();
        vg_region_event(&vg_process.space, VG_EVENT_LIMITS_FILE, -1, 0);
    }
    refresh_gate();
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

static void give_back(const struct vg_record *record) {
    vg_slot_subtract(&vg_process.space, record->device, VG_KIND_DATA, record->size);
    vg_unreserve(&vg_process.space, record->device, record->size);
}

/* Without locks that the kernel frees nobody could tell that this process is gone: later hooks forward
 * uncounted. */
static void give_everything_back(void) {
    struct vg_space *space = &vg_process.space;
    atomic_store(&vg_gate->word, VG_GATE_FORWARD);
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        vg_track_drop(0, d, give_back);
        uint64_t context = atomic_load(&space->own->used[d].context);
        vg_slot_subtract(space, d, VG_KIND_CONTEXT, context);
        vg_unreserve(space, d, context);
    }
    vg_slot_release(space);
}

/* Readers drop the slot; what admission counts stays until the kernel frees the lock. */
__attribute__((destructor)) static void leave(void) {
    if ((atomic_load(&vg_gate->word) & VG_GATE_READY) == 0)
        return;
    atomic_store(&vg_process.space.own->status, VG_SLOT_FREE);
    if (!vg_lock_lives())
        give_everything_back();
}

int vg_init(vg_fn_init driver, unsigned flags) {
    int result = driver(flags);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    return result;
}
