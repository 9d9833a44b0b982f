/* What the host (limits file) or the environment asks for. Reading it changes nothing outside the struct. */
#ifndef VGPU_CONFIG_H
#define VGPU_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

enum {
    VG_CONFIG_DEVICES = 16,
    VG_CONFIG_ALL = VG_CONFIG_DEVICES, /* index of the unsuffixed variable */
    VG_UUID_TEXT = 96,
    VG_PATH_LENGTH = 4096,
    VG_LIMITS_FILE_LENGTH = 65536,
};

enum vg_policy { VG_POLICY_DEFAULT, VG_POLICY_FORCE, VG_POLICY_DISABLE };
enum vg_failure { VG_FAILURE_PRIVATE, VG_FAILURE_OPEN, VG_FAILURE_DENY };

struct vg_config {
    bool from_file;
    bool lost; /* neither a limits file nor a variable says anything about limits or region */
    bool memory_set[VG_CONFIG_DEVICES + 1];
    bool sm_set[VG_CONFIG_DEVICES + 1];
    uint64_t memory[VG_CONFIG_DEVICES + 1]; /* bytes, 0 = no limit */
    uint64_t sm[VG_CONFIG_DEVICES + 1];     /* percent, 0 or >= 100 = no limit */
    unsigned uuid_count;                    /* entries of the allocation, in its order */
    char uuids[VG_CONFIG_DEVICES][VG_UUID_TEXT];
    bool uuids_are_allocation; /* from HAMI_DEVICE_UUIDS, not from NVIDIA_VISIBLE_DEVICES */
    char cache_path[VG_PATH_LENGTH];
    char log_file[VG_PATH_LENGTH];
    int log_level;
    int priority;
    enum vg_policy policy;
    enum vg_failure failure;
    bool nvml_host_processes;
    unsigned record_interval; /* seconds */
};

/* Value of a variable, or NULL. */
typedef const char *(*vg_lookup)(const void *source, const char *name);

/* Pure: builds a configuration; complaints go to the log. */
void vg_config_build(struct vg_config *config, vg_lookup lookup, const void *source);

/* The limits of a region device with this UUID text at this index; a listed UUID wins over the position. */
uint64_t vg_config_memory(const struct vg_config *config, const char *uuid, int index);
uint64_t vg_config_sm(const struct vg_config *config, const char *uuid, int index);

/* KEY=VALUE lines; malformed ones are skipped with a warning. `text` is changed and must outlive the table.
 */
struct vg_pairs {
    unsigned count;
    struct {
        const char *key, *value;
    } pairs[256];
};

void vg_pairs_parse(struct vg_pairs *pairs, char *text);
const char *vg_pairs_get(const void *pairs, const char *name);

/* Reads the trusted limits file, else the environment (nothing of it in a set-user-ID program). */
void vg_config_load(struct vg_config *config);

/* Looks at the limits file again. True: it has changed and `config` holds its new limits. */
bool vg_config_refresh(struct vg_config *config);

#endif
