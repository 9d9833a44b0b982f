/* First filling of a new state from the settings, and which cards a process sees. */
#ifndef FAKEGPU_SETUP_H
#define FAKEGPU_SETUP_H

#include "model.h"
#include "state.h"

/* Cards, driver version and models of time and memory from the settings. The
 * memory at `shared` is all zero. */
void fg_setup(struct fg_shared *shared, const char *state_path);
/*
 * Cards of this container in the driver's order: FAKEGPU_VISIBLE_DEVICES, else NVIDIA_VISIBLE_DEVICES as the
 * NVIDIA runtime reads it (`all`, indexes or UUIDs; `none`, `void` = no card), else all. A MIG UUID shows the
 * card, and in `mig_gpu` the GPU instance. Returns how many.
 */
uint32_t fg_visible_devices(const struct fg_shared *shared, const char *state_path, uint8_t *visible,
                            uint8_t *mig_gpu);
/*
 * Apply CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER to the visible cards: ordinal -> card. Stops at the first
 * bad entry as the driver does. Returns how many.
 */
uint32_t fg_cuda_devices(const struct fg_shared *shared, const uint8_t *visible, uint32_t count,
                         uint8_t *ordinals);
const struct fg_model *fg_model_of(const struct fg_device *device);

#endif
