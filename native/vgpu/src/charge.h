/* One allocation's way through admission: begin, call the driver, then keep or abandon. */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H

#include "abi.h"
#include "process.h"
#include "slots.h"
#include "track.h"

#include <stdbool.h>
#include <stdint.h>

struct vg_charge {
    bool counted;  /* false: the call is forwarded and leaves no trace */
    bool reserved; /* admission holds the size already */
    int device;    /* region index */
    uint64_t size; /* rounded */
    bool managed;  /* the card was full, it is managed memory */
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

/* The driver's answer: keeps or abandons, and returns it. */
int vg_charge_end(struct vg_charge *charge, enum vg_record_kind kind, int result, uint64_t key);

/* Gives a data charge back. */
void vg_discharge(int device, uint64_t size);
void vg_discharge_record(const struct vg_record *record);

/* Before and after a call that frees. False: there is no record, the call is forwarded. The driver frees
 * first: if it does not, the memory is still there and stays charged. */
static inline bool vg_charge_freeing(enum vg_record_kind kind, uint64_t key, struct vg_record *record) {
    return vg_ready() == VG_MODE_COUNT && vg_track_freeing(kind, key, record);
}

static inline void vg_charge_freed(enum vg_record_kind kind, uint64_t key, const struct vg_record *record,
                                   int result) {
    vg_track_finish(kind, key, result == VG_CUDA_SUCCESS);
    if (result == VG_CUDA_SUCCESS)
        vg_discharge_record(record);
}

/* Makes what this process counts on a device under a kind `bytes`, rounded up, without a test. */
void vg_charge_set(int device, enum vg_kind kind, uint64_t bytes);

#endif
