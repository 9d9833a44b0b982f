/* The PID that the driver's process lists use for this process. */
#ifndef VGPU_HOSTPID_H
#define VGPU_HOSTPID_H

#include <stdbool.h>
#include <stdint.h>

/* Inside the first cuInit: a process of the initial namespace knows its host PID. */
void vg_host_pid_at_init(void);

enum { VG_PIDS_SEEN = 1024 };

/* The PIDs that NVML lists on a device before a context is activated. */
struct vg_pids {
    bool valid;
    unsigned count;
    uint32_t pids[VG_PIDS_SEEN];
};

/* Around an activation: exactly one new PID is this process. Does nothing where it is known already. */
void vg_host_pid_before(struct vg_pids *before, int device);
void vg_host_pid_after(const struct vg_pids *before, int device);

/* True if an NVML record with this PID belongs to this process. */
bool vg_pid_is_own(uint32_t pid);

/* Bytes that NVML shows for this process on a device. False: it does not say. */
bool vg_nvml_own_memory(int device, uint64_t *bytes);

#endif
