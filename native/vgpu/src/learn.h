/* The leader's half of the factor g: the same windows on what NVML shows and on what was charged. */
#ifndef VGPU_LEARN_H
#define VGPU_LEARN_H

#include <stdint.h>

/* Remembers what every device has charged up to now. Five times a second while a core limit is in force. */
void vg_learn_reading(void);

/* NVML's new time stamp (us since 1970): between the one before and this one the container used `percent` of
 * the device (sum over its processes). */
void vg_learn_window(int device, uint64_t from_us, uint64_t to_us, unsigned percent);

#endif
