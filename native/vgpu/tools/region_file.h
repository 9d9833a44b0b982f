/* A region file as the tool sees it: never joined, read through bounds that the workload cannot move. */
#ifndef VGPU_TOOL_REGION_FILE_H
#define VGPU_TOOL_REGION_FILE_H

#include "region_abi.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tool_file {
    const char *path;
    int fd;
    size_t length;
    unsigned char *data; /* a copy of the whole file, or between tool_map and tool_copy the file itself */
    bool v1, extension;
    unsigned minor, devices, slots;
};

/* Complains on standard error and returns false if the file is no region that the tool may touch. */
bool tool_open(struct tool_file *file, const char *path, bool write);
void tool_close(struct tool_file *file);

/* The file itself, for changes: one store of an aligned word is seen whole by programs. Complains and returns
 * false if it cannot be mapped any more. */
bool tool_map(struct tool_file *file);

/* A copy of what stands in the file now; as tool_open. */
bool tool_copy(struct tool_file *file);

/* A container can cut its file at any moment: whoever then touches a mapped page that is gone ends with a
 * sentence about `path`. */
void tool_expect_cuts(const char *path);

/* True if the owner of a slot lives: its lock is held, or locks do not tell. */
bool tool_live(const struct tool_file *file, unsigned slot);

/* Locks a byte if nobody holds it. */
bool tool_lock(const struct tool_file *file, int64_t byte);
void tool_unlock(const struct tool_file *file, int64_t byte);

struct tool_usage {
    uint64_t context, module, data, total, nvml, sm;
};

struct tool_slot {
    int32_t pid, hostpid, status;
};

struct tool_slot tool_slot(const struct tool_file *file, unsigned slot);
struct tool_usage tool_usage(const struct tool_file *file, unsigned slot, unsigned device);
uint64_t tool_limit(const struct tool_file *file, unsigned device);
uint64_t tool_sm_limit(const struct tool_file *file, unsigned device);

/* UUID text without what would break a line or a JSON text; `out` has VG_UUID_LENGTH + 1 bytes. */
void tool_uuid(const struct tool_file *file, unsigned device, char *out);

static inline const struct vg_region *tool_region(const struct tool_file *file) {
    return (const struct vg_region *)file->data;
}

static inline const struct vg_region_v0 *tool_region_v0(const struct tool_file *file) {
    return (const struct vg_region_v0 *)file->data;
}

static inline struct vg_extension *tool_extension(const struct tool_file *file) {
    return (struct vg_extension *)(file->data + VG_EXTENSION_OFFSET);
}

/* What stands behind the slots: the same four words in both layouts. */
struct tool_tail {
    int32_t utilization_switch, recent_kernel, priority;
    uint64_t last_kernel_time;
};

struct tool_tail tool_tail(const struct tool_file *file);

/* Output; `named` is a limits file's or the environment's look-up, `source` its name. */
struct tool_sources {
    const char *source;
    const char *(*look_up)(const char *name);
};

void tool_print_table(const struct tool_file *file);
void tool_print_explanation(const struct tool_file *file, const struct tool_sources *sources);
void tool_print_json(const struct tool_file *file, const struct tool_sources *sources, bool explain,
                     const int repaired[2]);

#endif
