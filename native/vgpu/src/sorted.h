/* A map from 64-bit keys to pointers in key order, in memory of its own. The caller serialises. */
#ifndef VGPU_SORTED_H
#define VGPU_SORTED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct vg_sorted_entry {
    uint64_t key, length;
    void *value;
};

struct vg_sorted {
    struct vg_sorted_entry *entries;
    size_t count, capacity;
};

/* Adds or replaces. False: no memory. */
bool vg_sorted_put(struct vg_sorted *map, uint64_t key, uint64_t length, void *value);
struct vg_sorted_entry *vg_sorted_find(const struct vg_sorted *map, uint64_t key);
void *vg_sorted_get(const struct vg_sorted *map, uint64_t key);
void vg_sorted_remove(struct vg_sorted *map, uint64_t key);

/* The first entry whose [key, key + length) meets [start, start + length). */
bool vg_sorted_overlap(const struct vg_sorted *map, uint64_t start, uint64_t length,
                       struct vg_sorted_entry *out);

/* Small blocks of one size, at least a pointer long, from mappings that are never returned. */
void *vg_sorted_block(size_t size);
void vg_sorted_block_free(void *block, size_t size);

#endif
