/* Reads the loader's list of objects without calling the loader: usable inside dlsym and before main. */
#ifndef VGPU_ELF_WALK_H
#define VGPU_ELF_WALK_H

#include <stdbool.h>

/* A function exported by libc.so.6 or, before glibc 2.34, by libdl.so.2 or libpthread.so.0; its default
 * version first. NULL: not loaded. */
void *vg_libc_function(const char *name);

/* True if `address` lies in a loaded object whose DT_SONAME is `soname`. */
bool vg_address_in(const void *address, const char *soname);

/* The path by which the object that holds `address` was loaded, as the loader keeps it. NULL: none, or the
 * program. */
const char *vg_object_path(const void *address);

#endif
