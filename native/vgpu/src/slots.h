/* Slots of processes in the region: who holds the lock on byte k owns slot k. */
#ifndef VGPU_SLOTS_H
#define VGPU_SLOTS_H

#include "region.h"

/* Claims a slot for this process. Where none is to be had, a private one that the others do not see. */
void vg_slot_claim(struct vg_space *space);

/* Where no lock tells that a process is gone: gives an own slot without reservations back. */
void vg_slot_release(struct vg_space *space);

/* Inside a section: clears the slots of dead owners; `device` >= 0: only those that hold memory there.
 * Returns how many were cleared. */
unsigned vg_slots_reclaim(struct vg_space *space, struct vg_section *section, int device);

/* Bytes in use on a device by the whole container, as readers see it. */
uint64_t vg_slots_usage(const struct vg_space *space, int device);

/* Bytes of this process on a device. */
uint64_t vg_slot_own_usage(const struct vg_space *space, int device);

/* The slot in which `pid` is (namespace: own PID; else the host's), or -1. */
int vg_slot_find(const struct vg_space *space, int32_t pid, bool own_namespace, bool host);

enum vg_kind { VG_KIND_CONTEXT, VG_KIND_MODULE, VG_KIND_DATA };

/* Move reserved bytes into the numbers that readers see and back: the kind first and the total last, and the
 * other way round. */
void vg_slot_add(struct vg_space *space, int device, enum vg_kind kind, uint64_t bytes);
void vg_slot_subtract(struct vg_space *space, int device, enum vg_kind kind, uint64_t bytes);

#endif
