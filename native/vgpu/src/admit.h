/* Admission of memory: lock-free while there is room, exact under a lock when there is not.
 *
 * T[d][k] of the extension is the total of slot k, reservations included; its low 9 bits count the attempts
 * that are undecided. The process adds its size first and sums afterwards, so two processes can never both
 * pass. */
#ifndef VGPU_ADMIT_H
#define VGPU_ADMIT_H

#include "region.h"

/* Charges are multiples of this many bytes. Returns a value above every limit where rounding would overflow.
 */
static inline uint64_t vg_round_charge(uint64_t bytes) {
    return bytes > UINT64_MAX - VG_CHARGE_UNIT
               ? UINT64_MAX & ~(uint64_t)VG_ATTEMPT_MASK
               : (bytes + VG_CHARGE_UNIT - 1) & ~(uint64_t)(VG_CHARGE_UNIT - 1);
}

/* Reserves `size` (a rounded charge) if the device's usage stays within `limit` (bytes, not 0). `settle` is
 * called without a lock before a refusal, to correct own charges; it may be NULL. True: reserved. */
bool vg_admit(struct vg_space *space, int device, uint64_t size, uint64_t limit, void (*settle)(void));

/* Adds to or takes from the reservation without a test. */
void vg_reserve(struct vg_space *space, int device, uint64_t size);
void vg_unreserve(struct vg_space *space, int device, uint64_t size);

/* Bytes that admission counts on a device. */
uint64_t vg_reserved_total(const struct vg_space *space, int device);

#endif
