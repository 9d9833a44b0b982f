#include "charge.h"

#include "admit.h"
#include "devices.h"
#include "hooks.h"
#include "log.h"
#include "mem.h"
#include "process.h"
#include "slots.h"
#include "thread.h"
#include "watch.h"

#include <errno.h>

enum { ALLOCATIONS_BETWEEN_LOOKS = 64 };

int vg_charge_refuse(int device, uint64_t bytes) {
    struct vg_space *space = vg_here();
    uint64_t used = vg_reserved_total(space, device), own = vg_slot_own_usage(space, device);
    atomic_fetch_add(&space->extension->devices[device].refusals, 1);
    atomic_fetch_add(&space->own_extension->refusals, 1);
    vg_region_event(space, VG_EVENT_REFUSAL, device, bytes);
    atomic_fetch_add(&space->extension->trim, 1); /* the others may have room that they do not need */
    VG_ERROR("device %d: request %llu refused, used %llu of limit %llu (own %llu, others %llu)", device,
             (unsigned long long)bytes, (unsigned long long)used, (unsigned long long)vg_memory_limit(device),
             (unsigned long long)own, (unsigned long long)(used > own ? used - own : 0));
    return VG_CUDA_OUT_OF_MEMORY;
}

/* Before a refusal: what this process holds and does not need. */
static void make_room(void) {
    vg_pools_trim();
    vg_vmm_settle();
}

/* False: over the limit. */
static bool reserve(struct vg_charge *charge, int device, uint64_t bytes) {
    *charge = (struct vg_charge){.counted = true, .device = device, .size = vg_round_charge(bytes)};
    if (++vg_thread.allocations >= ALLOCATIONS_BETWEEN_LOOKS) {
        vg_thread.allocations = 0;
        vg_watch_look();
    }
    uint64_t limit = vg_memory_limit(device);
    if (limit == 0)
        return true;
    struct vg_space *space = vg_here();
    charge->reserved = vg_admit(space, device, charge->size, limit, make_room);
    if (!charge->reserved && vg_region_moved(space))
        charge->reserved = vg_admit(vg_here(), device, charge->size, limit, make_room);
    return charge->reserved;
}

int vg_charge_begin(struct vg_charge *charge, int device, uint64_t bytes) {
    *charge = (struct vg_charge){.counted = false};
    enum vg_mode mode = vg_ready();
    if (mode != VG_MODE_COUNT)
        return mode == VG_MODE_DENY ? VG_CUDA_UNKNOWN : VG_CUDA_SUCCESS;
    if (device < 0 || bytes == 0)
        return VG_CUDA_SUCCESS;
    int saved = errno;
    int result = reserve(charge, device, bytes) ? VG_CUDA_SUCCESS : vg_charge_refuse(device, bytes);
    errno = saved;
    return result;
}

int vg_charge_current(struct vg_charge *charge, uint64_t bytes) {
    return vg_charge_begin(charge, vg_ready() == VG_MODE_COUNT ? vg_current_device() : -1, bytes);
}

bool vg_charge_quietly(struct vg_charge *charge, int device, uint64_t bytes) {
    *charge = (struct vg_charge){.counted = false};
    return bytes == 0 || reserve(charge, device, bytes);
}

void vg_charge_abandon(struct vg_charge *charge) {
    if (charge->counted && charge->reserved)
        vg_unreserve(vg_here(), charge->device, charge->size);
    charge->counted = false;
}

void vg_charge_resize(struct vg_charge *charge, uint64_t bytes) {
    uint64_t size = vg_round_charge(bytes);
    if (charge->counted && charge->reserved && size > charge->size)
        vg_reserve(vg_here(), charge->device, size - charge->size);
    if (charge->counted && charge->reserved && size < charge->size)
        vg_unreserve(vg_here(), charge->device, charge->size - size);
    charge->size = size;
}

void vg_charge_publish(struct vg_charge *charge) {
    if (!charge->counted)
        return;
    if (!charge->reserved)
        vg_reserve(vg_here(), charge->device, charge->size);
    vg_slot_add(vg_here(), charge->device, VG_KIND_DATA, charge->size);
}

void vg_charge_keep(struct vg_charge *charge, enum vg_record_kind kind, uint64_t key) {
    if (!charge->counted)
        return;
    void *context = NULL;
    if (kind != VG_RECORD_HANDLE)
        vg_call_cuCtxGetCurrent(&context);
    struct vg_record record = {.size = charge->size,
                               .context = (uint64_t)(uintptr_t)context,
                               .device = charge->device,
                               .managed = charge->managed};
    vg_track_insert(kind, key, &record); /* without memory for a record it is never given back */
    vg_charge_publish(charge);
    if (charge->managed) {
        struct vg_space *space = vg_here();
        atomic_fetch_add(&space->own->used[charge->device].managed, charge->size);
        atomic_fetch_add(&space->extension->devices[charge->device].oversubscribed, charge->size);
        vg_region_event(space, VG_EVENT_MANAGED_FALLBACK, charge->device, charge->size);
    }
}

int vg_charge_end(struct vg_charge *charge, enum vg_record_kind kind, int result, uint64_t key) {
    if (result == VG_CUDA_SUCCESS)
        vg_charge_keep(charge, kind, key);
    else
        vg_charge_abandon(charge);
    return result;
}

void vg_discharge_record(const struct vg_record *record) {
    if (record->pooled) {
        vg_pool_block_freed(record->context, record->size);
        return;
    }
    if (record->managed) {
        struct vg_space *space = vg_here();
        atomic_fetch_sub(&space->own->used[record->device].managed, record->size);
        atomic_fetch_sub(&space->extension->devices[record->device].oversubscribed, record->size);
    }
    vg_discharge(record->device, record->size);
}

void vg_charge_set(int device, enum vg_kind kind, uint64_t bytes) {
    struct vg_space *space = vg_here();
    uint64_t target = vg_round_charge(bytes);
    uint64_t now = atomic_load(&space->own_bytes[device].kind[kind]);
    if (target > now) {
        vg_reserve(space, device, target - now);
        vg_slot_add(space, device, kind, target - now);
    } else if (target < now) {
        vg_slot_subtract(space, device, kind, now - target);
        vg_unreserve(space, device, now - target);
    }
}

void vg_discharge(int device, uint64_t size) {
    vg_slot_subtract(vg_here(), device, VG_KIND_DATA, size);
    vg_unreserve(vg_here(), device, size);
}
