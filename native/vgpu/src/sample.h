/* What NVML shows for the container's processes, written into their slots for the monitor. */
#ifndef VGPU_SAMPLE_H
#define VGPU_SAMPLE_H

/* Ask NVML once for every device: memory and utilisation of each live slot. For the leader. New utilisation
 * is also what the factor of the core limit is learned from. */
void vg_sample_memory(void);
void vg_sample_utilisation(void);

#endif
