/* Records of what this process holds: constant time in the number of live records, from a private arena. */
#ifndef VGPU_TRACK_H
#define VGPU_TRACK_H

#include <stdbool.h>
#include <stdint.h>

enum vg_record_kind { VG_RECORD_LINEAR, VG_RECORD_ARRAY, VG_RECORD_HANDLE };

struct vg_record {
    uint64_t size;    /* bytes, a multiple of 512, below 2^48 */
    uint64_t context; /* of a block of a pool: the pool's number */
    int device;
    bool managed; /* on a full card */
    bool pooled;  /* charged with its pool */
};

/* Adds a record; one with the same key that is being freed is replaced. False: no memory for it. */
bool vg_track_insert(enum vg_record_kind kind, uint64_t key, const struct vg_record *record);

/* Copies the record out and marks it as being freed. False: there is none, or another thread frees it
 * already. */
bool vg_track_freeing(enum vg_record_kind kind, uint64_t key, struct vg_record *record);

/* After the driver's answer: freed removes the record, unless the driver has handed the address out again and
 * it was replaced; not freed makes it an ordinary record again. */
void vg_track_finish(enum vg_record_kind kind, uint64_t key, bool freed);

/* Takes every record of a context (any context: 0) on the device out, calling `taken` for each. */
void vg_track_drop(uint64_t context, int device, void (*taken)(const struct vg_record *record));

/* Number of live records. */
uint64_t vg_track_count(void);

/* In a forked child: it has no records. */
void vg_track_reset(void);

#endif
