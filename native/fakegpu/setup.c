#include "setup.h"

#include "mig.h"
#include "topology.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define MIB ((uint64_t)1 << 20)

const struct fg_model *fg_model_of(const struct fg_device *device) {
    return fg_model_at(device->model);
}

static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static int parse_uuid(const char *text, uint8_t *bytes) {
    int n = 0;
    for (const char *p = strncmp(text, "GPU-", 4) == 0 ? text + 4 : text; *p; p++) {
        if (*p == '-')
            continue;
        char pair[3] = {p[0], p[1], 0};
        if (!isxdigit((unsigned char)p[0]) || !isxdigit((unsigned char)p[1]) || n == 16)
            return 0;
        bytes[n++] = (uint8_t)strtoul(pair, NULL, 16);
        p++;
    }
    return n == 16;
}

static void format_uuid(const uint8_t *b, char *text, size_t size) {
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
             b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static void set_uuid(struct fg_device *device, const char *state_path, unsigned index) {
    char list[2048], piece[64], seed[4096];
    if (fg_config_get(state_path, "FAKEGPU_UUIDS", list, sizeof list)) {
        unsigned pieces = 1;
        for (const char *p = list; *p; p++)
            pieces += *p == ',';
        if (index < pieces && fg_config_piece(list, index, piece, sizeof piece) &&
            parse_uuid(piece, device->uuid_bytes)) {
            format_uuid(device->uuid_bytes, device->uuid, sizeof device->uuid);
            return;
        }
        fprintf(stderr, "fakegpu: FAKEGPU_UUIDS has no valid UUID for card %u; it gets a derived one\n",
                index);
    }
    if (!fg_config_get(state_path, "FAKEGPU_UUID_SEED", seed, sizeof seed))
        snprintf(seed, sizeof seed, "%s", state_path);
    uint64_t hash = 14695981039346656037ull;
    for (const char *p = seed; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 1099511628211ull;
    uint64_t words[2] = {mix(hash + index), mix(mix(hash + index) + 1)};
    memcpy(device->uuid_bytes, words, sizeof words);
    format_uuid(device->uuid_bytes, device->uuid, sizeof device->uuid);
}

static uint32_t model_index(const char *key) {
    const struct fg_model *model = fg_model_find(key);
    if (model)
        return (uint32_t)(model - fg_model_at(0));
    fprintf(stderr, "fakegpu: unknown model %s; known:", key);
    for (unsigned i = 0; fg_model_at(i); i++)
        fprintf(stderr, " %s", fg_model_at(i)->key);
    fprintf(stderr, "; using A100-SXM4-40GB\n");
    return 0;
}

static void setup_device(struct fg_device *device, const char *state_path, unsigned index, unsigned count) {
    char list[1024], piece[128];
    if (!fg_config_get(state_path, "FAKEGPU_MODEL", list, sizeof list) ||
        !fg_config_piece(list, index, piece, sizeof piece))
        strcpy(piece, "A100-SXM4-40GB");
    device->model = model_index(piece);
    const struct fg_model *model = fg_model_of(device);
    snprintf(device->name, sizeof device->name, "%s", model->name);
    if (fg_config_get(state_path, "FAKEGPU_NAME", list, sizeof list) &&
        fg_config_piece(list, index, piece, sizeof piece))
        snprintf(device->name, sizeof device->name, "%.60s", piece);
    device->total_bytes = model->memory_bytes;
    device->reserved_bytes = model->reserved_bytes;
    if (fg_config_get(state_path, "FAKEGPU_MEMORY_MIB", list, sizeof list) &&
        fg_config_piece(list, index, piece, sizeof piece)) {
        uint64_t mib = strtoull(piece, NULL, 10);
        if (mib >= 64 && mib <= (1u << 24))
            device->total_bytes = mib * MIB;
        else
            fprintf(stderr,
                    "fakegpu: FAKEGPU_MEMORY_MIB=%s for card %u is not from 64 to %u; using the model's\n",
                    piece, index, 1u << 24);
    }
    device->reserved_bytes = fg_config_number(state_path, "FAKEGPU_RESERVED_MIB", 0,
                                              device->total_bytes / MIB, model->reserved_bytes / MIB) *
                             MIB;
    if (device->reserved_bytes >= device->total_bytes)
        device->reserved_bytes = 0;
    set_uuid(device, state_path, index);
    snprintf(device->bus_id, sizeof device->bus_id, "00000000:%02X:00.0", 0x10 + index * 5);
    snprintf(device->serial, sizeof device->serial, "165%010u", index + 1);
    device->minor = index;
    device->numa_node = count > 1 && index >= (count + 1) / 2;
    device->temperature_c = 34 + index % 5;
}

static uint32_t convention(const char *state_path) {
    char text[32];
    if (!fg_config_get(state_path, "FAKEGPU_PID_CONVENTION", text, sizeof text) || strcmp(text, "host") == 0)
        return FG_PIDS_HOST;
    if (strcmp(text, "namespace") != 0)
        fprintf(stderr, "fakegpu: FAKEGPU_PID_CONVENTION=%s is neither host nor namespace; using namespace\n",
                text);
    return FG_PIDS_NAMESPACE;
}

void fg_setup(struct fg_shared *shared, const char *path) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    shared->realtime_offset_ns = (uint64_t)real.tv_sec * 1000000000ull + (uint64_t)real.tv_nsec - fg_now();
    shared->device_count = (uint32_t)fg_config_number(path, "FAKEGPU_DEVICES", 0, FG_MAX_DEVICES, 1);
    shared->driver_version = (uint32_t)fg_config_number(path, "FAKEGPU_CUDA_VERSION", 10000, 13990, 12080);
    if (!fg_config_get(path, "FAKEGPU_DRIVER_VERSION", shared->driver_text, sizeof shared->driver_text))
        strcpy(shared->driver_text, "570.86.15");
    shared->pid_convention = convention(path);
    shared->hide_processes = (uint32_t)fg_config_number(path, "FAKEGPU_HIDE_PROCESSES", 0, 1, 0);
    shared->context_bytes = fg_config_number(path, "FAKEGPU_CONTEXT_MIB", 0, 1u << 20, 400) * MIB;
    shared->module_bytes = fg_config_number(path, "FAKEGPU_MODULE_KIB", 0, 1u << 30, 0) * 1024;
    shared->kernel_ns = fg_config_number(path, "FAKEGPU_KERNEL_NS", 0, 60000000000ull, 5000);
    shared->slice_ns = fg_config_number(path, "FAKEGPU_SLICE_US", 0, 1000000, 2000) * 1000;
    shared->sample_ns = fg_config_number(path, "FAKEGPU_SAMPLE_MS", 1, 10000, 167) * 1000000;
    shared->sample_lag = fg_config_number(path, "FAKEGPU_SAMPLE_LAG", 0, FG_SAMPLES - 2, 1);
    shared->time_scale_milli = fg_config_number(path, "FAKEGPU_TIME_SCALE_MILLI", 1, 1000000, 1000);
    for (unsigned i = 0; i < shared->device_count; i++)
        setup_device(&shared->devices[i], path, i, shared->device_count);
    fg_topology(shared, path);
}

/* Card of one piece of a list (an index or the beginning of a UUID) within
 * `candidates`; -1 if there is none. */
static int find_device(const struct fg_shared *shared, const char *piece, const uint8_t *candidates,
                       uint32_t count) {
    if (isdigit((unsigned char)piece[0])) {
        char *end;
        unsigned long index = strtoul(piece, &end, 10);
        return !*end && index < count ? candidates[index] : -1;
    }
    int found = -1;
    for (uint32_t i = 0; i < count; i++)
        if (strlen(piece) > 4 &&
            strncasecmp(shared->devices[candidates[i]].uuid, piece, strlen(piece)) == 0) {
            if (found >= 0)
                return -1; /* ambiguous */
            found = candidates[i];
        }
    return found;
}

uint32_t fg_visible_devices(const struct fg_shared *shared, const char *state_path, uint8_t *visible,
                            uint8_t *mig_gpu) {
    uint8_t all[FG_MAX_DEVICES], chosen[FG_MAX_DEVICES] = {0};
    char list[2048];
    for (uint32_t i = 0; i < shared->device_count; i++)
        all[i] = (uint8_t)i;
    const char *nvidia = getenv("NVIDIA_VISIBLE_DEVICES");
    int set = fg_config_get(state_path, "FAKEGPU_VISIBLE_DEVICES", list, sizeof list);
    if (!set && nvidia && strlen(nvidia) < sizeof list) {
        strcpy(list, nvidia);
        set = 1;
    }
    if (!set || strcmp(list, "all") == 0) {
        memcpy(visible, all, sizeof all);
        return shared->device_count;
    }
    char *save = NULL;
    for (char *piece = strtok_r(list, ", ", &save); piece; piece = strtok_r(NULL, ", ", &save)) {
        uint32_t card, compute;
        int d = find_device(shared, piece, all, shared->device_count);
        if (fg_mig_by_uuid(shared, piece, &card, &compute) == 0) {
            const struct fg_device *device = &shared->devices[card];
            mig_gpu[card] = (uint8_t)(device->mig_gpus[device->mig_computes[compute].gpu].id + 1);
            d = (int)card;
        }
        if (d >= 0)
            chosen[d] = 1;
    }
    uint32_t count = 0;
    for (uint32_t i = 0; i < shared->device_count; i++)
        if (chosen[i])
            visible[count++] = (uint8_t)i;
    return count;
}

static uint64_t speed(const struct fg_shared *shared, uint8_t card) {
    const struct fg_model *model = fg_model_of(&shared->devices[card]);
    return (uint64_t)model->sm_count * model->clock_mhz * (model->major >= 8 ? 2 : 1);
}

uint32_t fg_cuda_devices(const struct fg_shared *shared, const uint8_t *visible, uint32_t count,
                         uint8_t *ordinals) {
    uint8_t order[FG_MAX_DEVICES];
    const char *rule = getenv("CUDA_DEVICE_ORDER"), *list = getenv("CUDA_VISIBLE_DEVICES");
    memcpy(order, visible, count);
    if (!rule || strcmp(rule, "PCI_BUS_ID") != 0) /* fastest first, stable */
        for (uint32_t i = 1; i < count; i++)
            for (uint32_t j = i; j > 0 && speed(shared, order[j]) > speed(shared, order[j - 1]); j--) {
                uint8_t swap = order[j];
                order[j] = order[j - 1];
                order[j - 1] = swap;
            }
    if (!list) {
        memcpy(ordinals, order, count);
        return count;
    }
    uint32_t chosen = 0;
    char piece[64];
    for (const char *p = list; *p && chosen < count;) {
        size_t n = strcspn(p, ",");
        if (n == 0 || n >= sizeof piece)
            break;
        memcpy(piece, p, n);
        piece[n] = 0;
        int d = find_device(shared, piece, order, count);
        if (d < 0 || memchr(ordinals, d, chosen))
            break;
        ordinals[chosen++] = (uint8_t)d;
        p += n + (p[n] == ',');
    }
    return chosen;
}
