/* cuGetProcAddress: the driver answers first; only a successful answer can become a hook. */
#include "hooks.h"
#include "tables.h"

#include <string.h>

/* The exported symbol that a request means: highest listed version <= requested, twin if asked for and
 * existing. */
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
        if (row->version > version)
            continue;
        if (row->per_thread)
            twin = row;
        else
            plain = row;
    }
    return per_thread && twin != NULL ? twin : plain;
}

static void replace(const char *name, void **pointer, int version, uint64_t flags) {
    if (name == NULL || name[0] == '\0' || pointer == NULL || *pointer == NULL || version <= 0)
        return;
    const struct vg_version *row = find_version(name, version, (flags & VG_LOOKUP_PER_THREAD) != 0);
    if (row == NULL || *pointer == row->hook)
        return;
    vg_set_target(row->target, *pointer);
    *pointer = row->hook;
}

int vg_get_proc_address(vg_fn_get_proc_address driver, const char *name, void **pointer, int version,
                        uint64_t flags) {
    int result = driver(name, pointer, version, flags);
    if (result == VG_CUDA_SUCCESS)
        replace(name, pointer, version, flags);
    return result;
}

int vg_get_proc_address_status(vg_fn_get_proc_address_status driver, const char *name, void **pointer,
                               int version, uint64_t flags, int *status) {
    int result = driver(name, pointer, version, flags, status);
    if (result == VG_CUDA_SUCCESS && (status == NULL || *status == 0))
        replace(name, pointer, version, flags);
    return result;
}
