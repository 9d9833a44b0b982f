/* Stream-ordered memory: a pool is charged as a whole, with what the driver has reserved for it. Of the
 * blocks of a pool that can be destroyed there are records: the driver keeps its memory until the last is
 * freed. */
#define _GNU_SOURCE
#include "admit.h"
#include "charge.h"
#include "devices.h"
#include "gate.h"
#include "guard.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"
#include "slots.h"
#include "util.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

enum { FIRST_POOLS = 64, NO_DEVICE = -1, GRAPH_MEMORY_RESERVED = 2, MANAGED = 2, YIELDS = 1000 };
#define GONE                                                                                                 \
    ((void *)UINTPTR_MAX) /* the handle of a pool that is being destroyed, or was with blocks in use */
static const uint64_t trim_pause_ns = 1000000000u, others_wait_ns = 1000000000u, poll_ns = 1000000u;
static const uint64_t granule = (uint64_t)2 << 20;

struct pool {
    void *handle;   /* CUDA device + 1: what the device holds for the memory nodes of graphs */
    int device;     /* region index; NO_DEVICE: memory of the host or of another exporter, not counted */
    unsigned users; /* calls of our own that name it: it is not destroyed meanwhile */
    unsigned trims; /* that give back what it has in reserve: nobody counts on that meanwhile */
    uint64_t charged;
    uint64_t settled; /* how often `charged` was set */
    uint64_t wanted;  /* bytes of requests that the driver has not answered */
    uint64_t held;    /* what they have reserved for the pool to grow by */
    uint64_t number;  /* never given again, as a handle is */
    bool recorded;    /* it can be destroyed: its blocks have records */
    bool destroyed;
    uint64_t live; /* bytes of its blocks with records */
};

static struct pool *pools;
static unsigned pool_count, pool_capacity;
static _Atomic uint32_t guard;

static void lock(void) {
    vg_guard_take(&guard);
}

static void unlock(void) {
    vg_guard_leave(&guard);
}

/* Under the lock. NULL: not known. */
static struct pool *find(void *handle) {
    for (unsigned i = 0; i < pool_count; i++)
        if (pools[i].handle == handle)
            return &pools[i];
    return NULL;
}

/* Under the lock. */
static struct pool *numbered(uint64_t number) {
    for (unsigned i = 0; i < pool_count; i++)
        if (pools[i].number == number)
            return &pools[i];
    return NULL;
}

/* Under the lock. False: no memory for it. */
static bool add(const struct pool *pool) {
    static uint64_t numbers;
    if (pool_count == pool_capacity) {
        unsigned capacity = pool_capacity == 0 ? FIRST_POOLS : pool_capacity * 2;
        struct pool *bigger =
            mmap(NULL, capacity * sizeof *bigger, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bigger == MAP_FAILED)
            return false;
        if (pools != NULL) {
            memcpy(bigger, pools, pool_count * sizeof *pools);
            munmap(pools, pool_capacity * sizeof *pools);
        }
        pools = bigger;
        pool_capacity = capacity;
    }
    pools[pool_count] = *pool;
    pools[pool_count++].number = ++numbers;
    return true;
}

/* What the device holds for graphs, and its default pool, are there for ever. */
static bool can_be_destroyed(void *handle) {
    int count = 0;
    if ((uintptr_t)handle <= VG_MAX_DEVICES)
        return false;
    vg_call_cuDeviceGetCount(&count);
    for (int c = 0; c < count; c++) {
        void *its;
        if (vg_call_cuDeviceGetDefaultMemPool(&its, c) == VG_CUDA_SUCCESS && its == handle)
            return false;
    }
    return true;
}

enum known { KNOWN_COUNTED, KNOWN_UNCOUNTED, KNOWN_NO_ROOM };

/* The device is that of a pool that was not known before. */
static enum known know(void *handle, int device) {
    lock();
    struct pool *pool = find(handle);
    bool found = pool != NULL;
    if (found)
        device = pool->device;
    unlock();
    if (!found) {
        struct pool fresh = {.handle = handle, .device = device, .recorded = can_be_destroyed(handle)};
        lock();
        found = find(handle) != NULL || add(&fresh);
        unlock();
    }
    if (!found)
        return KNOWN_NO_ROOM;
    return device >= 0 ? KNOWN_COUNTED : KNOWN_UNCOUNTED;
}

static bool pool_bytes(void *handle, int attribute, uint64_t *bytes) {
    uintptr_t device = (uintptr_t)handle - 1;
    if (device < VG_MAX_DEVICES)
        return vg_call_cuDeviceGetGraphMemAttribute((int)device, GRAPH_MEMORY_RESERVED, bytes) ==
               VG_CUDA_SUCCESS;
    return vg_call_cuMemPoolGetAttribute(handle, attribute, bytes) == VG_CUDA_SUCCESS;
}

/* Under the lock. NULL: the pool is not known or not counted, or it is being destroyed. */
static struct pool *counted(void *handle) {
    struct pool *pool = handle != GONE ? find(handle) : NULL;
    return pool != NULL && pool->device >= 0 ? pool : NULL;
}

/* What is done to `charged` under the lock, for the rest of the books. */
struct change {
    int device;
    uint64_t more, less;
};

/* Under the lock. `own` bytes are the caller's part of `held`. What other requests hold is there before the
 * pool has grown by it: that much growth is theirs. */
static struct change settle_to(struct pool *pool, uint64_t reserved, uint64_t own) {
    uint64_t target = vg_round_charge(reserved), theirs = pool->held > own ? pool->held - own : 0;
    struct change change = {.device = pool->device};
    if (target < pool->charged)
        change.less = pool->charged - target;
    else if (target - pool->charged > theirs)
        change.more = target - pool->charged - theirs;
    pool->charged += change.more - change.less;
    pool->held = theirs;
    pool->settled++;
    return change;
}

static void apply(const struct change *change, uint64_t own) {
    struct vg_space *space = vg_here();
    if (change->less != 0)
        vg_slot_subtract(space, change->device, VG_KIND_DATA, change->less);
    if (change->more > own)
        vg_reserve(space, change->device, change->more - own);
    if (change->more != 0)
        vg_slot_add(space, change->device, VG_KIND_DATA, change->more);
    if (change->less + own > change->more)
        vg_unreserve(space, change->device, change->less + own - change->more);
}

/* Moves the charge to what the driver has reserved for the pool and gives up `own` bytes of a reservation. An
 * answer of the driver that is older than another one that was used is asked for again. False: nothing was
 * done. */
static bool settle_with(void *handle, uint64_t own) {
    for (;;) {
        uint64_t reserved = 0;
        lock();
        struct pool *pool = counted(handle);
        uint64_t settled = pool != NULL ? pool->settled : 0;
        unlock();
        if (pool == NULL || !pool_bytes(handle, VG_POOL_RESERVED, &reserved))
            return false;
        lock();
        pool = counted(handle);
        bool newest = pool != NULL && pool->settled == settled;
        struct change change = newest ? settle_to(pool, reserved, own) : (struct change){.device = -1};
        unlock();
        if (newest)
            apply(&change, own);
        if (newest || pool == NULL)
            return newest;
    }
}

/* False: the pool is not counted. */
static bool use(void *handle) {
    lock();
    struct pool *pool = counted(handle);
    if (pool != NULL)
        pool->users++;
    unlock();
    return pool != NULL;
}

static void leave(void *handle) {
    lock();
    struct pool *pool = find(handle);
    if (pool != NULL && pool->users > 0)
        pool->users--;
    unlock();
}

static void settle(void *handle) {
    if (!use(handle))
        return;
    settle_with(handle, 0);
    leave(handle);
}

/* Not while a request counts on what the pool has in reserve. */
static void trim_and_settle(void *handle) {
    lock();
    struct pool *pool = counted(handle);
    bool trim = pool != NULL && pool->wanted == 0 && (uintptr_t)handle > VG_MAX_DEVICES;
    if (trim) {
        pool->users++;
        pool->trims++;
    }
    unlock();
    if (trim) {
        vg_call_cuMemPoolTrimTo(handle, 0);
        lock();
        pool = find(handle);
        if (pool != NULL && pool->trims > 0)
            pool->trims--;
        unlock();
        leave(handle);
    }
    settle(handle);
}

static void for_each(void (*action)(void *handle)) {
    if (vg_gate->captures != 0)
        return;
    for (unsigned i = 0;; i++) {
        lock();
        bool more = i < pool_count;
        void *handle = more ? pools[i].handle : NULL;
        unlock();
        if (!more)
            return;
        action(handle);
    }
}

void vg_pools_settle(void) {
    for_each(settle);
}

void vg_pools_trim(void) {
    for_each(trim_and_settle);
}

void vg_pools_trim_asked(void) {
    static _Atomic uint64_t not_before;
    uint64_t now = vg_now(), next = atomic_load(&not_before);
    if (now < next || !atomic_compare_exchange_strong(&not_before, &next, now + trim_pause_ns))
        return;
    atomic_store(&vg_gate->trimmed, atomic_load(&vg_here()->extension->trim));
    vg_pools_trim();
}

void vg_pools_of_graphs(void) {
    int device;
    if (vg_ready() != VG_MODE_COUNT || vg_call_cuCtxGetDevice(&device) != VG_CUDA_SUCCESS || device < 0 ||
        device >= VG_MAX_DEVICES)
        return;
    void *handle = (void *)(uintptr_t)(device + 1);
    if (know(handle, vg_device_of(device)) == KNOWN_COUNTED)
        settle(handle);
}

struct pool_attempt {
    struct vg_charge charge;
    void *pool; /* NULL: not counted */
    size_t size;
};

/* A request of `size` bytes more. `*others` gets what the driver has not answered yet. False: the pool is not
 * counted. */
static bool want(void *handle, size_t size, uint64_t *others) {
    for (unsigned tries = 0;; tries++) {
        lock();
        struct pool *pool = counted(handle);
        bool wait = pool != NULL && pool->trims != 0 && tries < YIELDS;
        if (pool != NULL && !wait) {
            *others = pool->wanted;
            pool->wanted += size;
            pool->users++;
        }
        unlock();
        if (!wait)
            return pool != NULL;
        vg_pause_ns(poll_ns);
    }
}

static void answered(void *handle, size_t size) {
    lock();
    struct pool *pool = find(handle);
    if (pool != NULL)
        pool->wanted -= size < pool->wanted ? size : pool->wanted;
    unlock();
    leave(handle);
}

/* What the pool must grow by for `size` more bytes, where `others` may come first. False: the driver does not
 * say. */
static bool growth_for(void *pool, size_t size, uint64_t others, uint64_t *growth) {
    uint64_t reserved = 0, used = 0;
    if (!pool_bytes(pool, VG_POOL_RESERVED, &reserved) || !pool_bytes(pool, VG_POOL_USED, &used))
        return false;
    uint64_t headroom = reserved > used ? reserved - used : 0;
    headroom -= others < headroom ? others : headroom;
    uint64_t lack = size <= headroom ? 0 : size - headroom;
    *growth = lack > UINT64_MAX - granule ? lack : (lack + granule - 1) & ~(granule - 1);
    return true;
}

static void await_others(void *handle, uint64_t deadline) {
    for (bool waiting = true; waiting && vg_now() < deadline;) {
        vg_pause_ns(poll_ns);
        lock();
        const struct pool *pool = counted(handle);
        waiting = pool != NULL && pool->wanted != 0;
        unlock();
    }
}

/* True: admitted, or not counted; with `attempt->pool` the driver's answer is awaited. `*others`: how much
 * others wanted, who may need less of the pool than they are counted with. */
static bool try(struct pool_attempt *attempt, void *pool, int device, size_t size, uint64_t *others) {
    uint64_t growth = 0;
    if (!want(pool, size, others))
        return true;
    bool told = growth_for(pool, size, *others, &growth);
    bool fits = told && vg_charge_quietly(&attempt->charge, device, growth);
    if (!fits) {
        answered(pool, size);
        return !told;
    }
    lock();
    struct pool *its = counted(pool);
    if (its != NULL && attempt->charge.reserved)
        its->held += attempt->charge.size;
    unlock();
    attempt->pool = pool;
    attempt->size = size;
    return true;
}

static int admit(struct pool_attempt *attempt, void *pool, int device, size_t size) {
    uint64_t others = 0, deadline = 0;
    for (bool trimmed = false; !try(attempt, pool, device, size, &others);) {
        if (deadline == 0)
            deadline = vg_now() + others_wait_ns;
        if (others != 0 && vg_now() < deadline) {
            await_others(pool, deadline);
        } else if (!trimmed) {
            trim_and_settle(pool);
            trimmed = true;
        } else {
            return vg_charge_refuse(device, size);
        }
    }
    return VG_CUDA_SUCCESS;
}

/* 0, or the result for the program. */
static int begin(struct pool_attempt *attempt, void *pool, int device, size_t size, void *stream) {
    *attempt = (struct pool_attempt){.pool = NULL};
    if (pool == NULL || device < 0 || vg_gate_capturing(stream))
        return VG_CUDA_SUCCESS;
    enum known known = know(pool, device);
    if (known != KNOWN_COUNTED)
        return known == KNOWN_NO_ROOM ? VG_CUDA_OUT_OF_MEMORY : VG_CUDA_SUCCESS;
    int saved = errno, result = admit(attempt, pool, device, size);
    errno = saved;
    return result;
}

/* A block of a pool that can be destroyed. Without memory for a record it counts as in use for ever. */
static void record_block(void *handle, uint64_t pointer, size_t size) {
    struct vg_record record = {.size = vg_round_charge(size), .pooled = true};
    lock();
    struct pool *pool = find(handle);
    bool recorded = pool != NULL && pool->recorded;
    if (recorded) {
        pool->live += record.size;
        record.context = pool->number;
        record.device = pool->device;
    }
    unlock();
    if (recorded)
        vg_track_insert(VG_RECORD_LINEAR, pointer, &record);
}

static void end(struct pool_attempt *attempt, int result, const uint64_t *pointer, size_t size) {
    void *handle = attempt->pool;
    if (handle == NULL)
        return;
    uint64_t own = attempt->charge.reserved ? attempt->charge.size : 0;
    if (result == VG_CUDA_SUCCESS)
        record_block(handle, *pointer, size);
    if (result != VG_CUDA_SUCCESS || !settle_with(handle, own)) {
        lock();
        struct pool *pool = counted(handle);
        if (pool != NULL)
            pool->held -= own < pool->held ? own : pool->held;
        unlock();
        vg_charge_abandon(&attempt->charge);
    }
    answered(handle, attempt->size);
}

/* The device whose default or current pool it is, else the current one: a pool that nobody told us of. */
static int device_of_pool(void *pool) {
    int count = 0;
    vg_call_cuDeviceGetCount(&count);
    for (int c = 0; c < count; c++) {
        void *its;
        if ((vg_call_cuDeviceGetMemPool(&its, c) == VG_CUDA_SUCCESS && its == pool) ||
            (vg_call_cuDeviceGetDefaultMemPool(&its, c) == VG_CUDA_SUCCESS && its == pool))
            return vg_device_of(c);
    }
    return vg_current_device();
}

/* The pool of the stream's device and its region index; false: not counted. */
static bool stream_pool(void *stream, void **pool, int *device) {
    int cuda_device = 0;
    if (!vg_stream_device(stream, &cuda_device) ||
        vg_call_cuDeviceGetMemPool(pool, cuda_device) != VG_CUDA_SUCCESS)
        return false;
    *device = vg_device_of(cuda_device);
    return true;
}

int vg_mem_alloc_async(vg_fn_mem_alloc_async driver, uint64_t *pointer, size_t size, void *stream,
                       void *on_stream) {
    struct pool_attempt attempt = {.pool = NULL};
    enum vg_mode mode = vg_ready();
    void *pool = NULL;
    int device = -1, result = VG_CUDA_SUCCESS;
    if (mode == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    if (mode == VG_MODE_COUNT && stream_pool(on_stream, &pool, &device))
        result = begin(&attempt, pool, device, size, on_stream);
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, size, stream);
    end(&attempt, result, pointer, size);
    return result;
}

int vg_mem_alloc_from_pool(vg_fn_mem_alloc_from_pool driver, uint64_t *pointer, size_t size, void *pool,
                           void *stream, void *on_stream) {
    struct pool_attempt attempt = {.pool = NULL};
    enum vg_mode mode = vg_ready();
    int result = VG_CUDA_SUCCESS;
    if (mode == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    if (mode == VG_MODE_COUNT) {
        lock();
        struct pool *known = find(pool);
        int device = known != NULL ? known->device : NO_DEVICE;
        unlock();
        result = begin(&attempt, pool, known != NULL ? device : device_of_pool(pool), size, on_stream);
    }
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, size, pool, stream);
    end(&attempt, result, pointer, size);
    return result;
}

int vg_mem_free_async(vg_fn_mem_free_async driver, uint64_t pointer, void *stream) {
    struct vg_record record;
    bool tracked = vg_charge_freeing(VG_RECORD_LINEAR, pointer, &record);
    int result = driver(pointer, stream);
    if (tracked)
        vg_charge_freed(VG_RECORD_LINEAR, pointer, &record, result);
    return result;
}

/* Managed memory without a device counts on the current one, as that of cuMemAllocManaged does, and before
 * there is one on the first. */
static int device_of_location(const struct vg_location *location, int type) {
    int device = vg_location_device(location);
    if (device >= 0 || type != MANAGED)
        return vg_device_of(device);
    int current = vg_current_device();
    return current >= 0 ? current : 0;
}

int vg_pool_create(vg_fn_pool_create driver, void **pool, const struct vg_pool_props *props) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    int result = driver(pool, props);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        know(*pool, device_of_location(&props->location, props->type));
    return result;
}

/* Takes the handle from the pool once nobody of us uses it, since the driver may give it again. The pool's
 * number, 0: it is not known. */
static uint64_t retire(void *handle) {
    for (unsigned tries = 0;; tries++) {
        lock();
        struct pool *pool = find(handle);
        bool busy = pool != NULL && pool->users != 0 && tries < 2 * YIELDS;
        uint64_t number = pool != NULL ? pool->number : 0;
        if (pool != NULL && !busy)
            pool->handle = GONE;
        unlock();
        if (!busy)
            return number;
        if (tries < YIELDS)
            sched_yield();
        else
            vg_pause_ns(1000000);
    }
}

/* Takes a destroyed pool without blocks out of the table and gives back what was charged for it. */
static void bury(uint64_t number) {
    lock();
    struct pool *pool = numbered(number), gone = {.device = NO_DEVICE};
    if (pool != NULL && pool->destroyed && pool->live == 0) {
        gone = *pool;
        *pool = pools[--pool_count];
    }
    unlock();
    if (gone.device >= 0)
        vg_discharge(gone.device, gone.charged);
}

void vg_pool_block_freed(uint64_t number, uint64_t size) {
    lock();
    struct pool *pool = numbered(number);
    if (pool != NULL)
        pool->live -= size < pool->live ? size : pool->live;
    unlock();
    bury(number);
}

/* The number of a destroyed pool of the device, larger than `after`; 0: there is none. */
static uint64_t next_destroyed(int device, uint64_t after) {
    uint64_t next = 0;
    lock();
    for (unsigned i = 0; i < pool_count; i++) {
        const struct pool *pool = &pools[i];
        if (pool->destroyed && pool->device == device && pool->number > after &&
            (next == 0 || pool->number < next))
            next = pool->number;
    }
    unlock();
    return next;
}

void vg_pools_without_context(int device) {
    for (uint64_t number = next_destroyed(device, 0); number != 0; number = next_destroyed(device, number))
        vg_track_drop(number, device, vg_discharge_record);
}

int vg_pool_destroy(vg_fn_pool_destroy driver, void *handle) {
    uint64_t number = vg_ready() == VG_MODE_COUNT ? retire(handle) : 0;
    int result = driver(handle);
    if (number == 0)
        return result;
    lock();
    struct pool *pool = numbered(number);
    if (pool != NULL && result == VG_CUDA_SUCCESS)
        pool->destroyed = true;
    else if (pool != NULL)
        pool->handle = handle;
    unlock();
    bury(number);
    return result;
}

int vg_pool_trim(vg_fn_pool_trim driver, void *pool, size_t keep) {
    int result = driver(pool, keep);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        settle(pool);
    return result;
}

int vg_pool_set(vg_fn_pool_set driver, int device, void *pool) {
    int result = driver(device, pool);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT &&
        know(pool, vg_device_of(device)) == KNOWN_COUNTED)
        settle(pool);
    return result;
}

int vg_pool_set_location(vg_fn_pool_set_location driver, const struct vg_location *location, int type,
                         void *pool) {
    int result = driver(location, type, pool);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT &&
        know(pool, device_of_location(location, type)) == KNOWN_COUNTED)
        settle(pool);
    return result;
}

int vg_pool_get_location(vg_fn_pool_get_location driver, void **pool, const struct vg_location *location,
                         int type) {
    int result = driver(pool, location, type);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        know(*pool, device_of_location(location, type));
    return result;
}

int vg_graph_mem_trim(vg_fn_graph_mem_trim driver, int device) {
    int result = driver(device);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        vg_pools_settle();
    return result;
}
