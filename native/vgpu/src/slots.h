/* Slots of processes in the region: who holds the lock on byte k owns slot k. */
#ifndef VGPU_SLOTS_H
#define VGPU_SLOTS_H

#include "region.h"

/* Claims a slot for this process. Where all are taken, a private one that the others do not see. False: it
 * cannot be said just now, the locks are out of reach. */
bool vg_slot_claim(struct vg_space *space);

/* Where no lock tells that a process is gone: gives an own slot without reservations back. */
void vg_slot_release(struct vg_space *space);

/* Moves what this process counts in `from` to `to`. Exact whatever other threads add to either meanwhile:
 * what they still add to `from` is moved by the next call. */
void vg_slot_move(struct vg_space *from, struct vg_space *to);

/* Once a second: writes the own numbers again where somebody else has changed them. */
void vg_slot_mend(struct vg_space *space);

/* Bytes of this process on a device as it knows itself. */
static inline uint64_t vg_own_bytes(const struct vg_space *space, int device) {
    const struct vg_own_bytes *own = &space->own_bytes[device];
    uint64_t sum = 0;
    for (int kind = 0; kind < VG_KINDS; kind++)
        sum += atomic_load_explicit(&own->kind[kind], memory_order_relaxed);
    return sum;
}

/* Inside a section: clears the slots of dead owners; `device` >= 0: only those that hold memory there.
 * Returns how many were cleared. */
unsigned vg_slots_reclaim(struct vg_space *space, struct vg_section *section, int device);

/* No process holds so many bytes: a number from here on was written by somebody else. 1,024 below it do not
 * overflow a sum. */
static const uint64_t vg_implausible = (uint64_t)1 << 53;

/* Bytes in use on a device by the whole container, as readers see it. */
uint64_t vg_slots_usage(const struct vg_space *space, int device);

/* Bytes of this process on a device. */
uint64_t vg_slot_own_usage(const struct vg_space *space, int device);

/* Bytes of this process on a device that are no context, those included that it is just asking for. */
uint64_t vg_slot_beside_contexts(const struct vg_space *space, int device);

/* Another value after each change of the own numbers. */
uint64_t vg_slot_changes(const struct vg_space *space);

/* The slot in which `pid` is (namespace: own PID; else the host's), or -1. */
int vg_slot_find(const struct vg_space *space, int32_t pid, bool own_namespace, bool host);

/* Move reserved bytes into the numbers that readers see and back: the kind first and the total last, and the
 * other way round. */
void vg_slot_add(struct vg_space *space, int device, enum vg_kind kind, uint64_t bytes);
void vg_slot_subtract(struct vg_space *space, int device, enum vg_kind kind, uint64_t bytes);

#endif
