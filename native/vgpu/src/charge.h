/* One allocation's way through admission: begin, call the driver, then keep or abandon. */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H

#include "track.h"

#include <stdbool.h>
#include <stdint.h>

struct vg_charge {
    bool counted;  /* false: the call is forwarded and leaves no trace */
    bool reserved; /* admission holds the size already */
    int device;    /* region index */
    uint64_t size; /* rounded */
};

/* Returns 0, or the CUDA result to give to the program instead of calling the driver. The device of the
 * `current` form is that of the current context; elsewhere it is a region index, -1 is not counted. */
int vg_charge_current(struct vg_charge *charge, uint64_t bytes);
int vg_charge_begin(struct vg_charge *charge, int device, uint64_t bytes);

/* As vg_charge_begin, but a size over the limit is answered with false instead of being reported as a
 * refusal. */
bool vg_charge_quietly(struct vg_charge *charge, int device, uint64_t bytes);
int vg_charge_refuse(int device, uint64_t bytes);

void vg_charge_abandon(struct vg_charge *charge);

/* The driver took another size than was reserved. */
void vg_charge_resize(struct vg_charge *charge, uint64_t bytes);

/* Publishes the charge, with a record of the kind under the key, or without one. */
void vg_charge_keep(struct vg_charge *charge, enum vg_record_kind kind, uint64_t key);
void vg_charge_publish(struct vg_charge *charge);

/* Gives a data charge back. */
void vg_discharge(int device, uint64_t size);

#endif
