/* The few types and numbers of the CUDA driver API and of NVML that the hooks need; nothing of NVIDIA's
 * headers. */
#ifndef VGPU_ABI_H
#define VGPU_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    VG_CUDA_SUCCESS = 0,
    VG_CUDA_OUT_OF_MEMORY = 2,
    VG_CUDA_NOT_INITIALIZED = 3,
    VG_CUDA_NOT_FOUND = 500,
    VG_CUDA_NOT_READY = 600,
    VG_CUDA_UNKNOWN = 999,

    VG_NVML_SUCCESS = 0,
    VG_NVML_UNINITIALIZED = 1,
    VG_NVML_NOT_SUPPORTED = 3,
    VG_NVML_NOT_FOUND = 6,
    VG_NVML_INSUFFICIENT_SIZE = 7,
    VG_NVML_LIBRARY_NOT_FOUND = 12,
    VG_NVML_FUNCTION_NOT_FOUND = 13,
    VG_NVML_MEMORY = 20,
    VG_NVML_VERSION_MISMATCH = 25,

    VG_ATTRIBUTE_SMS = 16,
    VG_ATTRIBUTE_THREADS_PER_SM = 39,
    VG_POOL_RESERVED = 5,
    VG_POOL_USED = 7,
    VG_LOCATION_DEVICE = 1,
    VG_LOCATION_DEVICE_PART =
        6, /* CUDA 13.5: a part of a device's memory; the device is the low byte of the id */
    VG_CAPTURE_NONE = 0,
    VG_CAPTURE_MODE_RELAXED = 2,
    VG_EVENT_DEFAULT = 0,
    VG_ARRAY_SPARSE = 0x40,
    VG_ARRAY_DEFERRED = 0x80,
    VG_ARRAY_LAYERED = 0x01,
    VG_LOOKUP_PER_THREAD = 2,
};

/* The stream handle that means "the calling thread's default stream". */
#define VG_STREAM_PER_THREAD ((void *)2)

static inline void *vg_per_thread(void *stream) {
    return stream == NULL ? VG_STREAM_PER_THREAD : stream;
}

struct vg_location {
    int type;
    int id;
};

/* The CUDA device whose memory the location is; -1: none. */
static inline int vg_location_device(const struct vg_location *location) {
    if (location->type == VG_LOCATION_DEVICE_PART)
        return location->id & 0xff;
    return location->type == VG_LOCATION_DEVICE ? location->id : -1;
}

struct vg_alloc_prop {
    int type;
    int handle_types;
    struct vg_location location;
    void *win32;
    unsigned char flags[8];
};
_Static_assert(sizeof(struct vg_alloc_prop) == 32, "CUmemAllocationProp");

struct vg_pool_props {
    int type;
    int handle_types;
    struct vg_location location;
    void *win32;
    unsigned char rest[64];
};
_Static_assert(sizeof(struct vg_pool_props) == 88, "CUmemPoolProps");

struct vg_array_desc_v1 {
    unsigned width, height, format, channels;
};

struct vg_array_desc {
    size_t width, height;
    unsigned format, channels;
};
_Static_assert(sizeof(struct vg_array_desc) == 24, "CUDA_ARRAY_DESCRIPTOR");

struct vg_array3d_desc_v1 {
    unsigned width, height, depth, format, channels, flags;
};

struct vg_array3d_desc {
    size_t width, height, depth;
    unsigned format, channels, flags;
};
_Static_assert(sizeof(struct vg_array3d_desc) == 40, "CUDA_ARRAY3D_DESCRIPTOR");

struct vg_launch_config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void *stream;
    void *attributes;
    unsigned count;
};
_Static_assert(sizeof(struct vg_launch_config) == 56, "CUlaunchConfig");

struct vg_launch_params {
    void *function;
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void *stream;
    void **params;
};
_Static_assert(sizeof(struct vg_launch_params) == 56, "CUDA_LAUNCH_PARAMS");

struct vg_nvml_memory {
    uint64_t total, free, used;
};

struct vg_nvml_memory_v2 {
    unsigned version;
    uint64_t total, reserved, free, used;
};
_Static_assert(sizeof(struct vg_nvml_memory_v2) == 40, "nvmlMemory_v2_t");

struct vg_nvml_process_v1 {
    unsigned pid;
    uint64_t used;
};

struct vg_nvml_process {
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct vg_nvml_process) == 24, "nvmlProcessInfo_t");

struct vg_nvml_sample {
    unsigned pid;
    uint64_t time_us;
    unsigned sm, memory, encoder, decoder;
};
_Static_assert(sizeof(struct vg_nvml_sample) == 32, "nvmlProcessUtilizationSample_t");

struct vg_nvml_utilization {
    uint64_t time_us;
    unsigned pid, sm, memory, encoder, decoder, jpeg, optical_flow;
};
_Static_assert(sizeof(struct vg_nvml_utilization) == 40, "nvmlProcessUtilizationInfo_v1_t");

struct vg_nvml_utilization_info {
    unsigned version, count;
    uint64_t since;
    void *records;
};
_Static_assert(sizeof(struct vg_nvml_utilization_info) == 24, "nvmlProcessesUtilizationInfo_v1_t");

struct vg_nvml_process_detail {
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
    uint64_t protected;
};
_Static_assert(sizeof(struct vg_nvml_process_detail) == 32, "nvmlProcessDetail_v1_t");

struct vg_nvml_process_details {
    unsigned version, mode, count;
    void *records;
};
_Static_assert(sizeof(struct vg_nvml_process_details) == 24, "nvmlProcessDetailList_v1_t");

/* What NVML puts into the first word of a structure that has versions. */
#define VG_NVML_VERSION(type, number) ((unsigned)sizeof(type) | (unsigned)(number) << 24)

#define VG_EXPORT __attribute__((visibility("default")))
#define VG_COLD   __attribute__((noinline, cold))

#endif
