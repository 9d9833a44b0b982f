#include "chunk.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { UNITS = FG_GRANULE / FG_UNIT, WORD = 64, SPARES = 16 };

struct fg_chunk {
    uintptr_t start;
    uint32_t card, free_units;
    uint32_t no_room_for; /* a run of this length was not found since the last free; 0: not known */
    struct fg_chunk *previous, *next;
    uint64_t used[UNITS / WORD];
};

static struct fg_chunk *chunks; /* those with the latest free first */
static void *spares[SPARES];
static int spare_count;

void *fg_map_aligned(size_t size) {
    size_t all = size + FG_GRANULE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = all > size ? mmap(NULL, all, PROT_READ | PROT_WRITE, flags, -1, 0) : MAP_FAILED;
    if (start == MAP_FAILED)
        return NULL;
    size_t head = (FG_GRANULE - (uintptr_t)start % FG_GRANULE) % FG_GRANULE;
    if (head)
        munmap(start, head);
    munmap(start + head + size, FG_GRANULE - head);
    (void)madvise(start + head, size, MADV_DONTDUMP);
    return start + head;
}

/* The first unit from `from` on that is used (or, with invert, free); `limit` if there is none before it. */
static uint32_t next_unit(const struct fg_chunk *chunk, uint32_t from, uint32_t limit, uint64_t invert) {
    while (from < limit) {
        uint64_t word = (chunk->used[from / WORD] ^ invert) >> (from % WORD);
        if (word) {
            uint32_t found = from + (uint32_t)__builtin_ctzll(word);
            return found < limit ? found : limit;
        }
        from = (from / WORD + 1) * WORD;
    }
    return limit;
}

/* Flip `count` units; all of them are in the same state. */
static void flip(struct fg_chunk *chunk, uint32_t first, uint32_t count) {
    while (count > 0) {
        uint32_t bit = first % WORD, n = count < WORD - bit ? count : WORD - bit;
        chunk->used[first / WORD] ^= (n == WORD ? UINT64_MAX : ((uint64_t)1 << n) - 1) << bit;
        first += n;
        count -= n;
    }
}

static uintptr_t take_run(struct fg_chunk *chunk, uint32_t count) {
    if (count > chunk->free_units || (chunk->no_room_for && count >= chunk->no_room_for))
        return 0;
    uint32_t first = next_unit(chunk, 0, UNITS, UINT64_MAX);
    while (first + count <= UNITS) {
        uint32_t end = next_unit(chunk, first, first + count, 0);
        if (end == first + count) {
            flip(chunk, first, count);
            chunk->free_units -= count;
            return chunk->start + first * FG_UNIT;
        }
        first = next_unit(chunk, end, UNITS, UINT64_MAX);
    }
    chunk->no_room_for = count;
    return 0;
}

static void unlink_chunk(struct fg_chunk *chunk) {
    if (chunk->previous)
        chunk->previous->next = chunk->next;
    else
        chunks = chunk->next;
    if (chunk->next)
        chunk->next->previous = chunk->previous;
}

static void push_front(struct fg_chunk *chunk) {
    chunk->previous = NULL;
    chunk->next = chunks;
    if (chunks)
        chunks->previous = chunk;
    chunks = chunk;
}

static struct fg_chunk *new_chunk(uint32_t card) {
    struct fg_chunk *chunk = calloc(1, sizeof *chunk);
    void *memory = spare_count ? spares[--spare_count] : fg_map_aligned(FG_GRANULE);
    if (!chunk || !memory || fg_account(card, FG_DATA, (int64_t)FG_GRANULE, 0) != 0) {
        if (memory)
            munmap(memory, FG_GRANULE);
        free(chunk);
        return NULL;
    }
    chunk->start = (uintptr_t)memory;
    chunk->card = card;
    chunk->free_units = UNITS;
    push_front(chunk);
    return chunk;
}

uintptr_t fg_chunk_take(uint32_t card, size_t size, struct fg_chunk **owner) {
    uint32_t count = (uint32_t)((size + FG_UNIT - 1) / FG_UNIT);
    for (struct fg_chunk *chunk = chunks; chunk; chunk = chunk->next) {
        uintptr_t start = chunk->card == card ? take_run(chunk, count) : 0;
        if (start) {
            *owner = chunk;
            return start;
        }
    }
    *owner = new_chunk(card);
    return *owner ? take_run(*owner, count) : 0;
}

void fg_chunk_give(struct fg_chunk *chunk, uintptr_t start, size_t size) {
    uint32_t count = (uint32_t)((size + FG_UNIT - 1) / FG_UNIT);
    flip(chunk, (uint32_t)((start - chunk->start) / FG_UNIT), count);
    chunk->free_units += count;
    chunk->no_room_for = 0;
    unlink_chunk(chunk);
    if (chunk->free_units < UNITS) {
        push_front(chunk);
        return;
    }
    fg_account(chunk->card, FG_DATA, -(int64_t)FG_GRANULE, 0);
    if (spare_count < SPARES)
        spares[spare_count++] = (void *)chunk->start;
    else
        munmap((void *)chunk->start, FG_GRANULE);
    free(chunk);
}

void fg_chunks_forget(void) {
    chunks = NULL;
    spare_count = 0;
}
