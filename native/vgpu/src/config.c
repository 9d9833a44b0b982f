#define _GNU_SOURCE
#include "config.h"

#include "log.h"
#include "size.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

static void read_limits(struct vg_config *config, vg_lookup lookup, const void *source, bool memory) {
    const char *base = memory ? "CUDA_DEVICE_MEMORY_LIMIT" : "CUDA_DEVICE_SM_LIMIT";
    for (int i = 0; i <= VG_CONFIG_ALL; i++) {
        char name[48];
        if (i == VG_CONFIG_ALL)
            snprintf(name, sizeof name, "%s", base);
        else
            snprintf(name, sizeof name, "%s_%d", base, i);
        const char *text = lookup(source, name);
        if (text == NULL)
            continue;
        uint64_t bytes = 0;
        long percent = 0;
        enum vg_parsed parsed =
            memory ? vg_parse_size(text, &bytes) : vg_parse_integer(text, 0, 1000000, &percent);
        if (parsed == VG_PARSED_REJECTED)
            VG_ERROR("%s=%.40s is not a valid %s and is ignored", name, text, memory ? "size" : "percentage");
        if (parsed != VG_PARSED_VALUE)
            continue;
        (memory ? config->memory : config->sm)[i] = memory ? bytes : (uint64_t)percent;
        (memory ? config->memory_set : config->sm_set)[i] = true;
    }
}

static bool full_uuid(const char *text, size_t length) {
    return (length == 40 && strncmp(text, "GPU-", 4) == 0) || (length > 4 && strncmp(text, "MIG-", 4) == 0);
}

/* False: an entry is no full UUID; the list is not used. */
static bool read_uuids(struct vg_config *config, const char *text) {
    config->uuid_count = 0;
    for (const char *p = text; *p != '\0';) {
        size_t length = strcspn(p, ",");
        const char *start = p;
        p += length + (p[length] == ',');
        while (length > 0 && *start == ' ') {
            start++;
            length--;
        }
        while (length > 0 && start[length - 1] == ' ')
            length--;
        if (!full_uuid(start, length) || length >= VG_UUID_TEXT || config->uuid_count == VG_CONFIG_DEVICES) {
            config->uuid_count = 0;
            return false;
        }
        char *entry = config->uuids[config->uuid_count++];
        memset(entry, 0, VG_UUID_TEXT);
        memcpy(entry, start, length);
    }
    return true;
}

static void read_devices(struct vg_config *config, vg_lookup lookup, const void *source) {
    const char *text = lookup(source, "HAMI_DEVICE_UUIDS");
    if (text != NULL && text[0] != '\0') {
        config->uuids_are_allocation = read_uuids(config, text);
        if (!config->uuids_are_allocation)
            VG_ERROR("HAMI_DEVICE_UUIDS is not a list of full device UUIDs and is ignored");
    }
    if (!config->uuids_are_allocation && (text = lookup(source, "NVIDIA_VISIBLE_DEVICES")) != NULL)
        read_uuids(config, text);
}

static long integer_or(vg_lookup lookup, const void *source, const char *name, long low, long high,
                       long otherwise) {
    long value = otherwise;
    const char *text = lookup(source, name);
    if (text != NULL && vg_parse_integer(text, low, high, &value) != VG_PARSED_VALUE)
        return otherwise;
    return value;
}

static void copy_text(char *out, size_t length, const char *text) {
    snprintf(out, length, "%s", text != NULL ? text : "");
}

static bool is_true(const char *text) {
    return text != NULL && (strcasecmp(text, "true") == 0 || strcmp(text, "1") == 0);
}

/* Index of the value in a NULL-terminated list whose first word is the default. */
static int choice(vg_lookup lookup, const void *source, const char *name, const char *const *words) {
    const char *text = lookup(source, name);
    if (text == NULL || text[0] == '\0')
        return 0;
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(words[i], text) == 0)
            return i;
    VG_WARN("%s=%.40s is unknown, %s is used", name, text, words[0]);
    return 0;
}

static const char *const failures[] = {"private", "open", "deny", NULL};
static const char *const residuals[] = {"report", "charge", "off", NULL};
static const char *const processes[] = {"own", "host", NULL};

void vg_config_build(struct vg_config *config, vg_lookup lookup, const void *source) {
    memset(config, 0, offsetof(struct vg_config, log_file));
    config->log_level = (int)integer_or(lookup, source, "LIBCUDA_LOG_LEVEL", 0, 4, 1);
    copy_text(config->log_file, sizeof config->log_file, lookup(source, "VGPU_LOG_FILE"));
    copy_text(config->cache_path, sizeof config->cache_path,
              lookup(source, "CUDA_DEVICE_MEMORY_SHARED_CACHE"));
    if (config->cache_path[0] == '\0')
        copy_text(config->cache_path, sizeof config->cache_path, "/tmp/cudevshr.cache");
    config->priority = (int)integer_or(lookup, source, "CUDA_TASK_PRIORITY", 0, 1, 1);
    long interval = integer_or(lookup, source, "RECORD_KERNEL_INTERVAL", 0, 1000000, 1);
    config->record_interval = (unsigned)(interval < 1 ? 1 : interval > 60 ? 60 : interval);
    const char *policy = lookup(source, "GPU_CORE_UTILIZATION_POLICY");
    if (policy != NULL && strcasecmp(policy, "force") == 0)
        config->policy = VG_POLICY_FORCE;
    else if (policy != NULL && strcasecmp(policy, "disable") == 0)
        config->policy = VG_POLICY_DISABLE;
    config->failure = (enum vg_failure)choice(lookup, source, "VGPU_FAILURE_POLICY", failures);
    config->residual = (enum vg_residual)choice(lookup, source, "VGPU_CHARGE_RESIDUAL", residuals);
    config->nvml_host_processes = choice(lookup, source, "VGPU_NVML_PROCESSES", processes) != 0;
    config->oversubscribe = is_true(lookup(source, "CUDA_OVERSUBSCRIBE"));
    config->oom_killer = is_true(lookup(source, "ACTIVE_OOM_KILLER"));
    const char *broker = lookup(source, "LIBVGPU_HOSTPID_BROKER"),
               *node_lock = lookup(source, "VGPU_HOSTPID_NODE_LOCK");
    config->hostpid_broker = broker != NULL && strcmp(broker, "1") == 0;
    config->hostpid_node_lock = node_lock != NULL && strcmp(node_lock, "1") == 0;
    read_limits(config, lookup, source, true);
    read_limits(config, lookup, source, false);
    read_devices(config, lookup, source);
}

/* Position of the device in the allocation: -1 if a list of the allocation does not name it. A device that
 * nobody could name yet keeps its index. */
static int position_of(const struct vg_config *config, const char *uuid, int index) {
    if (config->uuid_count == 0 || uuid[0] == '\0')
        return index;
    for (unsigned a = 0; a < config->uuid_count; a++)
        if (strcmp(config->uuids[a], uuid) == 0)
            return (int)a;
    return -1;
}

static uint64_t limit_of(const uint64_t *values, const bool *set, int position) {
    if (position >= 0 && position < VG_CONFIG_DEVICES && set[position])
        return values[position];
    return set[VG_CONFIG_ALL] ? values[VG_CONFIG_ALL] : 0;
}

uint64_t vg_config_memory(const struct vg_config *config, const char *uuid, int index) {
    return limit_of(config->memory, config->memory_set, position_of(config, uuid, index));
}

uint64_t vg_config_sm(const struct vg_config *config, const char *uuid, int index) {
    return limit_of(config->sm, config->sm_set, position_of(config, uuid, index));
}

bool vg_config_names(const struct vg_config *config, const char *uuid) {
    for (unsigned a = 0; a < config->uuid_count; a++)
        if (strcmp(config->uuids[a], uuid) == 0)
            return true;
    return false;
}
