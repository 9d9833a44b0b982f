/* What NVML shows for the container's processes, written into their slots for the monitor. */
#ifndef VGPU_SAMPLE_H
#define VGPU_SAMPLE_H

/* Asks NVML once for every device: memory and utilisation of each live slot. For the leader. */
void vg_sample_processes(void);

#endif
