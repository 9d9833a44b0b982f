/* Stream-ordered memory pools: reserved memory grows in steps of FAKEGPU_POOL_STEP_MIB and is given back at
 * synchronisation. */
#include "graph.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>

enum { POOL_MAGIC = 0x504F4F31, TYPE_PINNED = 1, TYPE_MANAGED = 2 };
#define MIB ((uint64_t)1 << 20)

struct fg_pool {
    uint32_t magic, card;
    uint64_t threshold, reserved, reserved_high, used, used_high;
    struct fg_pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fg_pool *all, *default_pool[FG_MAX_DEVICES], *current_pool[FG_MAX_DEVICES];
static struct fg_pool *graph_pool[FG_MAX_DEVICES], *managed_pool[FG_MAX_DEVICES];

static uint64_t step(void) {
    static uint64_t known;
    if (!known)
        known = fg_config_number(fg.path, "FAKEGPU_POOL_STEP_MIB", 2, 1u << 20, 32) * MIB;
    return known;
}

/* Under the lock. */
static struct fg_pool *new_pool(uint32_t card) {
    struct fg_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    *pool = (struct fg_pool){.magic = POOL_MAGIC, .card = card, .next = all};
    return all = pool;
}

static struct fg_pool *default_of(uint32_t card) {
    pthread_mutex_lock(&lock);
    if (!default_pool[card])
        default_pool[card] = new_pool(card);
    struct fg_pool *pool = default_pool[card];
    pthread_mutex_unlock(&lock);
    return pool;
}

static struct fg_pool *managed_of(uint32_t card) {
    pthread_mutex_lock(&lock);
    if (!managed_pool[card])
        managed_pool[card] = new_pool(card);
    struct fg_pool *pool = managed_pool[card];
    pthread_mutex_unlock(&lock);
    return pool;
}

static struct fg_pool *current_of(uint32_t card) {
    return current_pool[card] ? current_pool[card] : default_of(card);
}

static int known(const struct fg_pool *pool) {
    return pool && pool->magic == POOL_MAGIC;
}

/* Under the lock: give back all but `keep` bytes, as far as they are free. */
static void trim(struct fg_pool *pool, uint64_t keep) {
    uint64_t needed = fg_round(pool->used > keep ? pool->used : keep, step());
    if (pool->reserved <= needed)
        return;
    int64_t less = (int64_t)(pool->reserved - needed);
    pool->reserved = needed;
    fg_account(pool->card, FG_POOL, -less, -less);
}

CUresult fg_pool_take(struct fg_pool *pool, uint64_t units) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (units > pool->reserved - pool->used) {
        int64_t more = (int64_t)(fg_round(pool->used + units, step()) - pool->reserved);
        result = fg_account(pool->card, FG_POOL, more, more);
        pool->reserved += result == CUDA_SUCCESS ? (uint64_t)more : 0;
    }
    if (result == CUDA_SUCCESS)
        pool->used += units;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    pthread_mutex_unlock(&lock);
    return result;
}

void fg_pool_give(struct fg_pool *pool, uint64_t units) {
    pthread_mutex_lock(&lock);
    pool->used -= units;
    pthread_mutex_unlock(&lock);
}

void fg_pools_settle(uint32_t card) {
    pthread_mutex_lock(&lock);
    for (struct fg_pool *pool = all; pool; pool = pool->next)
        if (pool->card == card && pool->magic == POOL_MAGIC)
            trim(pool, pool->threshold);
    pthread_mutex_unlock(&lock);
}

void fg_pools_release(uint32_t card) {
    pthread_mutex_lock(&lock);
    for (struct fg_pool *pool = all; pool; pool = pool->next)
        if (pool->card == card && pool->magic == POOL_MAGIC)
            trim(pool, 0);
    pthread_mutex_unlock(&lock);
}

void fg_pools_forget(void) {
    pthread_mutex_init(&lock, NULL);
    all = NULL;
    memset(default_pool, 0, sizeof default_pool);
    memset(current_pool, 0, sizeof current_pool);
    memset(graph_pool, 0, sizeof graph_pool);
    memset(managed_pool, 0, sizeof managed_pool);
}

FG_FUNCTION(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS && !pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *pool = default_of(fg_driver.card[device]);
    return result;
})

FG_FUNCTION(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice device), {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS && !pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *pool = current_of(fg_driver.card[device]);
    return result;
})

static CUresult set_pool(CUdevice device, CUmemoryPool pool) {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS && (!known(pool) || pool->card != fg_driver.card[device]))
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        current_pool[pool->card] = pool;
    return result;
}

FG_FUNCTION(cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool), { return set_pool(device, pool); })
FG_FUNCTION(cuMemSetMemPool, (const CUmemLocation *location, int type, CUmemoryPool pool), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!location || location->type != CU_MEM_LOCATION_TYPE_DEVICE || type != 1)
        return CUDA_ERROR_INVALID_VALUE;
    return set_pool(location->id, pool);
})

/* The ordinal of a location; managed memory without one is on the first device. -1: memory of the host. */
static int ordinal_of(const CUmemLocation *location, int type) {
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        return location->id;
    return type == TYPE_MANAGED && location->type == 0 ? 0 : -1;
}

static CUresult pool_of(CUmemoryPool *pool, const CUmemLocation *location, int type,
                        struct fg_pool *(*pinned)(uint32_t card)) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!pool || !location || (type != TYPE_PINNED && type != TYPE_MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    int ordinal = ordinal_of(location, type);
    if (ordinal < 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = fg_need_device(ordinal);
    if (result == CUDA_SUCCESS)
        *pool = type == TYPE_MANAGED ? managed_of(fg_driver.card[ordinal]) : pinned(fg_driver.card[ordinal]);
    return result;
}

FG_FUNCTION(cuMemGetDefaultMemPool, (CUmemoryPool * pool, const CUmemLocation *location, int type),
            { return pool_of(pool, location, type, default_of); })
FG_FUNCTION(cuMemGetMemPool, (CUmemoryPool * pool, const CUmemLocation *location, int type),
            { return pool_of(pool, location, type, current_of); })

/* What the card keeps for the memory nodes of graphs: taken at a launch, kept until it is trimmed. */
static struct fg_pool *graphs_of(uint32_t card) {
    pthread_mutex_lock(&lock);
    if (!graph_pool[card] && (graph_pool[card] = new_pool(card)))
        graph_pool[card]->threshold = (uint64_t)1 << 45;
    struct fg_pool *pool = graph_pool[card];
    pthread_mutex_unlock(&lock);
    return pool;
}

CUresult fg_graph_memory(uint32_t card, uint64_t bytes) {
    struct fg_pool *pool = bytes ? graphs_of(card) : NULL;
    if (!bytes)
        return CUDA_SUCCESS;
    CUresult result = pool ? fg_pool_take(pool, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        fg_pool_give(pool, bytes);
    return result;
}

FG_FUNCTION(cuDeviceGraphMemTrim, (CUdevice device), {
    CUresult result = fg_need_device(device);
    struct fg_pool *pool = result == CUDA_SUCCESS ? graphs_of(fg_driver.card[device]) : NULL;
    if (pool) {
        pthread_mutex_lock(&lock);
        trim(pool, 0);
        pthread_mutex_unlock(&lock);
    }
    return result;
})

FG_FUNCTION(cuDeviceGetGraphMemAttribute, (CUdevice device, int number, void *value), {
    CUresult result = fg_need_device(device);
    if (result == CUDA_SUCCESS && (!value || number < 0 || number > 3))
        return CUDA_ERROR_INVALID_VALUE;
    struct fg_pool *pool = result == CUDA_SUCCESS ? graphs_of(fg_driver.card[device]) : NULL;
    if (pool) {
        pthread_mutex_lock(&lock);
        const uint64_t values[] = {pool->used, pool->used_high, pool->reserved, pool->reserved_high};
        memcpy(value, &values[number], sizeof values[0]);
        pthread_mutex_unlock(&lock);
    }
    return result;
})

FG_FUNCTION(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *properties), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    int ordinal = properties ? ordinal_of(&properties->location, properties->alloc_type) : -1;
    if (!pool || ordinal < 0 || fg_need_device(ordinal) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *pool = new_pool(fg_driver.card[ordinal]);
    pthread_mutex_unlock(&lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
})

FG_FUNCTION(cuMemPoolDestroy, (CUmemoryPool pool), {
    if (!known(pool) || pool == default_pool[pool->card] || pool == managed_pool[pool->card])
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (current_pool[pool->card] == pool)
        current_pool[pool->card] = NULL;
    if (pool->used == 0)
        trim(pool, 0); /* memory still in use goes with its last block; the record is kept for it */
    pool->magic = pool->used == 0 ? 0 : POOL_MAGIC;
    pool->threshold = 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), {
    if (!known(pool))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    trim(pool, keep);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
})

static CUresult attribute(const struct fg_pool *pool, int number, void *value) {
    const uint64_t numbers[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used,
                                pool->used_high};
    if (number < 1 || number > CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    if (number < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        *(int *)value = 1;
    else
        *(uint64_t *)value = numbers[number - CU_MEMPOOL_ATTR_RELEASE_THRESHOLD];
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuMemPoolGetAttribute, (CUmemoryPool pool, int number, void *value), {
    if (!known(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = attribute(pool, number, value);
    pthread_mutex_unlock(&lock);
    return result;
})

FG_FUNCTION(cuMemPoolSetAttribute, (CUmemoryPool pool, int number, void *value), {
    if (!known(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (number) {
    case 1:
    case 2:
    case 3:
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(uint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        pool->reserved_high = pool->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        pool->used_high = pool->used;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
})

FG_FUNCTION(cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count),
            { return known(pool) && (access || count == 0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; })

static CUresult allocate(CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream handle,
                         int per_thread) {
    struct fg_context *context;
    struct fg_stream *stream;
    struct fg_graph *graph;
    uintptr_t start;
    CUresult result = fg_stream_enter(handle, per_thread, &context, &stream, &graph);
    if (result != CUDA_SUCCESS)
        return result;
    if (graph)
        return CUDA_ERROR_NOT_SUPPORTED; /* memory nodes of graphs are not modelled */
    pool = pool ? pool : current_of(stream->context->card);
    if (!pointer || size == 0 || !known(pool) || size > (size_t)1 << 46)
        return size > (size_t)1 << 46 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    result = fg_heap_allocate(stream->context, size, FG_BLOCK_POOL, pool, &start);
    if (result == CUDA_SUCCESS)
        *pointer = start;
    return result;
}

FG_TWIN(cuMemAllocAsync, cuMemAllocAsync_ptsz, (CUdeviceptr * pointer, size_t size, CUstream stream),
        { return allocate(pointer, size, NULL, stream, per_thread); })
FG_TWIN(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz,
        (CUdeviceptr * pointer, size_t size, CUmemoryPool pool, CUstream stream),
        { return pool ? allocate(pointer, size, pool, stream, per_thread) : CUDA_ERROR_INVALID_VALUE; })

FG_TWIN(cuMemFreeAsync, cuMemFreeAsync_ptsz, (CUdeviceptr pointer, CUstream handle), {
    struct fg_context *context;
    struct fg_stream *stream;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS)
        result = fg_stream_resolve(context, handle, per_thread, &stream);
    if (result != CUDA_SUCCESS || pointer == 0)
        return result;
    return fg_heap_free((uintptr_t)pointer, 1u << FG_BLOCK_POOL | 1u << FG_BLOCK_PLAIN);
})
