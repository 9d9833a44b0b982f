/* Small blocks: 2 MiB granules cut into units of 512 bytes. Not locked; the heap's lock covers it. */
#ifndef FAKEGPU_CHUNK_H
#define FAKEGPU_CHUNK_H

#include "driver.h"

#define FG_UNIT ((uint64_t)512)

struct fg_chunk;

/* `size` bytes at a multiple of 2 MiB, committed when touched; NULL if the address space has no room. */
void *fg_map_aligned(size_t size);
/* A run of `size` bytes (rounded up to units, below 2 MiB) on a card; 0 if
 * the card is full. *chunk owns it. */
uintptr_t fg_chunk_take(uint32_t card, size_t size, struct fg_chunk **chunk);
/* Give a run back; an empty granule goes back to the card. */
void fg_chunk_give(struct fg_chunk *chunk, uintptr_t start, size_t size);
void fg_chunks_forget(void);

#endif
