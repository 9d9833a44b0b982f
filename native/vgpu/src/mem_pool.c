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

#include <sched.h>
#include <string.h>
#include <sys/mman.h>

enum { FIRST_POOLS = 64, NO_DEVICE = -1, GRAPH_MEMORY_RESERVED = 2, MANAGED = 2, YIELDS = 1000 };
#define GONE                                                                                                 \
    ((void *)UINTPTR_MAX) /* the handle of a pool that is being destroyed, or was with blocks in use */
static const uint64_t trim_pause_ns = 1000000000u;
static const uint64_t granule = (uint64_t)2 << 20;

struct pool {
    void *handle;   /* CUDA device + 1: what the device holds for the memory nodes of graphs */
    int device;     /* region index; NO_DEVICE: memory of the host or of another exporter, not counted */
    unsigned users; /* calls of our own that name it: it is not destroyed meanwhile */
    uint64_t charged;
    uint64_t number; /* never given again, as a handle is */
    bool recorded;   /* it can be destroyed: its blocks have records */
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

/* Moves the charge of the pool to `reserved`; `held` bytes of it are in the reservation already. */
static void move_charge(void *handle, uint64_t reserved, uint64_t held) {
    uint64_t target = vg_round_charge(reserved);
    lock();
    struct pool *pool = find(handle);
    int device = pool != NULL ? pool->device : -1;
    uint64_t before = pool != NULL ? pool->charged : 0;
    if (pool != NULL)
        pool->charged = target;
    unlock();
    if (device < 0)
        return;
    struct vg_space *space = vg_here();
    if (target < before)
        vg_slot_subtract(space, device, VG_KIND_DATA, before - target);
    if (target > before + held)
        vg_reserve(space, device, target - before - held);
    if (target > before)
        vg_slot_add(space, device, VG_KIND_DATA, target - before);
    if (target < before + held)
        vg_unreserve(space, device, before + held - target);
}

/* False: the pool is not known or not counted, or it is being destroyed. */
static bool use(void *handle) {
    lock();
    struct pool *pool = handle != GONE ? find(handle) : NULL;
    if (pool != NULL && pool->device < 0)
        pool = NULL;
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
    uint64_t reserved = 0;
    if (!use(handle))
        return;
    if (pool_bytes(handle, VG_POOL_RESERVED, &reserved))
        move_charge(handle, reserved, 0);
    leave(handle);
}

static void trim_and_settle(void *handle) {
    if (!use(handle))
        return;
    if ((uintptr_t)handle > VG_MAX_DEVICES)
        vg_call_cuMemPoolTrimTo(handle, 0);
    leave(handle);
    settle(handle);
}

static void for_each(void (*action)(void *handle)) {
    if (vg_gate->captures != 0)
        return;
    for (unsigned i = 0;; i++) {
        lock();
        void *handle = i < pool_count ? pools[i].handle : NULL;
        unlock();
        if (handle == NULL)
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

/* What the pool must grow by for `size` more bytes. False: the driver does not say. */
static bool growth_for(void *pool, size_t size, uint64_t *growth) {
    uint64_t reserved = 0, used = 0;
    if (!pool_bytes(pool, VG_POOL_RESERVED, &reserved) || !pool_bytes(pool, VG_POOL_USED, &used))
        return false;
    uint64_t headroom = reserved > used ? reserved - used : 0;
    uint64_t lack = size <= headroom ? 0 : size - headroom;
    *growth = lack > UINT64_MAX - granule ? lack : (lack + granule - 1) & ~(granule - 1);
    return true;
}

struct pool_attempt {
    struct vg_charge charge;
    void *pool; /* NULL: not counted */
};

/* 0, or the result for the program. */
static int begin(struct pool_attempt *attempt, void *pool, int device, size_t size, void *stream) {
    *attempt = (struct pool_attempt){.pool = NULL};
    uint64_t growth = 0;
    if (device < 0 || vg_gate_capturing(stream))
        return VG_CUDA_SUCCESS;
    enum known known = know(pool, device);
    if (known == KNOWN_NO_ROOM)
        return VG_CUDA_OUT_OF_MEMORY;
    if (known == KNOWN_UNCOUNTED || !use(pool))
        return VG_CUDA_SUCCESS;
    bool told = growth_for(pool, size, &growth);
    if (told && !vg_charge_quietly(&attempt->charge, device, growth)) {
        vg_call_cuMemPoolTrimTo(pool, 0);
        settle(pool);
        growth_for(pool, size, &growth);
        if (!vg_charge_quietly(&attempt->charge, device, growth)) {
            leave(pool);
            return vg_charge_refuse(device, size);
        }
    }
    if (told)
        attempt->pool = pool;
    else
        leave(pool);
    return VG_CUDA_SUCCESS;
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
    if (attempt->pool == NULL)
        return;
    uint64_t reserved = 0;
    if (result == VG_CUDA_SUCCESS)
        record_block(attempt->pool, *pointer, size);
    if (result == VG_CUDA_SUCCESS && pool_bytes(attempt->pool, VG_POOL_RESERVED, &reserved))
        move_charge(attempt->pool, reserved, attempt->charge.reserved ? attempt->charge.size : 0);
    else
        vg_charge_abandon(&attempt->charge);
    leave(attempt->pool);
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

/* The current device's pool and its region index; false: not counted. */
static bool current_pool(void **pool, int *device) {
    int cuda_device = 0;
    if (vg_call_cuCtxGetDevice(&cuda_device) != VG_CUDA_SUCCESS ||
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
    if (mode == VG_MODE_COUNT && current_pool(&pool, &device))
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
