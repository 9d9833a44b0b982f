#define _GNU_SOURCE
#include "target.h"

#include "elf_walk.h"
#include "hooks.h"
#include "tables.h"

#include <dlfcn.h>
#include <errno.h>

_Atomic(void *) vg_targets[VG_TARGET_COUNT];

extern void *vg_real_dlsym(void *handle, const char *name);

static bool is_nvml(int id) {
    return vg_target_names[id][0] == 'n';
}

/* The driver library, a copy that is already loaded first; never unloaded. NULL: there is none. */
static void *library(bool nvml) {
    static _Atomic(void *) handles[2];
    void *handle = atomic_load(&handles[nvml]);
    if (handle != NULL)
        return handle;
    void *(*open_library)(const char *, int) = (void *(*)(const char *, int))vg_libc_function("dlopen");
    if (open_library == NULL)
        return NULL;
    const char *soname = nvml ? "libnvidia-ml.so.1" : "libcuda.so.1";
    handle = open_library(soname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    if (handle == NULL)
        handle = open_library(soname, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
    if (handle != NULL)
        atomic_store(&handles[nvml], handle);
    return handle;
}

void vg_set_target(int id, void *function) {
    atomic_store_explicit(&vg_targets[id], function, memory_order_relaxed);
}

void *vg_resolve(int id) {
    int saved = errno;
    void *handle = library(is_nvml(id));
    void *found = handle != NULL ? vg_real_dlsym(handle, vg_target_names[id]) : NULL;
    if (found != NULL)
        vg_set_target(id, found);
    errno = saved;
    return found;
}

int vg_missing(int id) {
    if (is_nvml(id))
        return library(true) == NULL ? VG_NVML_LIBRARY_NOT_FOUND : VG_NVML_FUNCTION_NOT_FOUND;
    return library(false) == NULL ? VG_CUDA_NOT_INITIALIZED : VG_CUDA_NOT_FOUND;
}
