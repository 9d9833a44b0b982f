/* Byte layout of the shared region file. Generated from region.toml, do not edit. */
/* clang-format off */
#ifndef VGPU_REGION_ABI_H
#define VGPU_REGION_ABI_H

#include <stddef.h>
#include <stdint.h>

#define VG_MAGIC 19920718
#define VG_MAJOR 1
#define VG_MINOR 2
#define VG_MAX_DEVICES 16
#define VG_MAX_SLOTS 1024
#define VG_UUID_LENGTH 96
#define VG_UUID_TEXT_LENGTH 40
#define VG_SLOT_FREE 0
#define VG_SLOT_RUNNING 1
#define VG_SLOT_SUSPENDED 2
#define VG_RECENT_KERNEL_BLOCKED -1
#define VG_RECENT_KERNEL_ACTIVE 2
#define VG_SM_LIMIT_NONE 100
#define VG_EXTENSION_OFFSET 2011136
#define VG_EXTENSION_VERSION 1
#define VG_EXTENSION_LENGTH 262144
#define VG_FILE_LENGTH 2273280
#define VG_V0_MIN_LENGTH 1197896
#define VG_V1_MIN_LENGTH 2008952
#define VG_EVENT_RING 1024
#define VG_ATTEMPT_MASK 511
#define VG_CHARGE_UNIT 512
#define VG_LOCK_HOST_PID 1073741824
#define VG_LOCK_REGION 1073741825
#define VG_LOCK_SEED 1073741826
#define VG_LOCK_ADMISSION 1073741840
#define VG_LOCK_LEADER 1073741856
#define VG_LOCK_SWEEP 1073741857
#define VG_LOCK_SLOT 1073745920
#define VG_FLAG_NO_PROCESS_DATA 1
#define VG_FLAG_NO_OFD_LOCKS 2
#define VG_FLAG_NVML_OWN_NAMESPACE 4
#define VG_FLAG_NVML_SETTLED 8
#define VG_SLOT_FLAG_PRIORITY_BLOCKED 1
#define VG_SLOT_FLAG_CORE_LIMITED 2
#define VG_SLOT_FLAG_NO_MARKERS 4
#define VG_SLOT_FLAG_KEPT_DESCRIPTOR 8
#define VG_HOST_PID_UNKNOWN 0
#define VG_HOST_PID_SAME_NAMESPACE 1
#define VG_HOST_PID_BROKER 2
#define VG_HOST_PID_NVML 3
#define VG_HOST_PID_NONE 4
#define VG_EVENT_REFUSAL 1
#define VG_EVENT_RECLAIMED 2
#define VG_EVENT_THROTTLED 3
#define VG_EVENT_HOST_PID_FALLBACK 4
#define VG_EVENT_PRIVATE_REGION 5
#define VG_EVENT_PRIORITY_BLOCK 6
#define VG_EVENT_LIMITS_FILE 7
#define VG_EVENT_MANAGED_FALLBACK 8
#define VG_EVENT_NO_OFD_LOCKS 9
#define VG_EVENT_NO_PROCESS_DATA 10
#define VG_EVENT_DEBT_FORGIVEN 11
#define VG_EVENT_REGION_REPLACED 12
#define VG_G_ONE 65536

/* Memory of one process on one device, bytes; total = context + module + data. */
struct vg_usage {
    _Atomic uint64_t context;
    _Atomic uint64_t module;
    _Atomic uint64_t data;
    _Atomic uint64_t offset;
    _Atomic uint64_t total;
    _Atomic uint64_t managed; /* ours: part of data that is managed memory because the card was full */
    _Atomic uint64_t residual; /* ours: what NVML shows beyond context and data, by the leader */
    unsigned char reserved_end[8];
};
_Static_assert(sizeof(struct vg_usage) == 64, "size of usage");
_Static_assert(offsetof(struct vg_usage, context) == 0, "usage.context");
_Static_assert(offsetof(struct vg_usage, module) == 8, "usage.module");
_Static_assert(offsetof(struct vg_usage, data) == 16, "usage.data");
_Static_assert(offsetof(struct vg_usage, offset) == 24, "usage.offset");
_Static_assert(offsetof(struct vg_usage, total) == 32, "usage.total");
_Static_assert(offsetof(struct vg_usage, managed) == 40, "usage.managed");
_Static_assert(offsetof(struct vg_usage, residual) == 48, "usage.residual");

/* Utilisation of one process on one device, percent. */
struct vg_util {
    _Atomic uint64_t decoder;
    _Atomic uint64_t encoder;
    _Atomic uint64_t sm;
    unsigned char reserved_end[24];
};
_Static_assert(sizeof(struct vg_util) == 48, "size of util");
_Static_assert(offsetof(struct vg_util, decoder) == 0, "util.decoder");
_Static_assert(offsetof(struct vg_util, encoder) == 8, "util.encoder");
_Static_assert(offsetof(struct vg_util, sm) == 16, "util.sm");

/* One process (v1, 1.1 and 1.2). */
struct vg_slot {
    _Atomic int32_t pid; /* PID in the container's namespace, 0 = free */
    _Atomic int32_t hostpid; /* PID in the initial namespace, 0 = unknown */
    struct vg_usage used[16];
    _Atomic uint64_t monitorused[16]; /* NVML used memory, bytes */
    struct vg_util util[16];
    _Atomic int32_t status; /* SLOT_FREE, SLOT_RUNNING, SLOT_SUSPENDED */
    unsigned char reserved6[4];
    _Atomic uint64_t seqlock; /* 1.2: even = stable; 1.1: unused */
    unsigned char reserved_end[16];
};
_Static_assert(sizeof(struct vg_slot) == 1960, "size of slot");
_Static_assert(offsetof(struct vg_slot, pid) == 0, "slot.pid");
_Static_assert(offsetof(struct vg_slot, hostpid) == 4, "slot.hostpid");
_Static_assert(offsetof(struct vg_slot, used) == 8, "slot.used");
_Static_assert(offsetof(struct vg_slot, monitorused) == 1032, "slot.monitorused");
_Static_assert(offsetof(struct vg_slot, util) == 1160, "slot.util");
_Static_assert(offsetof(struct vg_slot, status) == 1928, "slot.status");
_Static_assert(offsetof(struct vg_slot, seqlock) == 1936, "slot.seqlock");

/* The v1 region (major 1). */
struct vg_region {
    _Atomic int32_t magic; /* MAGIC once initialised */
    uint32_t major;
    uint32_t minor;
    int32_t sm_init;
    uint64_t owner_pid; /* holder of sem; 0 with our library */
    unsigned char sem[32]; /* sem_t, value 1 */
    _Atomic uint64_t device_count;
    char uuid[16][96]; /* NVML order; readers use 40 bytes */
    _Atomic uint64_t limit[16]; /* bytes, 0 = unlimited */
    _Atomic uint64_t sm_limit[16]; /* percent, 100 = unlimited */
    struct vg_slot procs[1024];
    _Atomic int32_t proc_num; /* slots in use are [0, proc_num) */
    _Atomic int32_t utilization_switch; /* 1 = core limit enforced */
    _Atomic int32_t recent_kernel; /* activity; negative = blocked */
    _Atomic int32_t priority; /* 0 high, 1 low */
    _Atomic uint64_t last_kernel_time; /* Unix seconds */
    unsigned char sem_postinit[32]; /* sem_t, value 1 (1.2) */
};
_Static_assert(sizeof(struct vg_region) == 2008952, "size of region");
_Static_assert(offsetof(struct vg_region, magic) == 0, "region.magic");
_Static_assert(offsetof(struct vg_region, major) == 4, "region.major");
_Static_assert(offsetof(struct vg_region, minor) == 8, "region.minor");
_Static_assert(offsetof(struct vg_region, sm_init) == 12, "region.sm_init");
_Static_assert(offsetof(struct vg_region, owner_pid) == 16, "region.owner_pid");
_Static_assert(offsetof(struct vg_region, sem) == 24, "region.sem");
_Static_assert(offsetof(struct vg_region, device_count) == 56, "region.device_count");
_Static_assert(offsetof(struct vg_region, uuid) == 64, "region.uuid");
_Static_assert(offsetof(struct vg_region, limit) == 1600, "region.limit");
_Static_assert(offsetof(struct vg_region, sm_limit) == 1728, "region.sm_limit");
_Static_assert(offsetof(struct vg_region, procs) == 1856, "region.procs");
_Static_assert(offsetof(struct vg_region, proc_num) == 2008896, "region.proc_num");
_Static_assert(offsetof(struct vg_region, utilization_switch) == 2008900, "region.utilization_switch");
_Static_assert(offsetof(struct vg_region, recent_kernel) == 2008904, "region.recent_kernel");
_Static_assert(offsetof(struct vg_region, priority) == 2008908, "region.priority");
_Static_assert(offsetof(struct vg_region, last_kernel_time) == 2008912, "region.last_kernel_time");
_Static_assert(offsetof(struct vg_region, sem_postinit) == 2008920, "region.sem_postinit");

/* Memory of one process on one device (v0), bytes. */
struct vg_usage_v0 {
    uint64_t context;
    uint64_t module;
    uint64_t data;
    uint64_t offset;
    uint64_t total;
};
_Static_assert(sizeof(struct vg_usage_v0) == 40, "size of usage_v0");
_Static_assert(offsetof(struct vg_usage_v0, context) == 0, "usage_v0.context");
_Static_assert(offsetof(struct vg_usage_v0, module) == 8, "usage_v0.module");
_Static_assert(offsetof(struct vg_usage_v0, data) == 16, "usage_v0.data");
_Static_assert(offsetof(struct vg_usage_v0, offset) == 24, "usage_v0.offset");
_Static_assert(offsetof(struct vg_usage_v0, total) == 32, "usage_v0.total");

/* Utilisation of one process on one device (v0), percent. */
struct vg_util_v0 {
    uint64_t decoder;
    uint64_t encoder;
    uint64_t sm;
};
_Static_assert(sizeof(struct vg_util_v0) == 24, "size of util_v0");
_Static_assert(offsetof(struct vg_util_v0, decoder) == 0, "util_v0.decoder");
_Static_assert(offsetof(struct vg_util_v0, encoder) == 8, "util_v0.encoder");
_Static_assert(offsetof(struct vg_util_v0, sm) == 16, "util_v0.sm");

/* One process (v0). */
struct vg_slot_v0 {
    int32_t pid;
    int32_t hostpid;
    struct vg_usage_v0 used[16];
    uint64_t monitorused[16];
    struct vg_util_v0 util[16];
    int32_t status;
    unsigned char reserved_end[4];
};
_Static_assert(sizeof(struct vg_slot_v0) == 1168, "size of slot_v0");
_Static_assert(offsetof(struct vg_slot_v0, pid) == 0, "slot_v0.pid");
_Static_assert(offsetof(struct vg_slot_v0, hostpid) == 4, "slot_v0.hostpid");
_Static_assert(offsetof(struct vg_slot_v0, used) == 8, "slot_v0.used");
_Static_assert(offsetof(struct vg_slot_v0, monitorused) == 648, "slot_v0.monitorused");
_Static_assert(offsetof(struct vg_slot_v0, util) == 776, "slot_v0.util");
_Static_assert(offsetof(struct vg_slot_v0, status) == 1160, "slot_v0.status");

/* The v0 region (HAMi up to 2.3): read only, it has neither version nor last_kernel_time. */
struct vg_region_v0 {
    int32_t magic;
    int32_t sm_init;
    uint32_t owner_pid;
    unsigned char reserved3[4];
    unsigned char sem[32];
    uint64_t device_count;
    char uuid[16][96];
    uint64_t limit[16];
    uint64_t sm_limit[16];
    struct vg_slot_v0 procs[1024];
    int32_t proc_num;
    int32_t utilization_switch;
    int32_t recent_kernel;
    int32_t priority;
};
_Static_assert(sizeof(struct vg_region_v0) == 1197896, "size of region_v0");
_Static_assert(offsetof(struct vg_region_v0, magic) == 0, "region_v0.magic");
_Static_assert(offsetof(struct vg_region_v0, sm_init) == 4, "region_v0.sm_init");
_Static_assert(offsetof(struct vg_region_v0, owner_pid) == 8, "region_v0.owner_pid");
_Static_assert(offsetof(struct vg_region_v0, sem) == 16, "region_v0.sem");
_Static_assert(offsetof(struct vg_region_v0, device_count) == 48, "region_v0.device_count");
_Static_assert(offsetof(struct vg_region_v0, uuid) == 56, "region_v0.uuid");
_Static_assert(offsetof(struct vg_region_v0, limit) == 1592, "region_v0.limit");
_Static_assert(offsetof(struct vg_region_v0, sm_limit) == 1720, "region_v0.sm_limit");
_Static_assert(offsetof(struct vg_region_v0, procs) == 1848, "region_v0.procs");
_Static_assert(offsetof(struct vg_region_v0, proc_num) == 1197880, "region_v0.proc_num");
_Static_assert(offsetof(struct vg_region_v0, utilization_switch) == 1197884, "region_v0.utilization_switch");
_Static_assert(offsetof(struct vg_region_v0, recent_kernel) == 1197888, "region_v0.recent_kernel");
_Static_assert(offsetof(struct vg_region_v0, priority) == 1197892, "region_v0.priority");

/* State of one device in the extension block. */
struct vg_ext_device {
    _Atomic uint64_t due; /* bucket of the core limit, CLOCK_MONOTONIC ns */
    unsigned char reserved1[56];
    _Atomic uint64_t throttled; /* ns slept because of the core limit */
    _Atomic uint64_t launches;
    _Atomic uint64_t refusals; /* memory requests refused */
    _Atomic uint64_t peak; /* largest usage, bytes */
    _Atomic uint64_t residual; /* bytes */
    _Atomic uint64_t charged; /* GPU ns without g */
    _Atomic uint64_t oversubscribed; /* bytes in managed fallback */
    _Atomic uint64_t forgiven; /* ns of debt cut off at the cap */
    _Atomic uint64_t memory_limit; /* effective limit for readers, bytes */
    _Atomic uint64_t core_limit; /* effective limit for readers, percent */
    _Atomic uint64_t g; /* factor x 65536, 0 = not learned */
    unsigned char reserved_end[104];
};
_Static_assert(sizeof(struct vg_ext_device) == 256, "size of ext_device");
_Static_assert(offsetof(struct vg_ext_device, due) == 0, "ext_device.due");
_Static_assert(offsetof(struct vg_ext_device, throttled) == 64, "ext_device.throttled");
_Static_assert(offsetof(struct vg_ext_device, launches) == 72, "ext_device.launches");
_Static_assert(offsetof(struct vg_ext_device, refusals) == 80, "ext_device.refusals");
_Static_assert(offsetof(struct vg_ext_device, peak) == 88, "ext_device.peak");
_Static_assert(offsetof(struct vg_ext_device, residual) == 96, "ext_device.residual");
_Static_assert(offsetof(struct vg_ext_device, charged) == 104, "ext_device.charged");
_Static_assert(offsetof(struct vg_ext_device, oversubscribed) == 112, "ext_device.oversubscribed");
_Static_assert(offsetof(struct vg_ext_device, forgiven) == 120, "ext_device.forgiven");
_Static_assert(offsetof(struct vg_ext_device, memory_limit) == 128, "ext_device.memory_limit");
_Static_assert(offsetof(struct vg_ext_device, core_limit) == 136, "ext_device.core_limit");
_Static_assert(offsetof(struct vg_ext_device, g) == 144, "ext_device.g");

/* State of one slot in the extension block. */
struct vg_ext_slot {
    _Atomic uint64_t start; /* CLOCK_BOOTTIME ns at claim */
    _Atomic uint64_t pid_namespace; /* inode of the PID namespace */
    _Atomic uint32_t flags; /* SLOT_FLAG_* */
    _Atomic uint32_t host_pid_path; /* HOST_PID_* */
    _Atomic uint32_t broker_error; /* errno of the last attempt */
    unsigned char reserved5[4];
    _Atomic uint64_t throttled; /* ns, all devices */
    _Atomic uint64_t refusals;
    unsigned char reserved_end[16];
};
_Static_assert(sizeof(struct vg_ext_slot) == 64, "size of ext_slot");
_Static_assert(offsetof(struct vg_ext_slot, start) == 0, "ext_slot.start");
_Static_assert(offsetof(struct vg_ext_slot, pid_namespace) == 8, "ext_slot.pid_namespace");
_Static_assert(offsetof(struct vg_ext_slot, flags) == 16, "ext_slot.flags");
_Static_assert(offsetof(struct vg_ext_slot, host_pid_path) == 20, "ext_slot.host_pid_path");
_Static_assert(offsetof(struct vg_ext_slot, broker_error) == 24, "ext_slot.broker_error");
_Static_assert(offsetof(struct vg_ext_slot, throttled) == 32, "ext_slot.throttled");
_Static_assert(offsetof(struct vg_ext_slot, refusals) == 40, "ext_slot.refusals");

/* One record of the event ring. */
struct vg_ext_event {
    _Atomic uint64_t sequence; /* number + 1, 0 while being written */
    _Atomic uint64_t time; /* Unix ns */
    uint16_t type; /* EVENT_* */
    uint8_t device; /* 255 = none */
    unsigned char reserved4[1];
    int32_t pid; /* container PID */
    uint64_t value;
};
_Static_assert(sizeof(struct vg_ext_event) == 32, "size of ext_event");
_Static_assert(offsetof(struct vg_ext_event, sequence) == 0, "ext_event.sequence");
_Static_assert(offsetof(struct vg_ext_event, time) == 8, "ext_event.time");
_Static_assert(offsetof(struct vg_ext_event, type) == 16, "ext_event.type");
_Static_assert(offsetof(struct vg_ext_event, device) == 18, "ext_event.device");
_Static_assert(offsetof(struct vg_ext_event, pid) == 20, "ext_event.pid");
_Static_assert(offsetof(struct vg_ext_event, value) == 24, "ext_event.value");

/* The extension block, at EXTENSION_OFFSET of the file; offsets are relative to it. */
struct vg_extension {
    char magic[8]; /* VGPUEXT1, stored last */
    uint32_t version;
    uint32_t length;
    _Atomic uint64_t heartbeat; /* Unix seconds, 0 = no monitor of ours */
    _Atomic uint64_t tick; /* Unix seconds, once a second */
    _Atomic uint32_t flags; /* FLAG_* */
    _Atomic uint32_t leader; /* slot + 1, a hint */
    _Atomic uint32_t trim;
    unsigned char reserved8[4];
    _Atomic uint64_t next_event; /* events ever written */
    unsigned char reserved9[8];
    char library_version[32];
    _Atomic uint64_t broker_answers; /* processes whose host PID the broker told */
    _Atomic uint64_t broker_fallbacks; /* processes that it did not, gate on */
    unsigned char reserved12[16];
    _Atomic uint32_t slow[16]; /* not 0: slow path of admission */
    _Atomic uint64_t claimed[16]; /* bit k mod 64 of word k / 64 */
    unsigned char reserved14[3776];
    struct vg_ext_device devices[16];
    struct vg_ext_slot slots[1024];
    struct vg_ext_event events[1024];
    unsigned char reserved17[24576];
    _Atomic uint64_t totals[16384]; /* T[d][k] at d * 1024 + k; low 9 bits: undecided attempts */
};
_Static_assert(sizeof(struct vg_extension) == 262144, "size of extension");
_Static_assert(offsetof(struct vg_extension, magic) == 0, "extension.magic");
_Static_assert(offsetof(struct vg_extension, version) == 8, "extension.version");
_Static_assert(offsetof(struct vg_extension, length) == 12, "extension.length");
_Static_assert(offsetof(struct vg_extension, heartbeat) == 16, "extension.heartbeat");
_Static_assert(offsetof(struct vg_extension, tick) == 24, "extension.tick");
_Static_assert(offsetof(struct vg_extension, flags) == 32, "extension.flags");
_Static_assert(offsetof(struct vg_extension, leader) == 36, "extension.leader");
_Static_assert(offsetof(struct vg_extension, trim) == 40, "extension.trim");
_Static_assert(offsetof(struct vg_extension, next_event) == 48, "extension.next_event");
_Static_assert(offsetof(struct vg_extension, library_version) == 64, "extension.library_version");
_Static_assert(offsetof(struct vg_extension, broker_answers) == 96, "extension.broker_answers");
_Static_assert(offsetof(struct vg_extension, broker_fallbacks) == 104, "extension.broker_fallbacks");
_Static_assert(offsetof(struct vg_extension, slow) == 128, "extension.slow");
_Static_assert(offsetof(struct vg_extension, claimed) == 192, "extension.claimed");
_Static_assert(offsetof(struct vg_extension, devices) == 4096, "extension.devices");
_Static_assert(offsetof(struct vg_extension, slots) == 8192, "extension.slots");
_Static_assert(offsetof(struct vg_extension, events) == 73728, "extension.events");
_Static_assert(offsetof(struct vg_extension, totals) == 131072, "extension.totals");

#endif
