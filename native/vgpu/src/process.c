#define _GNU_SOURCE
#include "process.h"

#include "charge.h"
#include "ctx.h"
#include "devices.h"
#include "discover.h"
#include "hooks.h"
#include "hostpid.h"
#include "log.h"
#include "mem.h"
#include "residual.h"
#include "slots.h"
#include "thread.h"
#include "track.h"
#include "util.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

enum { MOVES = 32, LOOKS_AFTER_MOVE = 60 };

_Thread_local struct vg_thread_state vg_thread;

static struct vg_gate closed_gate;
struct vg_gate *_Atomic vg_gate = &closed_gate;
static struct vg_space first_space;
struct vg_process vg_process = {.space = &first_space};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char path[VG_PATH_LENGTH]; /* of the region; outlives the configuration: each lock opens it again */
static _Atomic bool leaving;

/* Work of the library's own: errno stays what it is, calls reach the driver untouched, and no thread is
 * cancelled in it, with a lock. */
struct own_work {
    int saved_errno, cancel_state;
    bool nested;
};

static struct own_work begin_own_work(void) {
    struct own_work work = {.saved_errno = errno, .nested = vg_thread.in_hook};
    vg_thread.in_hook = true;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &work.cancel_state);
    return work;
}

static void end_own_work(const struct own_work *work) {
    pthread_setcancelstate(work->cancel_state, NULL);
    vg_thread.in_hook = work->nested;
    errno = work->saved_errno;
}

static void before_fork(void) {
    vg_lock_before_fork();
}

static void after_fork_parent(void) {
    vg_lock_after_fork_parent();
}

static void after_fork_child(void) {
    vg_lock_after_fork_child();
    vg_region_settle(vg_here());
    pthread_mutex_init(&mutex, NULL);
    atomic_store(&vg_gate->word, 0); /* where the kernel does not wipe the page */
    memset(&vg_thread, 0, sizeof vg_thread);
    vg_track_reset();
    vg_ctx_after_fork_child();
}

/* Once per process image; a forked child inherits the page, wiped, and the handlers. */
static bool make_gate(void) {
    if (vg_gate != &closed_gate)
        return true;
    struct vg_gate *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return false;
    madvise(page, 4096, MADV_WIPEONFORK);
    atomic_store(&page->word, 0); /* a page that is read first costs a second fault when it is written */
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

/* By the driver's word where there is one: what stands in the region is in reach of the workload. */
static const char *uuid_of(int r) {
    const char *known = vg_devices_uuid(r);
    return known != NULL && vg_config_names(&vg_process.config, known) ? known : vg_here()->region->uuid[r];
}

static void identify(struct vg_region_seed *filled) {
    vg_devices_identify(filled);
    seed_limits(filled);
    filled->prepare = NULL;
}

static void apply_file(void) {
    const struct vg_config *config = &vg_process.config;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        const char *uuid = uuid_of(r);
        vg_process.file_memory[r] = config->from_file ? vg_config_memory(config, uuid, r) : 0;
        vg_process.file_sm[r] = config->from_file ? vg_config_sm(config, uuid, r) : 0;
    }
}

static void report_mismatch(const struct vg_region *region, const struct vg_region_seed *own) {
    for (unsigned r = 0; r < region->device_count && r < VG_MAX_DEVICES; r++)
        if (region->limit[r] != own->limits[r] || region->sm_limit[r] != own->sm_limits[r])
            VG_INFO("device %u: the region's limits (%llu bytes, %llu %%) apply, not this process's own", r,
                    (unsigned long long)region->limit[r], (unsigned long long)region->sm_limit[r]);
}

/* Too large for a stack; used under the mutex. */
static struct vg_region_seed seed, unnamed;

/* The devices of a region that was made before anybody could name them. */
static void name_devices(void) {
    if (vg_here()->region->uuid[0][0] != '\0')
        return;
    memset(&unnamed, 0, sizeof unnamed);
    memset(&seed, 0, sizeof seed);
    seed_limits(&unnamed);
    identify(&seed);
    if (seed.uuids[0][0] == '\0')
        return;
    vg_region_name_devices(vg_here(), &unnamed, &seed);
    apply_file();
}

/* Opens the region at `path`. The bit of the gate word that says how it went; 0: it cannot be said just now,
 * for want of a descriptor or of memory. Nobody gets limits of his own by using those up. */
static uint32_t open_space(struct vg_space *space) {
    const struct vg_config *config = &vg_process.config;
    memset(&seed, 0, sizeof seed);
    seed.prepare = identify;
    enum vg_region_result result = vg_region_open(space, path, &seed);
    if (result == VG_REGION_LATER)
        return 0;
    if (result == VG_REGION_FOREIGN)
        return VG_GATE_DENIED;
    if (result == VG_REGION_UNAVAILABLE) {
        if (config->failure == VG_FAILURE_DENY)
            return VG_GATE_DENIED;
        if (config->failure == VG_FAILURE_OPEN)
            return VG_GATE_FORWARD;
        if (seed.prepare != NULL)
            identify(&seed);
        if (!vg_region_private(space, &seed))
            return 0;
        vg_region_event(space, VG_EVENT_PRIVATE_REGION, -1, 0);
    }
    if (result == VG_REGION_JOINED) {
        memcpy(seed.uuids, space->region->uuid, sizeof seed.uuids);
        seed_limits(&seed);
        report_mismatch(space->region, &seed);
    }
    return VG_GATE_REGION;
}

/* The limits of a program that lost its environment: of the region beside the library, else of the
 * container's first process. */
static uint32_t open_region(void) {
    struct vg_config *config = &vg_process.config;
    if (!vg_config_load(config))
        return 0;
    bool found = config->lost && vg_discover_region((void *)open_region, path, sizeof path);
    bool secure = getauxval(AT_SECURE) != 0;
    if (!found && secure && !config->from_file)
        return VG_GATE_FORWARD; /* a set-user-ID program makes no file at a path that others know */
    if (config->lost && !found && !vg_config_load_of_init(config))
        return 0;
    if (!found)
        strcpy(path, config->cache_path); /* of the same size */
    uint32_t bit = open_space(vg_here());
    if (bit == VG_GATE_REGION)
        apply_file();
    return bit;
}

/* All processes write the same: who finds it there does not dirty the page. */
static void show(_Atomic uint64_t *word, uint64_t value) {
    if (atomic_load_explicit(word, memory_order_relaxed) != value)
        atomic_store_explicit(word, value, memory_order_relaxed);
}

static void refresh_gate(void) {
    uint32_t mask = 0;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        unsigned limit = vg_core_limit(r);
        if (limit != 0)
            mask |= (uint32_t)1 << r;
        struct vg_ext_device *shown = &vg_here()->extension->devices[r];
        show(&shown->memory_limit, vg_memory_limit(r));
        show(&shown->core_limit, limit);
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

static void watch_words(struct vg_space *space) {
    vg_gate->recent_kernel = &space->region->recent_kernel;
    vg_gate->tick = &space->extension->tick;
    vg_gate->shared = space->extension;
    vg_gate->trimmed = atomic_load(&space->extension->trim);
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

static void follow(void);

/* The region may have been replaced since it was opened. False: the next call asks again. */
static bool claim_slot(void) {
    struct vg_space *space = vg_here();
    if (vg_slot_claim(space))
        return true;
    follow();
    return vg_here() != space && vg_slot_claim(vg_here());
}

static void start(void) {
    attach();
    if ((vg_gate->word & VG_GATE_REGION) == 0 || (vg_gate->word & VG_GATE_READY) != 0 || !claim_slot())
        return;
    vg_gate->single_device = vg_devices_map(vg_here());
    watch_words(vg_here());
    apply_file();
    refresh_gate();
    atomic_store(&vg_gate->looked_at, vg_tick(vg_gate)); /* all of this is as fresh as a look */
    vg_host_pid_at_init();
    atomic_fetch_or_explicit(&vg_gate->word, VG_GATE_READY, memory_order_release);
}

enum vg_mode vg_ready_slow(void) {
    uint32_t word = atomic_load(&vg_gate->word);
    if (word & (VG_GATE_DENIED | VG_GATE_FORWARD))
        return mode_of(word);
    int count = 0;
    struct own_work work = begin_own_work();
    bool running = vg_call_cuDeviceGetCount(&count) == VG_CUDA_SUCCESS;
    if (running) {
        pthread_mutex_lock(&mutex);
        start();
        pthread_mutex_unlock(&mutex);
    }
    end_own_work(&work);
    word = atomic_load(&vg_gate->word);
    bool told = (word & (VG_GATE_READY | VG_GATE_DENIED | VG_GATE_FORWARD)) != 0;
    return running && !told ? VG_MODE_DENY : mode_of(word); /* the next call asks again */
}

uint64_t vg_memory_limit(int device) {
    uint64_t file = atomic_load_explicit(&vg_process.file_memory[device], memory_order_relaxed);
    uint64_t region = atomic_load_explicit(&vg_here()->region->limit[device], memory_order_relaxed);
    if (file == 0 || (region != 0 && region < file))
        return region;
    return file;
}

unsigned vg_core_limit(int device) {
    const struct vg_region *region = vg_here()->region;
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
    struct vg_region *region = vg_here()->region;
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        uint64_t old = vg_process.file_memory[r], now = vg_config_memory(&vg_process.config, uuid_of(r), r);
        atomic_compare_exchange_strong(&region->limit[r], &old, now);
        old = vg_process.file_sm[r] == 0 ? VG_SM_LIMIT_NONE : vg_process.file_sm[r];
        now = vg_config_sm(&vg_process.config, uuid_of(r), r);
        atomic_compare_exchange_strong(&region->sm_limit[r], &old, now == 0 ? VG_SM_LIMIT_NONE : now);
    }
}

/* What is known of this process and its driver goes along; the rest of the new slot is its own. */
static void switch_to(struct vg_space *old, struct vg_space *next) {
    const uint32_t kept = VG_FLAG_NO_PROCESS_DATA | VG_FLAG_NVML_OWN_NAMESPACE | VG_FLAG_NVML_SETTLED;
    atomic_store(&next->own->hostpid, atomic_load(&old->own->hostpid));
    atomic_store(&next->own_extension->host_pid_path, atomic_load(&old->own_extension->host_pid_path));
    atomic_store(&next->own_extension->broker_error, atomic_load(&old->own_extension->broker_error));
    atomic_fetch_or(&next->extension->flags, atomic_load(&old->extension->flags) & kept);
    vg_slot_move(old, next);
    atomic_store_explicit(&vg_process.space, next, memory_order_release);
    watch_words(next);
    vg_slot_move(old, next);
    atomic_fetch_add(&old->extension->tick, 1); /* whoever still looks there looks now */
    vg_region_event(next, VG_EVENT_REGION_REPLACED, -1, 0);
    VG_WARN("region %s was replaced: this process has moved to the new one", path);
}

/* False: a program that only asks NVML, without a slot. */
static bool counted(void) {
    return (atomic_load(&vg_gate->word) & VG_GATE_READY) != 0;
}

/* Under the mutex: a region that was replaced, removed, cut or cleared is joined anew. */
static void follow(void) {
    static struct vg_space later[MOVES], *before;
    static unsigned moves, looks;
    struct vg_space *old = vg_here(), *next = &later[moves % MOVES];
    if (!vg_region_replaced(old)) {
        if (before != NULL && looks++ < LOOKS_AFTER_MOVE) /* calls that were under way still count there */
            vg_slot_move(before, old);
        return;
    }
    uint32_t bit = VG_GATE_DENIED;
    if (moves < MOVES)
        bit = open_space(next);
    else
        VG_ERROR("region %s is replaced again and again: nothing more is allocated or launched", path);
    if (bit == VG_GATE_REGION && counted() && !vg_slot_claim(next)) {
        vg_region_close(next); /* it is looked at again a second later */
    } else if (bit == VG_GATE_REGION) {
        before = counted() ? old : NULL;
        if (before != NULL) {
            switch_to(old, next);
        } else {
            vg_region_settle(next);
            atomic_store_explicit(&vg_process.space, next, memory_order_release);
        }
        looks = 0;
        moves++;
        name_devices();
        apply_file();
    } else if (bit != 0) {
        atomic_fetch_or(&vg_gate->word, bit);
        atomic_fetch_and(&vg_gate->word, ~(uint32_t)VG_GATE_READY);
    }
}

static void look(void) {
    struct own_work work = begin_own_work();
    pthread_mutex_lock(&mutex);
    follow();
    if (vg_config_refresh(&vg_process.config)) {
        move_region_limits();
        apply_file();
        vg_region_event(vg_here(), VG_EVENT_LIMITS_FILE, -1, 0);
    }
    if (counted() && !atomic_load(&leaving))
        vg_slot_mend(vg_here());
    if (atomic_load(&leaving)) /* it may have begun to leave meanwhile */
        atomic_store(&vg_here()->own->status, VG_SLOT_FREE);
    if (counted())
        vg_residual_charge();
    refresh_gate();
    pthread_mutex_unlock(&mutex);
    end_own_work(&work);
}

void vg_limits_refresh(void) {
    uint64_t tick = vg_tick(vg_gate);
    if (atomic_exchange(&vg_gate->looked_at, tick) == tick)
        return;
    look();
    struct own_work work = begin_own_work();
    vg_pools_settle();
    vg_vmm_settle();
    end_own_work(&work);
}

void vg_trim_asked(void) {
    struct own_work work = begin_own_work();
    vg_pools_trim_asked();
    end_own_work(&work);
}

bool vg_region_moved(const struct vg_space *from) {
    if (vg_here() == from && vg_lock_missed())
        look();
    return vg_here() != from;
}

/* A program without a slot has no hooked call that looks once a second. */
static void look_without_slot(void) {
    static _Atomic uint64_t looked;
    uint64_t now = vg_unix_seconds();
    if (atomic_exchange(&looked, now) != now)
        look();
}

bool vg_region_attached(void) {
    if ((atomic_load_explicit(&vg_gate->word, memory_order_acquire) & VG_GATE_REGION) != 0 &&
        vg_here()->region->uuid[0][0] != '\0') {
        if (!counted())
            look_without_slot();
        return true;
    }
    struct own_work work = begin_own_work();
    pthread_mutex_lock(&mutex);
    attach();
    vg_region_settle(vg_here());
    pthread_mutex_unlock(&mutex);
    end_own_work(&work);
    return (vg_gate->word & VG_GATE_REGION) != 0;
}

/* Without locks that the kernel frees nobody could tell that this process is gone: later hooks forward
 * uncounted. */
static void give_everything_back(void) {
    struct vg_space *space = vg_here();
    atomic_store(&vg_gate->word, VG_GATE_FORWARD);
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        vg_track_drop(0, d, vg_discharge_record);
        vg_charge_set(d, VG_KIND_CONTEXT, 0);
        vg_charge_set(d, VG_KIND_MODULE, 0);
    }
    vg_slot_release(space);
}

/* Readers drop the slot; what admission counts stays until the kernel frees the lock. */
__attribute__((destructor)) static void leave(void) {
    if ((atomic_load(&vg_gate->word) & VG_GATE_READY) == 0)
        return;
    atomic_store(&leaving, true);
    atomic_store(&vg_here()->own->status, VG_SLOT_FREE);
    if (!vg_lock_lives())
        give_everything_back();
}

int vg_init(vg_fn_init driver, unsigned flags) {
    int result = driver(flags);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    return result;
}
