/* cuGetProcAddress: the driver answers first; only a successful answer can become a hook. */
#include "hooks.h"
#include "log.h"
#include "tables.h"

#include <limits.h>
#include <string.h>

/* What the driver calls itself; where it does not say, newer than everything. */
static int driver_version(void) {
    static _Atomic int known;
    int version = atomic_load_explicit(&known, memory_order_relaxed);
    if (version == 0) {
        if (vg_call_cuDriverGetVersion(&version) != VG_CUDA_SUCCESS || version <= 0)
            return INT_MAX;
        atomic_store_explicit(&known, version, memory_order_relaxed);
    }
    return version;
}

/* The exported symbol that a request means: highest listed version that neither the request nor the driver is
 * older than, twin if asked for and existing. */
static const struct vg_version *find_version(const char *base, int version, bool per_thread) {
    unsigned low = 0, high = vg_version_count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (strcmp(vg_versions[middle].base, base) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    const struct vg_version *plain = NULL, *twin = NULL;
    for (; low < vg_version_count && strcmp(vg_versions[low].base, base) == 0; low++) {
        const struct vg_version *row = &vg_versions[low];
        if (row->version > version || row->version > driver_version())
            continue;
        if (row->per_thread)
            twin = row;
        else
            plain = row;
    }
    return per_thread && twin != NULL ? twin : plain;
}

/* The driver's answer for one version of a name; NULL: it has none. */
typedef void *(*ask_function)(void *driver, const char *name, int version, uint64_t flags);

static void *ask(void *driver, const char *name, int version, uint64_t flags) {
    void *pointer = NULL;
    int result = ((vg_fn_get_proc_address)driver)(name, &pointer, version, flags);
    return result == VG_CUDA_SUCCESS ? pointer : NULL;
}

static void *ask_with_status(void *driver, const char *name, int version, uint64_t flags) {
    void *pointer = NULL;
    int status = 0, result = ((vg_fn_get_proc_address_status)driver)(name, &pointer, version, flags, &status);
    return result == VG_CUDA_SUCCESS && status == 0 ? pointer : NULL;
}

/* A driver newer than the list may know a later variant of the name, with other arguments: then it answers
 * otherwise for the listed version, and the later variant is left to the driver. */
static bool is_the_listed_variant(const struct vg_version *row, void *found, void *driver,
                                  ask_function ask_driver, const char *name, int version, uint64_t flags) {
    if (version == row->version || atomic_load(&vg_targets[row->target]) == found)
        return true;
    void *listed = ask_driver(driver, name, row->version, flags);
    return listed == NULL || listed == found;
}

static void replace(const char *name, void **pointer, int version, uint64_t flags, void *driver,
                    ask_function ask_driver) {
    if (name == NULL || name[0] == '\0' || pointer == NULL || *pointer == NULL || version <= 0)
        return;
    const struct vg_version *row = find_version(name, version, (flags & VG_LOOKUP_PER_THREAD) != 0);
    if (row == NULL || *pointer == row->hook)
        return;
    if (!is_the_listed_variant(row, *pointer, driver, ask_driver, name, version, flags)) {
        VG_ERROR("%s of CUDA %d is newer than this library: not limited", name, version);
        return;
    }
    vg_set_target(row->target, *pointer);
    *pointer = row->hook;
}

int vg_get_proc_address(vg_fn_get_proc_address driver, const char *name, void **pointer, int version,
                        uint64_t flags) {
    int result = driver(name, pointer, version, flags);
    if (result == VG_CUDA_SUCCESS)
        replace(name, pointer, version, flags, (void *)driver, ask);
    return result;
}

int vg_get_proc_address_status(vg_fn_get_proc_address_status driver, const char *name, void **pointer,
                               int version, uint64_t flags, int *status) {
    int result = driver(name, pointer, version, flags, status);
    if (result == VG_CUDA_SUCCESS && (status == NULL || *status == 0))
        replace(name, pointer, version, flags, (void *)driver, ask_with_status);
    return result;
}
