#define _GNU_SOURCE
#include "sorted.h"

#include <string.h>
#include <sys/mman.h>

enum { FIRST_CAPACITY = 128, CHUNK = 16384 };

/* Index of the first entry with a key >= `key`. */
static size_t lower_bound(const struct vg_sorted *map, uint64_t key) {
    size_t low = 0, high = map->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (map->entries[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool grow(struct vg_sorted *map) {
    size_t capacity = map->capacity == 0 ? FIRST_CAPACITY : map->capacity * 2;
    struct vg_sorted_entry *bigger =
        mmap(NULL, capacity * sizeof *bigger, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bigger == MAP_FAILED)
        return false;
    if (map->entries != NULL) {
        memcpy(bigger, map->entries, map->count * sizeof *bigger);
        munmap(map->entries, map->capacity * sizeof *bigger);
    }
    map->entries = bigger;
    map->capacity = capacity;
    return true;
}

bool vg_sorted_put(struct vg_sorted *map, uint64_t key, uint64_t length, void *value) {
    size_t at = lower_bound(map, key);
    if (at == map->count || map->entries[at].key != key) {
        if (map->count == map->capacity && !grow(map))
            return false;
        memmove(&map->entries[at + 1], &map->entries[at], (map->count - at) * sizeof *map->entries);
        map->count++;
    }
    map->entries[at] = (struct vg_sorted_entry){.key = key, .length = length, .value = value};
    return true;
}

struct vg_sorted_entry *vg_sorted_find(const struct vg_sorted *map, uint64_t key) {
    size_t at = lower_bound(map, key);
    return at < map->count && map->entries[at].key == key ? &map->entries[at] : NULL;
}

void *vg_sorted_get(const struct vg_sorted *map, uint64_t key) {
    struct vg_sorted_entry *entry = vg_sorted_find(map, key);
    return entry != NULL ? entry->value : NULL;
}

void vg_sorted_remove(struct vg_sorted *map, uint64_t key) {
    size_t at = lower_bound(map, key);
    if (at == map->count || map->entries[at].key != key)
        return;
    map->count--;
    memmove(&map->entries[at], &map->entries[at + 1], (map->count - at) * sizeof *map->entries);
}

bool vg_sorted_overlap(const struct vg_sorted *map, uint64_t start, uint64_t length,
                       struct vg_sorted_entry *out) {
    size_t at = lower_bound(map, start);
    if (at > 0 && start - map->entries[at - 1].key < map->entries[at - 1].length)
        at--;
    if (at == map->count || (map->entries[at].key >= start && map->entries[at].key - start >= length))
        return false;
    *out = map->entries[at];
    return true;
}

static void *free_blocks;

void *vg_sorted_block(size_t size) {
    if (free_blocks == NULL) {
        char *chunk = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (chunk == MAP_FAILED)
            return NULL;
        for (size_t at = 0; at + size <= CHUNK; at += size)
            vg_sorted_block_free(chunk + at, size);
    }
    void *block = free_blocks;
    memcpy(&free_blocks, block, sizeof free_blocks);
    return block;
}

void vg_sorted_block_free(void *block, size_t size) {
    memset(block, 0, size);
    memcpy(block, &free_blocks, sizeof free_blocks);
    free_blocks = block;
}
