/* Memory of this process: address ranges that are committed only when touched, and the tree that finds them.
 */
#include "driver.h"

#include <errno.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { UNIT = 512, CHUNK_UNITS = 4096, SPARE_CHUNKS = 16 };
#define SMALL ((size_t)1 << 20)

/* One 2 MiB granule cut into units of 512 bytes. */
struct chunk {
    uintptr_t start;
    uint32_t card, free_units,
        no_room_for; /* no_room_for: a run of this length was not found since the last free */
    uint64_t used[CHUNK_UNITS / 64];
    struct chunk *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree;
static struct chunk *chunks;
static void *spare[SPARE_CHUNKS];
static int spare_count;
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

/* `size` bytes at a multiple of 2 MiB, committed when touched; NULL if the address space has no room. */
static void *map_aligned(size_t size) {
    size_t all = size + FG_GRANULE;
    char *start = all > size ? mmap(NULL, all, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                             : MAP_FAILED;
    if (start == MAP_FAILED)
        return NULL;
    size_t head = (FG_GRANULE - (uintptr_t)start % FG_GRANULE) % FG_GRANULE;
    if (head)
        munmap(start, head);
    if (FG_GRANULE - head)
        munmap(start + head + size, FG_GRANULE - head);
    (void)madvise(start + head, size, MADV_DONTDUMP);
    return start + head;
}

static int run_is_free(const struct chunk *chunk, uint32_t first, uint32_t count) {
    for (uint32_t i = first; i < first + count; i++)
        if (chunk->used[i / 64] >> (i % 64) & 1)
            return (int)(i + 1); /* continue the search behind it */
    return 0;
}

static void mark(struct chunk *chunk, uint32_t first, uint32_t count, int used) {
    for (uint32_t i = first; i < first + count; i++) {
        uint64_t bit = (uint64_t)1 << (i % 64);
        chunk->used[i / 64] = used ? chunk->used[i / 64] | bit : chunk->used[i / 64] & ~bit;
    }
    chunk->free_units = used ? chunk->free_units - count : chunk->free_units + count;
}

static uintptr_t take_run(struct chunk *chunk, uint32_t count) {
    if (count > chunk->free_units || (chunk->no_room_for && count >= chunk->no_room_for))
        return 0;
    for (uint32_t i = 0; i + count <= CHUNK_UNITS;) {
        if (chunk->used[i / 64] == UINT64_MAX) {
            i = (i / 64 + 1) * 64;
            continue;
        }
        int next = run_is_free(chunk, i, count);
        if (next == 0) {
            mark(chunk, i, count, 1);
            return chunk->start + (uintptr_t)i * UNIT;
        }
        i = (uint32_t)next;
    }
    chunk->no_room_for = count;
    return 0;
}

static struct chunk *new_chunk(uint32_t card) {
    struct chunk *chunk = calloc(1, sizeof *chunk);
    void *memory = spare_count ? spare[--spare_count] : map_aligned(FG_GRANULE);
    if (!chunk || !memory || fg_account(card, FG_DATA, (int64_t)FG_GRANULE, 0) != 0) {
        if (memory)
            munmap(memory, FG_GRANULE);
        free(chunk);
        return NULL;
    }
    chunk->start = (uintptr_t)memory;
    chunk->card = card;
    chunk->free_units = CHUNK_UNITS;
    chunk->next = chunks;
    return chunks = chunk;
}

static uintptr_t allocate_small(uint32_t card, size_t size) {
    uint32_t count = (uint32_t)((size + UNIT - 1) / UNIT);
    for (struct chunk *chunk = chunks; chunk; chunk = chunk->next) {
        uintptr_t start = chunk->card == card ? take_run(chunk, count) : 0;
        if (start)
            return start;
    }
    struct chunk *chunk = new_chunk(card);
    return chunk ? take_run(chunk, count) : 0;
}

static void free_small(const struct fg_block *block) {
    for (struct chunk **link = &chunks; *link; link = &(*link)->next) {
        struct chunk *chunk = *link;
        if (block->start < chunk->start || block->start >= chunk->start + FG_GRANULE)
            continue;
        mark(chunk, (uint32_t)((block->start - chunk->start) / UNIT),
             (uint32_t)((block->size + UNIT - 1) / UNIT), 0);
        chunk->no_room_for = 0;
        if (chunk->free_units < CHUNK_UNITS)
            return;
        *link = chunk->next;
        fg_account(chunk->card, FG_DATA, -(int64_t)FG_GRANULE, 0);
        if (spare_count < SPARE_CHUNKS)
            spare[spare_count++] = (void *)chunk->start;
        else
            munmap((void *)chunk->start, FG_GRANULE);
        free(chunk);
        return;
    }
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
    block->units = fg_round(block->size, UNIT);
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
    block->start = (uintptr_t)map_aligned(block->mapped);
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
        block.start = allocate_small(context->card, size);
        block.units = fg_round(size, UNIT);
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
        munmap((void *)block->start, block->mapped);
    else if (block->kind == FG_BLOCK_PLAIN)
        free_small(block);
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
    chunks = NULL;
    spare_count = 0;
}
