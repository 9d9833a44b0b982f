/* Stream-ordered memory: a pool is charged as a whole, with what the driver has reserved for it. */
#include "admit.h"
#include "charge.h"
#include "devices.h"
#include "gate.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"
#include "slots.h"

#include <sched.h>

enum { MAX_POOLS = 128 };
static const uint64_t granule = (uint64_t)2 << 20;

struct pool {
    void *handle;
    int device;     /* region index */
    unsigned users; /* calls of our own that name it: it is not destroyed meanwhile */
    uint64_t charged;
};

static struct pool pools[MAX_POOLS];
static unsigned pool_count;
static _Atomic uint32_t guard;

static void lock(void) {
    while (atomic_exchange_explicit(&guard, 1, memory_order_acquire) != 0)
        sched_yield();
}

static void unlock(void) {
    atomic_store_explicit(&guard, 0, memory_order_release);
}

/* Under the lock. NULL: not known. */
static struct pool *find(void *handle) {
    for (unsigned i = 0; i < pool_count; i++)
        if (pools[i].handle == handle)
            return &pools[i];
    return NULL;
}

/* False: too many pools, this one is not counted. */
static bool know(void *handle, int device) {
    lock();
    bool known = find(handle) != NULL;
    if (!known && device >= 0 && pool_count < MAX_POOLS) {
        pools[pool_count++] = (struct pool){.handle = handle, .device = device};
        known = true;
    }
    unlock();
    return known;
}

static bool pool_bytes(void *handle, int attribute, uint64_t *bytes) {
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
    struct vg_space *space = &vg_process.space;
    if (target > before)
        vg_slot_add(space, device, VG_KIND_DATA, target - before);
    else if (target < before)
        vg_slot_subtract(space, device, VG_KIND_DATA, before - target);
    if (target > before + held)
        vg_reserve(space, device, target - before - held);
    else if (target < before + held)
        vg_unreserve(space, device, before + held - target);
}

/* False: the pool is not known, or it is being destroyed. */
static bool use(void *handle) {
    lock();
    struct pool *pool = find(handle);
    if (pool != NULL)
        pool->users++;
    unlock();
    return pool != NULL;
}

static void leave(void *handle) {
    lock();
    struct pool *pool = find(handle);
    if (pool != NULL)
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

void vg_pools_settle(void) {
    if (vg_gate->captures != 0)
        return;
    for (unsigned i = 0;; i++) {
        lock();
        void *handle = i < pool_count ? pools[i].handle : NULL;
        unlock();
        if (handle == NULL)
            return;
        settle(handle);
    }
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
    if (device < 0 || vg_gate_capturing(stream) || !know(pool, device) || !growth_for(pool, size, &growth))
        return VG_CUDA_SUCCESS;
    if (!vg_charge_quietly(&attempt->charge, device, growth)) {
        vg_call_cuMemPoolTrimTo(pool, 0);
        settle(pool);
        growth_for(pool, size, &growth);
        if (!vg_charge_quietly(&attempt->charge, device, growth))
            return vg_charge_refuse(device, size);
    }
    attempt->pool = pool;
    return VG_CUDA_SUCCESS;
}

static void end(struct pool_attempt *attempt, int result) {
    if (attempt->pool == NULL)
        return;
    uint64_t reserved = 0;
    if (result == VG_CUDA_SUCCESS && pool_bytes(attempt->pool, VG_POOL_RESERVED, &reserved))
        move_charge(attempt->pool, reserved, attempt->charge.reserved ? attempt->charge.size : 0);
    else
        vg_charge_abandon(&attempt->charge);
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
    end(&attempt, result);
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
        int device = known != NULL ? known->device : -1;
        unlock();
        result = begin(&attempt, pool, device >= 0 ? device : vg_current_device(), size, on_stream);
    }
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(pointer, size, pool, stream);
    end(&attempt, result);
    return result;
}

int vg_mem_free_async(vg_fn_mem_free_async driver, uint64_t pointer, void *stream) {
    struct vg_record record;
    bool tracked = vg_ready() == VG_MODE_COUNT && vg_track_freeing(VG_RECORD_LINEAR, pointer, &record);
    int result = driver(pointer, stream);
    if (tracked) {
        vg_track_finish(VG_RECORD_LINEAR, pointer, result == VG_CUDA_SUCCESS);
        if (result == VG_CUDA_SUCCESS)
            vg_discharge(record.device, record.size);
    }
    return result;
}

int vg_pool_create(vg_fn_pool_create driver, void **pool, const struct vg_pool_props *props) {
    if (vg_ready() == VG_MODE_DENY)
        return VG_CUDA_UNKNOWN;
    int result = driver(pool, props);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT &&
        props->location.type == VG_LOCATION_DEVICE)
        know(*pool, vg_device_of(props->location.id));
    return result;
}

/* Takes the pool out of the table once nobody of us uses it. False: it is not known. */
static bool forget(void *handle, struct pool *out) {
    for (;;) {
        lock();
        struct pool *pool = find(handle);
        bool busy = pool != NULL && pool->users != 0;
        if (pool != NULL && !busy) {
            *out = *pool;
            *pool = pools[--pool_count];
        }
        unlock();
        if (!busy)
            return pool != NULL;
        sched_yield();
    }
}

int vg_pool_destroy(vg_fn_pool_destroy driver, void *pool) {
    struct pool gone;
    bool known = vg_ready() == VG_MODE_COUNT && forget(pool, &gone);
    int result = driver(pool);
    if (!known)
        return result;
    if (result == VG_CUDA_SUCCESS) {
        vg_discharge(gone.device, gone.charged);
    } else {
        lock();
        struct pool *again = find(pool);
        if (again != NULL)
            again->charged += gone.charged;
        else if (pool_count < MAX_POOLS)
            pools[pool_count++] = gone;
        unlock();
    }
    return result;
}

int vg_pool_trim(vg_fn_pool_trim driver, void *pool, size_t keep) {
    int result = driver(pool, keep);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT)
        settle(pool);
    return result;
}
