/* Memory that no hook sees (modules, workspaces of libraries, graphics): what NVML shows beyond what was
 * counted. */
#ifndef VGPU_RESIDUAL_H
#define VGPU_RESIDUAL_H

#include "region.h"

/* Bytes of a slot on a device that hooks have counted. */
uint64_t vg_residual_counted(const struct vg_slot *slot, int device);

/* The leader, for one slot: NVML shows `shown` bytes; `counted` was read before NVML was asked. Returns the
 * residual in bytes and publishes it in the slot. */
uint64_t vg_residual_publish(struct vg_slot *slot, int device, uint64_t counted, uint64_t shown);

/* The leader, once a tick per device: with the policy `charge` and ACTIVE_OOM_KILLER, measured use of more
 * than the limit and a tenth for three ticks ends the process of this container that holds the most uncounted
 * memory. */
void vg_residual_police(int device, uint64_t measured);

/* Once a second, under the process's mutex: with the policy `charge` moves the own residual into the own
 * numbers. */
void vg_residual_charge(void);

/* The last context on the device is gone, and with it what NVML showed. */
void vg_residual_drop(int device);

#endif
