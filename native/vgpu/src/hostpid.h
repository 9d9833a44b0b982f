/* The PID that the driver's process lists use for this process. */
#ifndef VGPU_HOSTPID_H
#define VGPU_HOSTPID_H

#include <stdbool.h>
#include <stdint.h>

struct vg_nvml_process;

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

/* The slot that an NVML record's PID belongs to, -1: a process of another container, or not known. Which of
 * the two numbers the driver names is settled once; until then only the own process is recognised by its own
 * PID. */
int vg_slot_of_nvml_pid(uint32_t pid);

/* The compute processes of a device by NVML, in a mapping of their own; NULL: it does not say. */
struct vg_nvml_process *vg_nvml_list(int device, unsigned *count);
void vg_nvml_list_free(struct vg_nvml_process *records);

/* Bytes that NVML shows for this process on a device. False: it does not say. */
bool vg_nvml_own_memory(int device, uint64_t *bytes);

#endif
