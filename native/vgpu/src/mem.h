/* What the families of memory hooks offer to the rest. */
#ifndef VGPU_MEM_H
#define VGPU_MEM_H

#include <stdbool.h>
#include <stdint.h>

/* Reads what every known pool really holds and moves the charges there. No lock is held meanwhile. */
void vg_pools_settle(void);

/* Asks every known pool to give its unused memory back, then the same. */
void vg_pools_trim(void);

/* Another process of the container was refused memory: trims, at most once a second. */
void vg_pools_trim_asked(void);

/* A graph was instantiated: what the current device holds for memory nodes of graphs counts, as a pool does.
 */
void vg_pools_of_graphs(void);

/* No context of the process is left on the device, and nothing that NVML would show: what was in use of
 * destroyed pools is gone too. */
void vg_pools_without_context(int device);

/* A block of a pool that can be destroyed is gone. */
void vg_pool_block_freed(uint64_t number, uint64_t size);

/* Physical memory that was kept by a file alone is given back if that is closed by now. */
void vg_vmm_settle(void);

/* Gives back what belonged to a context of the device that is gone. */
void vg_memory_drop_context(void *context, int device);

#endif
