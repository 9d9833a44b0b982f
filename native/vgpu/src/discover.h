/* Where the region is when the environment was lost (ssh, su, env -i): beside this library. */
#ifndef VGPU_DISCOVER_H
#define VGPU_DISCOVER_H

#include <stdbool.h>
#include <stddef.h>

/* The path of the one region file in the directory of the object that holds `address`. False: none, or
 * several. */
bool vg_discover_region(const void *address, char *path, size_t length);

#endif
