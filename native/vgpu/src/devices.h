/* Devices: CUDA ordinals, NVML indices and region indices meet here and nowhere else. */
#ifndef VGPU_DEVICES_H
#define VGPU_DEVICES_H

#include "region.h"

/* Device count and UUIDs for a new region: in NVML's order, without NVML in CUDA's. */
void vg_devices_identify(struct vg_region_seed *seed);

/* Maps CUDA ordinals to region indices. Returns the region index of the only CUDA device, or -1 if there are
 * more. */
int vg_devices_map(struct vg_space *space);

/* Region index of a CUDA device, -1: not limited (unknown, or the 17th and later). */
int vg_device_of(int cuda_device);

/* UUID of a region device by the driver; NULL: this process does not see it. */
const char *vg_devices_uuid(int device);

/* Region index of the current context's device, -1: none. */
int vg_current_device(void);

/* CUDA ordinal of the stream's device. False: there is no context. */
bool vg_stream_device(void *stream, int *cuda_device);

/* Region index of an NVML device, -1: none. */
int vg_device_of_nvml(void *nvml_device);

/* NVML device of a region index, NULL: NVML is not there. */
void *vg_nvml_device(int device);

#endif
