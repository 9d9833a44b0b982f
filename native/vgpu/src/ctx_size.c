#include "ctx_size.h"

#include "charge.h"
#include "devices.h"
#include "hooks.h"
#include "hostpid.h"
#include "process.h"
#include "residual.h"
#include "target.h"

#include <sched.h>

/* A difference of the whole card outside of this is no context: somebody else allocated or freed meanwhile.
 */
static const uint64_t smallest = (uint64_t)16 << 20, largest = (uint64_t)2 << 30;

/* Two threads may see the same context appear; each charges what is missing, one after the other. */
static _Atomic uint32_t guard;

static void set_charge(int device, uint64_t bytes, bool more) {
    while (atomic_exchange_explicit(&guard, 1, memory_order_acquire) != 0)
        sched_yield();
    uint64_t now = atomic_load(&vg_here()->own_bytes[device].kind[VG_KIND_CONTEXT]);
    vg_charge_set(device, VG_KIND_CONTEXT, bytes + (more ? now : 0));
    atomic_store_explicit(&guard, 0, memory_order_release);
}

/* What NVML shows for this process beyond what else is counted is context. False: it does not show it. */
static bool measured(int device, const struct vg_search *search) {
    uint64_t shown, beside;
    if (search != NULL && search->shown) {
        shown = search->bytes;
        beside = search->beside;
    } else if (!vg_nvml_own_memory(device, &shown, &beside)) {
        return false;
    }
    set_charge(device, shown > beside ? shown - beside : 0, false);
    return true;
}

static bool card_used(int device, uint64_t *bytes) {
    struct vg_nvml_memory memory;
    void *nvml = vg_nvml_device(device);
    vg_fn_nvml_memory driver = (vg_fn_nvml_memory)vg_target(VG_T_nvmlDeviceGetMemoryInfo);
    if (nvml == NULL || driver == NULL || driver(nvml, &memory) != VG_NVML_SUCCESS)
        return false;
    *bytes = memory.used;
    return true;
}

void vg_ctx_size_before(struct vg_ctx_size *before, int device) {
    before->known = card_used(device, &before->used);
}

/* No other process of the container makes a context now. */
static bool undisturbed(const struct vg_search *search) {
    struct vg_region *region = vg_here()->region;
    unsigned live = 0;
    for (unsigned k = vg_region_slots(region); k > 0; k--)
        live += atomic_load_explicit(&region->procs[k - 1].status, memory_order_relaxed) != VG_SLOT_FREE;
    return (search != NULL && search->locked) || live == 1;
}

void vg_ctx_size_after(const struct vg_ctx_size *before, int device, const struct vg_search *search) {
    uint64_t used = 0;
    if (measured(device, search))
        return;
    if (vg_host_pid_ambiguous()) { /* one of several that have just started is this process */
        if (atomic_load(&vg_here()->own->used[device].context) == 0)
            set_charge(device, vg_host_pid_least(search), false);
        return;
    }
    vg_nvml_shows_no_processes();
    if (undisturbed(search) && before->known && card_used(device, &used) && used > before->used &&
        used - before->used >= smallest && used - before->used <= largest)
        set_charge(device, used - before->used, true);
}

void vg_ctx_size_gone(int device, unsigned others) {
    if (measured(device, NULL))
        return;
    uint64_t all = atomic_load(&vg_here()->own_bytes[device].kind[VG_KIND_CONTEXT]);
    set_charge(device, all / (others + 1) * others, false);
    if (others == 0)
        vg_residual_drop(device);
}

void vg_ctx_size_after_fork_child(void) {
    atomic_store(&guard, 0);
}
