/* The shared region of a container: opened, made or joined. */
#ifndef VGPU_REGION_H
#define VGPU_REGION_H

#include "lock.h"
#include "region_abi.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum vg_kind { VG_KIND_CONTEXT, VG_KIND_MODULE, VG_KIND_DATA, VG_KINDS };

/* What this process knows itself of its own bytes on a device, by kind, published ones only. The region is in
 * reach of every process of the container. */
struct vg_own_bytes {
    _Atomic uint64_t kind[VG_KINDS];
};

/* The region as this process uses it, and its place in it. */
struct vg_space {
    struct vg_region *region;
    struct vg_extension *extension;
    struct vg_lock_file locks;
    dev_t root_device; /* of "/" as it was: after a chroot the path leads elsewhere */
    ino_t root_inode;
    bool shared_extension; /* false: the file has a foreign extension block, `extension` is private */
    int slot;              /* -1: none, or one that the others do not see */
    struct vg_slot *own;
    struct vg_ext_slot *own_extension;
    _Atomic uint64_t *own_totals; /* T of device d at own_totals[d * totals_stride] */
    unsigned totals_stride;
    uint64_t pid_namespace; /* of the process that claimed, 0: not known */
    struct vg_long_lock life;
    struct vg_own_bytes own_bytes[VG_MAX_DEVICES];
};

enum vg_region_result {
    VG_REGION_JOINED,
    VG_REGION_CREATED,
    VG_REGION_FOREIGN,     /* planted or not ours: never private limits */
    VG_REGION_UNAVAILABLE, /* nothing can be made at that path */
    VG_REGION_LATER,       /* no descriptor or memory just now: it says nothing about the path */
};

/* What a new region is filled with. Index is the region's device index. */
struct vg_region_seed {
    unsigned device_count;
    char uuids[VG_MAX_DEVICES][VG_UUID_LENGTH];
    uint64_t limits[VG_MAX_DEVICES];
    uint64_t sm_limits[VG_MAX_DEVICES];
    int priority;
    void (*prepare)(struct vg_region_seed *seed); /* NULL: all is filled in */
};

/* Opens or makes the region at `path` (kept by reference). One error line tells why it is not possible. The
 * seed is prepared only for a region that has to be made, by one process at a time. */
enum vg_region_result vg_region_open(struct vg_space *space, const char *path, struct vg_region_seed *seed);

/* Closes what opening left open to spare the first claim some calls; a claim does so itself. */
void vg_region_settle(struct vg_space *space);

/* Lets the region go; nobody counts in it. */
void vg_region_close(struct vg_space *space);

/* Names the devices of a region that was made when nobody could name them; limits that nobody changed since
 * move to the device that they are meant for (`before`: what they were seeded with). */
void vg_region_name_devices(struct vg_space *space, const struct vg_region_seed *before,
                            const struct vg_region_seed *seed);

/* True if the path leads to another file than the one in use, or to one that was cut or cleared; not where
 * this process sees another root directory now. */
bool vg_region_replaced(const struct vg_space *space);

/* The same layout in memory of this process alone. False: no memory. */
bool vg_region_private(struct vg_space *space, const struct vg_region_seed *seed);

/* Adds an event to the ring. */
void vg_region_event(struct vg_space *space, unsigned type, int device, uint64_t value);

static inline unsigned vg_region_slots(const struct vg_region *region) {
    int count = atomic_load(&region->proc_num);
    return count < 0 || count > VG_MAX_SLOTS ? VG_MAX_SLOTS : (unsigned)count;
}

static inline _Atomic uint64_t *vg_total(struct vg_extension *extension, int device, unsigned slot) {
    return &extension->totals[(unsigned)device * VG_MAX_SLOTS + slot];
}

#endif
