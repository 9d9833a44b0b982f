/* The filter behind entry.S. No lock, no allocation, no output, no initialisation: it may run before main. */
#define _GNU_SOURCE
#include "abi.h"
#include "elf_walk.h"
#include "hooks.h"
#include "tables.h"

#include <dlfcn.h>

struct vg_dlsym_answer {
    void *pointer;
    uintptr_t decided; /* 0: jump to `pointer`, 1: return it */
};

struct vg_dlsym_answer vg_dlsym_filter(void *handle, const char *name);
extern void *vg_real_dlsym(void *handle, const char *name);

typedef void *(*dlsym_function)(void *handle, const char *name);

static dlsym_function real_dlsym(void) {
    static _Atomic(dlsym_function) known;
    dlsym_function function = atomic_load_explicit(&known, memory_order_relaxed);
    if (function == NULL) {
        function = (dlsym_function)vg_libc_function("dlsym");
        atomic_store_explicit(&known, function, memory_order_relaxed);
    }
    return function;
}

static int compare(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return (unsigned char)*a - (unsigned char)*b;
}

static bool upper(char c) {
    return c >= 'A' && c <= 'Z';
}

static bool maybe_driver_name(const char *name) {
    if (name[0] == 'c')
        return name[1] == 'u' && upper(name[2]);
    return name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l' && upper(name[4]);
}

static const struct vg_export *find_export(const char *name) {
    unsigned low = 0, high = VG_EXPORT_COUNT;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        int order = compare(name, vg_exports[middle].name);
        if (order == 0)
            return &vg_exports[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

struct vg_dlsym_answer vg_dlsym_filter(void *handle, const char *name) {
    dlsym_function real = real_dlsym();
    if (real == NULL)
        return (struct vg_dlsym_answer){NULL, 1};
    if (name == NULL || handle == RTLD_NEXT || !maybe_driver_name(name))
        return (struct vg_dlsym_answer){(void *)real, 0};
    const struct vg_export *hook = find_export(name);
    if (hook == NULL)
        return (struct vg_dlsym_answer){(void *)real, 0};
    void *found = real(handle, name);
    if (found == NULL || found == hook->hook)
        return (struct vg_dlsym_answer){found, 1};
    if (!vg_address_in(found, name[0] == 'c' ? "libcuda.so.1" : "libnvidia-ml.so.1"))
        return (struct vg_dlsym_answer){found, 1};
    vg_set_target(hook->target, found);
    return (struct vg_dlsym_answer){hook->hook, 1};
}

void *vg_real_dlsym(void *handle, const char *name) {
    dlsym_function real = real_dlsym();
    return real != NULL ? real(handle, name) : NULL;
}
