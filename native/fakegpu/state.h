/*
 * The state that all processes of one state path share: a mapped file, one lock per card, and one slot per
 * process whose life is proved by a POSIX record lock (the kernel drops it when the process ends, however it
 * ends).
 *
 * Lock order: slots_lock, then the lock of one card. Both are robust mutexes: the next owner repairs what a
 * killed one left.
 */
#ifndef FAKEGPU_STATE_H
#define FAKEGPU_STATE_H

#include "config.h"

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    FG_MAX_SLOTS = 4096,
    FG_MAX_CHANNELS = 1024,
    FG_MAX_CONTAINERS = 256,
    FG_RING = 2048,
    FG_QUEUE = 1024,
    FG_SAMPLES = 64,
    FG_XIDS = 64,
    FG_MAX_LINKS = 18,
    FG_MIG = 8 /* most MIG instances of a card */
};
enum fg_pid_convention { FG_PIDS_HOST = 0, FG_PIDS_NAMESPACE = 1 };
enum fg_kind { FG_DATA = 0, FG_POOL = 1, FG_CONTEXT = 2, FG_MODULE = 3, FG_KINDS = 4 };

/* What one process holds on one card. physical: what the card really gives (2 MiB granules); units: 512-byte
 * rounding. */
struct fg_account {
    uint64_t physical[FG_KINDS], units[FG_KINDS];
    uint32_t contexts, channel; /* channel: index + 1, 0 = none */
    uint64_t engine_ns;
};

struct fg_slot {
    int32_t pid, host_pid; /* in its own PID namespace; as the host sees it */
    uint64_t pid_namespace, generation;
    uint32_t container, has_daemon;
    char command[64];
    uint8_t mig_gpu[FG_MAX_DEVICES]; /* GPU instance that it sees of a card, id + 1; 0: the card */
    struct fg_account on[FG_MAX_DEVICES];
};

struct fg_container {
    char name[64];
    uint64_t engine_ns[FG_MAX_DEVICES];
};

struct fg_entry {
    uint64_t cost_ns, end_ns; /* end_ns: CLOCK_MONOTONIC of the completion */
};

/* The queue of one process on one card. Entries [head, tail) wait or run; entries before head are done. */
struct fg_channel {
    uint32_t in_use, device, slot, container;
    uint64_t head, tail, head_left_ns, busy_ns, sampled_ns, most_queued;
    uint8_t util[FG_SAMPLES];
    struct fg_entry ring[FG_RING];
};

struct fg_xid {
    uint64_t type, data;
    uint32_t gpu_instance, compute_instance; /* ~0: none */
};

/* mig.h: a GPU instance, and a compute instance in the one at position `gpu`. profile: NVML's number. */
struct fg_mig_gpu {
    uint32_t in_use, id, profile, start, size;
};

struct fg_mig_compute {
    uint32_t in_use, id, gpu, profile;
    char uuid[48];
};

struct fg_device {
    pthread_mutex_t lock;
    char uuid[48], name[64], bus_id[32], serial[16];
    uint8_t uuid_bytes[16];
    uint32_t model, minor, numa_node;
    uint32_t mig_mode, mig_pending, mig_needs_reset, mig_made;
    struct fg_mig_gpu mig_gpus[FG_MIG];
    struct fg_mig_compute mig_computes[FG_MIG];
    /* topology.h: NVLinks, card or FG_LINK_* at their other end; NVML's common ancestor with each card */
    uint8_t link_count, link_peer[FG_MAX_LINKS], ancestor[FG_MAX_DEVICES];
    uint64_t total_bytes, reserved_bytes, used_bytes;
    /* engine (engine.c) */
    uint64_t now_ns, slice_left_ns, live_checked_ns, busy_ns, sampled_ns, sample_index;
    uint32_t current, channel_count; /* current: position in channels */
    uint16_t channels[FG_MAX_CHANNELS];
    uint8_t util[FG_SAMPLES];
    /* set from outside (fakegpud set) */
    uint32_t temperature_c, lost, extra_util;
    uint64_t xid_count;
    struct fg_xid xids[FG_XIDS];
};

struct fg_shared {
    uint64_t magic, size; /* size: of this structure in the build that made it */
    uint32_t device_count, driver_version, pid_convention, hide_processes;
    uint64_t context_bytes, module_bytes, kernel_ns, slice_ns, sample_ns, sample_lag, time_scale_milli;
    uint64_t realtime_offset_ns, generation;
    char driver_text[32];
    pthread_mutex_t slots_lock;
    uint32_t slot_high, container_count;
    uint32_t channel_high; /* one more than the highest channel that was ever in use */
    uint8_t slot_used[FG_MAX_SLOTS];
    struct fg_device devices[FG_MAX_DEVICES];
    struct fg_container containers[FG_MAX_CONTAINERS];
    struct fg_slot slots[FG_MAX_SLOTS];
    struct fg_channel channels[FG_MAX_CHANNELS];
};

/* This process' view. One per library; all fields are set by fg_open and fg_attach. */
struct fg_process {
    struct fg_shared *shared;
    char path[4096];
    int lock_fd, daemon_fd;
    int attached;
    uint32_t slot;
    uint64_t generation, pid_namespace;
    uint32_t visible_count;
    uint8_t visible[FG_MAX_DEVICES]; /* NVML index in this container -> card */
    uint8_t mig_gpu[FG_MAX_DEVICES]; /* by card, as in fg_slot */
};
extern struct fg_process fg;

/* Open or create the state and compute the visible cards. 0, or an errno value; says on stderr what failed.
 * Idempotent. */
int fg_open(void);
/* Claim a slot for this process. 0 or an errno value (EAGAIN: all 4,096 slots are alive). Idempotent. */
int fg_attach(void);
/* In a forked child: forget the parent's slot. */
void fg_forget_slot(void);
/* Give back everything that dead processes held. */
void fg_sweep(void);
/* Whether the process of slot `index` lives. */
int fg_slot_alive(uint32_t index);

void fg_lock_device(struct fg_device *device);
void fg_unlock_device(struct fg_device *device);
void fg_lock_slots(void);
void fg_unlock_slots(void);

/*
 * Change what this process holds on a card by (physical, units). 0, or 2 (out of memory, nothing changed) if
 * the card has not that much left after dead processes are swept.
 */
int fg_account(uint32_t device, enum fg_kind kind, int64_t physical, int64_t units);
/* Free and total bytes of a card, dead processes swept. */
void fg_memory_info(uint32_t device, uint64_t *free_bytes, uint64_t *total_bytes);
/* The account of this process. */
struct fg_account *fg_own(uint32_t device);

/*
 * PID by which this process may know the process of `slot` under the state's convention; 0 if it may not see
 * it.
 */
uint32_t fg_visible_pid(const struct fg_slot *slot);

/* CLOCK_MONOTONIC in ns. */
uint64_t fg_now(void);

#endif
