/* What the families of memory hooks offer to the rest. */
#ifndef VGPU_MEM_H
#define VGPU_MEM_H

#include <stdbool.h>
#include <stdint.h>

/* Reads what every known pool really holds and moves the charges there. No lock is held meanwhile. */
void vg_pools_settle(void);

/* Gives back what belonged to a context of the device that is gone. */
void vg_memory_drop_context(void *context, int device);

#endif
