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
enum vg_residual { VG_RESIDUAL_REPORT, VG_RESIDUAL_CHARGE, VG_RESIDUAL_OFF };
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
    int log_level;
    int priority;
    enum vg_policy policy;
    enum vg_failure failure;
    enum vg_residual residual;
    bool oversubscribe; /* what the card has no room for becomes managed memory */
    bool oom_killer;
    bool nvml_host_processes;
    bool hostpid_broker;           /* ask the host PID broker */
    bool hostpid_node_lock;        /* where it did not answer, one process of the node looks at a time */
    unsigned record_interval;      /* seconds */
    char log_file[VG_PATH_LENGTH]; /* the texts come last: what they do not use is never touched */
    char cache_path[VG_PATH_LENGTH];
};

/* Value of a variable, or NULL. */
typedef const char *(*vg_lookup)(const void *source, const char *name);

/* Pure: builds a configuration; complaints go to the log. */
void vg_config_build(struct vg_config *config, vg_lookup lookup, const void *source);

/* The limits of a region device with this UUID text at this index; a listed UUID wins over the position. */
uint64_t vg_config_memory(const struct vg_config *config, const char *uuid, int index);
uint64_t vg_config_sm(const struct vg_config *config, const char *uuid, int index);

/* True if the list of the allocation names the device. */
bool vg_config_names(const struct vg_config *config, const char *uuid);

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

/* Reads the trusted limits file, else the environment (nothing of it in a set-user-ID program). False: for
 * want of a descriptor or of memory nobody can tell which. */
bool vg_config_load(struct vg_config *config);

/* Where neither file nor environment says anything: the environment of the container's first process, if it
 * can be read; only what HAMi's plugin sets. False: as above. */
bool vg_config_load_of_init(struct vg_config *config);

/* Looks at the limits file again. True: it has changed and `config` holds its new limits. */
bool vg_config_refresh(struct vg_config *config);

#endif
