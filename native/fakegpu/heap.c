/* Memory of this process: address ranges that are committed only when
 * touched, and the tree that finds them. */
#include "chunk.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALL ((size_t)1 << 20)
enum { CACHED = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree;
static uint64_t next_id = 1;

static int compare(const void *left, const void *right) {
    const struct fg_block *a = left, *b = right;
    if (a->start + a->size <= b->start)
        return -1;
    return a->start >= b->start + b->size;
}

static struct fg_block *find(uintptr_t address) {
    struct fg_block key = {.start = address, .size = 1};
    struct fg_block **node = tfind(&key, &tree, compare);
    return node ? *node : NULL;
}

/* In zero-cost mode (benches) freed mappings are kept, so that a pair of calls costs no system call. */
static struct {
    void *start;
    size_t size;
} cache[CACHED];
static int cached;

static void *map_block(size_t size) {
    for (int i = cached - 1; i >= 0; i--)
        if (cache[i].size == size) {
            void *start = cache[i].start;
            cache[i] = cache[--cached];
            return start;
        }
    return fg_map_aligned(size);
}

static void unmap_block(void *start, size_t size) {
    if (!fg_driver.zero_cost || cached == CACHED) {
        munmap(start, size);
        return;
    }
    cache[cached].start = start;
    cache[cached++].size = size;
}

static CUresult enter_block(const struct fg_block *block) {
    struct fg_block *copy = malloc(sizeof *copy);
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = *block;
    copy->id = next_id++;
    struct fg_block **node = tsearch(copy, &tree, compare);
    if (node && *node == copy)
        return CUDA_SUCCESS;
    free(copy);
    return node ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
}

static void count_units(uint32_t card, int64_t units) {
    __atomic_fetch_add(&fg_own(card)->units[FG_DATA], (uint64_t)units, __ATOMIC_RELAXED);
}

static CUresult charge(struct fg_block *block) {
    if (block->kind == FG_BLOCK_HOST)
        return CUDA_SUCCESS;
    block->units = fg_round(block->size, FG_UNIT);
    if (block->kind == FG_BLOCK_POOL)
        return fg_pool_take(block->pool, block->units);
    block->physical = fg_round(block->size, FG_GRANULE);
    /* Managed memory can live on the host: a request beyond the card is served and only its units are
     * counted. */
    if (block->kind == FG_BLOCK_MANAGED &&
        fg_account(block->card, FG_DATA, (int64_t)block->physical, (int64_t)block->units) != 0) {
        block->physical = 0;
        count_units(block->card, (int64_t)block->units);
        return CUDA_SUCCESS;
    }
    if (block->kind == FG_BLOCK_MANAGED)
        return CUDA_SUCCESS;
    return block->size > INT64_MAX / 2
               ? CUDA_ERROR_OUT_OF_MEMORY
               : fg_account(block->card, FG_DATA, (int64_t)block->physical, (int64_t)block->units);
}

static void discharge(const struct fg_block *block) {
    if (block->kind == FG_BLOCK_POOL)
        fg_pool_give(block->pool, block->units);
    else if (block->physical)
        fg_account(block->card, FG_DATA, -(int64_t)block->physical, -(int64_t)block->units);
    else if (block->units)
        count_units(block->card, -(int64_t)block->units);
}

static CUresult allocate_large(struct fg_block *block) {
    if (block->size > (size_t)1 << 46)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = charge(block);
    if (result != CUDA_SUCCESS)
        return result;
    block->mapped = fg_round(block->size, FG_GRANULE);
    block->start = (uintptr_t)map_block(block->mapped);
    if (!block->start)
        discharge(block);
    return block->start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult fg_heap_allocate(struct fg_context *context, size_t size, enum fg_block_kind kind,
                          struct fg_pool *pool, uintptr_t *start) {
    struct fg_block block = {
        .size = size, .kind = kind, .context = context, .card = context->card, .pool = pool};
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (kind == FG_BLOCK_PLAIN && size < SMALL) {
        block.start = fg_chunk_take(context->card, size, &block.chunk);
        block.units = fg_round(size, FG_UNIT);
        result = block.start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (block.start)
            count_units(context->card, (int64_t)block.units);
    } else {
        result = allocate_large(&block);
    }
    if (result == CUDA_SUCCESS)
        result = enter_block(&block);
    if (result == CUDA_SUCCESS)
        *start = block.start;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult fg_heap_enter(struct fg_context *context, void *start, size_t size, enum fg_block_kind kind) {
    struct fg_block block = {.start = (uintptr_t)start,
                             .size = size,
                             .kind = kind,
                             .context = context,
                             .card = context ? context->card : 0};
    pthread_mutex_lock(&lock);
    CUresult result = enter_block(&block);
    pthread_mutex_unlock(&lock);
    return result;
}

static void release(struct fg_block *block) {
    tdelete(block, &tree, compare);
    discharge(block);
    if (block->mapped)
        unmap_block((void *)block->start, block->mapped);
    else if (block->kind == FG_BLOCK_PLAIN)
        fg_chunk_give(block->chunk, block->start, block->size);
    free(block);
}

CUresult fg_heap_free(uintptr_t start, unsigned allowed) {
    pthread_mutex_lock(&lock);
    struct fg_block *block = find(start);
    CUresult result = block && block->start == start && (allowed >> block->kind & 1)
                          ? CUDA_SUCCESS
                          : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        release(block);
    pthread_mutex_unlock(&lock);
    return result;
}

int fg_heap_find(uintptr_t address, struct fg_block *block) {
    pthread_mutex_lock(&lock);
    const struct fg_block *found = find(address);
    if (found)
        *block = *found;
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

int fg_heap_covers(uintptr_t address, size_t size) {
    struct fg_block block;
    return size == 0 || (fg_heap_find(address, &block) && size <= block.start + block.size - address);
}

/* Filled by one walk of the tree; guarded by the lock as the tree is. */
static struct fg_context *wanted;
static struct fg_block *victims;

static void collect_victim(const void *node, VISIT visit, int depth) {
    struct fg_block *block = *(struct fg_block *const *)node;
    (void)depth;
    if ((visit == postorder || visit == leaf) && block->context == wanted && block->kind != FG_BLOCK_RANGE) {
        block->chain = victims;
        victims = block;
    }
}

void fg_heap_drop_context(struct fg_context *context) {
    pthread_mutex_lock(&lock);
    wanted = context;
    victims = NULL;
    twalk(tree, collect_victim);
    while (victims) {
        struct fg_block *block = victims;
        victims = block->chain;
        release(block);
    }
    pthread_mutex_unlock(&lock);
}

void fg_heap_forget(void) {
    /* In a forked child: the parent's records are unreachable from here on; its memory stays mapped and
     * unused. */
    pthread_mutex_init(&lock, NULL);
    tree = NULL;
    cached = 0;
    fg_chunks_forget();
}
