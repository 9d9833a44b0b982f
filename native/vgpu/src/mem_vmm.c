/* Virtual memory management: physical memory is released when no handle and no mapping of it is left. */
#define _GNU_SOURCE
#include "charge.h"
#include "devices.h"
#include "hooks.h"
#include "process.h"
#include "sorted.h"

#include <sched.h>

struct object {
    uint64_t size; /* charged bytes */
    uint64_t mapped;
    uint32_t references;
    int device;
};

static struct vg_sorted handles; /* handle -> object */
static struct vg_sorted ranges;  /* address -> object, length */
static _Atomic uint32_t guard;

static void lock(void) {
    while (atomic_exchange_explicit(&guard, 1, memory_order_acquire) != 0)
        sched_yield();
}

static void unlock(void) {
    atomic_store_explicit(&guard, 0, memory_order_release);
}

/* Objects are few and small: they come from one table and are reused. */
static struct object *new_object(void) {
    struct object *object = vg_sorted_block(sizeof *object);
    return object;
}

/* Under the lock. The charge to give back when nothing refers to the object any more; the object is freed. */
static uint64_t finish(struct object *object, int *device) {
    if (object->references != 0 || object->mapped != 0)
        return 0;
    uint64_t size = object->size;
    *device = object->device;
    vg_sorted_block_free(object, sizeof *object);
    return size;
}

int vg_vmm_create(vg_fn_vmm_create driver, uint64_t *handle, size_t size, const struct vg_alloc_prop *prop,
                  uint64_t flags) {
    struct vg_charge charge = {.counted = false};
    int device = -1;
    if (prop != NULL && vg_ready() == VG_MODE_COUNT && prop->location.type == VG_LOCATION_DEVICE)
        device = vg_device_of(prop->location.id);
    int result = vg_charge_begin(&charge, device, size);
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(handle, size, prop, flags);
    if (result != VG_CUDA_SUCCESS || !charge.counted) {
        vg_charge_abandon(&charge);
        return result;
    }
    lock();
    struct object *object = new_object();
    bool kept = object != NULL && vg_sorted_put(&handles, *handle, 0, object);
    if (kept)
        *object = (struct object){.size = charge.size, .references = 1, .device = device};
    else if (object != NULL)
        vg_sorted_block_free(object, sizeof *object);
    unlock();
    if (kept)
        vg_charge_publish(&charge);
    else
        vg_charge_abandon(&charge);
    return result;
}

/* The driver may hand the handle's value out again at once: it is forgotten before the call. */
int vg_vmm_release(vg_fn_vmm_release driver, uint64_t handle) {
    struct object *object = NULL;
    int device = -1;
    if (vg_ready() == VG_MODE_COUNT) {
        lock();
        object = vg_sorted_get(&handles, handle);
        if (object != NULL && --object->references == 0)
            vg_sorted_remove(&handles, handle);
        unlock();
    }
    int result = driver(handle);
    if (object == NULL)
        return result;
    lock();
    uint64_t given_back = 0;
    if (result == VG_CUDA_SUCCESS)
        given_back = finish(object, &device);
    else if (++object->references == 1)
        vg_sorted_put(&handles, handle, 0, object);
    unlock();
    if (given_back != 0)
        vg_discharge(device, given_back);
    return result;
}

int vg_vmm_map(vg_fn_vmm_map driver, uint64_t address, size_t size, size_t offset, uint64_t handle,
               uint64_t flags) {
    int result = driver(address, size, offset, handle, flags);
    if (result != VG_CUDA_SUCCESS || vg_ready() != VG_MODE_COUNT)
        return result;
    lock();
    struct object *object = vg_sorted_get(&handles, handle);
    if (object != NULL && vg_sorted_put(&ranges, address, size, object))
        object->mapped += size;
    unlock();
    return result;
}

int vg_vmm_unmap(vg_fn_vmm_unmap driver, uint64_t address, size_t size) {
    int result = driver(address, size);
    if (result != VG_CUDA_SUCCESS || vg_ready() != VG_MODE_COUNT)
        return result;
    for (;;) {
        struct vg_sorted_entry range;
        int device = -1;
        uint64_t given_back = 0;
        lock();
        bool found = vg_sorted_overlap(&ranges, address, size, &range);
        if (found) {
            struct object *object = range.value;
            uint64_t start = range.key > address ? range.key : address;
            uint64_t end =
                range.key + range.length < address + size ? range.key + range.length : address + size;
            vg_sorted_remove(&ranges, range.key);
            if (start > range.key)
                vg_sorted_put(&ranges, range.key, start - range.key, object);
            if (range.key + range.length > end)
                vg_sorted_put(&ranges, end, range.key + range.length - end, object);
            object->mapped -= end - start;
            given_back = finish(object, &device);
        }
        unlock();
        if (given_back != 0)
            vg_discharge(device, given_back);
        if (!found)
            return result;
    }
}

int vg_vmm_retain(vg_fn_vmm_retain driver, uint64_t *handle, void *address) {
    int result = driver(handle, address);
    if (result != VG_CUDA_SUCCESS || vg_ready() != VG_MODE_COUNT)
        return result;
    struct vg_sorted_entry range;
    lock();
    if (vg_sorted_overlap(&ranges, (uint64_t)(uintptr_t)address, 1, &range)) {
        struct object *object = range.value;
        if (object->references++ == 0)
            vg_sorted_put(&handles, *handle, 0, object);
    }
    unlock();
    return result;
}
