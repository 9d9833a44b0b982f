/* The PID that the driver's process lists use for this process. */
#ifndef VGPU_HOSTPID_H
#define VGPU_HOSTPID_H

#include "lock.h"

#include <stdbool.h>
#include <stdint.h>

struct vg_nvml_process;

/* Inside the first cuInit: a process of the initial namespace knows its host PID; another one asks the
 * broker, if the gate is on. What failed here waits for the first context. */
void vg_host_pid_at_init(void);

enum { VG_PIDS_SEEN = 1024, VG_PIDS_PENDING = 16 };

/* One look for the own PID around the activation of a context; one thread of the process at a time. */
struct vg_search {
    bool searching;
    unsigned count; /* PIDs that NVML listed on the device before */
    uint32_t pids[VG_PIDS_SEEN];
    bool locked;
    struct vg_long_lock lock; /* nobody else of the container looks now */
    int node_lock;            /* nor anybody of the node; -1: not asked for */
    bool shown;               /* after the activation NVML showed this process, with so many bytes */
    uint64_t bytes;
    uint64_t beside; /* of these no context */
};

/* Around an activation: exactly one new PID is this process. Nothing is looked for where it is known already;
 * then it is found out whether the driver names it. Locks are kept until `done`. */
void vg_host_pid_before(struct vg_search *search, int device);
void vg_host_pid_after(struct vg_search *search, int device, bool activated);
void vg_host_pid_done(struct vg_search *search);

/* The last look left more than one PID: NVML names processes, but which one is this is not known. */
bool vg_host_pid_ambiguous(void);

/* Bytes that NVML shows for the smallest of these, 0: there are none. `search` is the caller's own look, or
 * NULL. */
uint64_t vg_host_pid_least(const struct vg_search *search);

/* NVML names no process of this container; told once. */
void vg_nvml_shows_no_processes(void);

/* In a forked child: nothing of what the parent was looking for. */
void vg_host_pid_after_fork_child(void);

/* True if an NVML record with this PID belongs to this process. */
bool vg_pid_is_own(uint32_t pid);

/* The slot that an NVML record's PID belongs to, -1: a process of another container, or not known. Which of
 * the two numbers the driver names is settled once; until then only the own process is recognised by its own
 * PID. */
int vg_slot_of_nvml_pid(uint32_t pid);

/* The PID by which the driver knows the process of this container that has `pid` in it, 0: there is none, or
 * it is not known. */
uint32_t vg_nvml_pid(uint32_t pid);

/* The compute processes of a device by NVML, in a mapping of their own; NULL: it does not say. */
struct vg_nvml_process *vg_nvml_list(int device, unsigned *count);
void vg_nvml_list_free(struct vg_nvml_process *records);

/* Bytes that NVML shows for this process on a device, and what of them is no context. False: it does not
 * say. */
bool vg_nvml_own_memory(int device, uint64_t *bytes, uint64_t *beside);

#endif
