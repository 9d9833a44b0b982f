/* vgpu-region (also as shrreg-tool): shows a container's shared region and changes what a tool may change. */
#define _GNU_SOURCE
#include "config.h"
#include "limits_file.h"
#include "log.h"
#include "region.h"
#include "region_file.h"
#include "size.h"
#include "slots.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "Usage: vgpu-region [--file PATH] [OPTION]...\n"
    "Without --file the region that the limits file or the environment names.\n\n"
    "  --print                 table of devices and processes (default)\n"
    "  --json                  one JSON object instead\n"
    "  --explain               why programs are slow or refused\n"
    "  --set-limit D=SIZE      memory limit of device D, such as 3000m; 0: none\n"
    "  --set-sm-limit D=N      core limit of device D, 1 to 100 percent\n"
    "  --suspend, --resume     launches of every process wait, or go on\n"
    "  --reclaim               clear what killed processes left; live ones are not touched\n"
    "  --create_new [--force]  make the region anew; with --force also while processes live, which move to "
    "it\n"
    "  --version, --help\n";

enum { MAX_CHANGES = 64 };

struct change {
    bool memory;
    unsigned device;
    uint64_t value;
};

struct options {
    const char *file;
    bool json, explain, suspend, resume, reclaim, create, force;
    unsigned changes;
    struct change change[MAX_CHANGES];
};

static struct vg_config config;

static int complain(const char *what, const char *text) {
    fprintf(stderr, "vgpu-region: %s: %s\n", what, text);
    return 2;
}

static bool parse_change(struct options *options, bool memory, char *text) {
    char *equals = strchr(text, '=');
    long device = -1, percent = 0;
    uint64_t value = 0;
    if (equals == NULL || options->changes == MAX_CHANGES)
        return false;
    *equals = '\0';
    if (vg_parse_integer(text, 0, VG_MAX_DEVICES - 1, &device) != VG_PARSED_VALUE)
        return false;
    if (memory ? vg_parse_size(equals + 1, &value) != VG_PARSED_VALUE
               : vg_parse_integer(equals + 1, 1, VG_SM_LIMIT_NONE, &percent) != VG_PARSED_VALUE)
        return false;
    options->change[options->changes++] = (struct change){
        .memory = memory, .device = (unsigned)device, .value = memory ? value : (uint64_t)percent};
    return true;
}

static void describe(char text[48], const struct change *change, uint64_t value) {
    if (!change->memory)
        snprintf(text, 48, "%" PRIu64 " %%", value);
    else if (value == 0)
        snprintf(text, 48, "no limit");
    else if (value % (1 << 20) == 0)
        snprintf(text, 48, "%" PRIu64 " MiB", value >> 20);
    else
        snprintf(text, 48, "%" PRIu64 " bytes", value);
}

static uint64_t most_by_file(const struct tool_file *file, const struct change *change) {
    char uuid[VG_UUID_LENGTH + 1];
    tool_uuid(file, change->device, uuid);
    uint64_t most = change->memory ? vg_config_memory(&config, uuid, (int)change->device)
                                   : vg_config_sm(&config, uuid, (int)change->device);
    return !config.from_file || (!change->memory && most >= VG_SM_LIMIT_NONE) ? 0 : most;
}

/* Above the limits file a limit in the region has no effect: the smaller of the two counts. */
static bool refused(const struct tool_file *file, const struct change *change) {
    uint64_t most = most_by_file(file, change);
    char asked[48], allowed[48];
    if (config.from_file && !change->memory && config.policy == VG_POLICY_DISABLE) {
        complain(file->path,
                 "the limits file switches core limits off (GPU_CORE_UTILIZATION_POLICY=disable), "
                 "and one in the region has no effect; nothing was changed");
        return true;
    }
    if (most == 0 || (change->value != 0 && change->value <= most))
        return false;
    describe(asked, change, change->value);
    describe(allowed, change, most);
    fprintf(
        stderr,
        "vgpu-region: %s: device %u: %s is above the %s of the container's limits file, and programs get the "
        "smaller of the two; nothing was changed. Write another limit into that file, on the node and in "
        "place, or make the pod anew with a larger limit\n",
        file->path, change->device, asked, allowed);
    return true;
}

static void print_what_applies(const struct tool_file *file, const struct change *change) {
    uint64_t most = most_by_file(file, change);
    bool none = change->value == (change->memory ? 0 : VG_SM_LIMIT_NONE);
    bool paced =
        tool_tail(file).utilization_switch == 1 || (config.from_file && config.policy == VG_POLICY_FORCE);
    char limit[48], allowed[48];
    describe(limit, change, change->value);
    describe(allowed, change, most);
    printf("device %u: programs get ", change->device);
    if (none)
        printf("%s without a limit from now on", change->memory ? "memory" : "the cores");
    else
        printf("%s of %s from now on", limit, change->memory ? "memory" : "the cores");
    if (most != 0)
        printf("; the limits file allows %s", allowed);
    printf("%s\n", change->memory || paced
                       ? ""
                       : "; not paced while no other container uses the card, as now (monitor)");
}

static int apply(const struct tool_file *file, const struct options *options) {
    struct vg_region *region = (struct vg_region *)file->data;
    for (unsigned i = 0; i < options->changes; i++) {
        const struct change *change = &options->change[i];
        if (change->device >= file->devices)
            return complain(file->path, "the region has no such device; nothing was changed");
        if (refused(file, change))
            return 2;
    }
    for (unsigned i = 0; i < options->changes; i++) {
        const struct change *change = &options->change[i];
        atomic_store(change->memory ? &region->limit[change->device] : &region->sm_limit[change->device],
                     change->value);
    }
    for (unsigned k = 0; k < file->slots && (options->suspend || options->resume); k++)
        if (region->procs[k].status != VG_SLOT_FREE && tool_live(file, k))
            atomic_store(&region->procs[k].status, options->suspend ? VG_SLOT_SUSPENDED : VG_SLOT_RUNNING);
    return 0;
}

static int reclaim(const struct tool_file *file, int repaired[2]) {
    struct vg_space space = {.region = (struct vg_region *)file->data,
                             .extension = tool_extension(file),
                             .shared_extension = true,
                             .slot = -1};
    struct vg_section section = {.file = &space.locks, .fd = file->fd};
    if (!file->extension || (space.extension->flags & VG_FLAG_NO_OFD_LOCKS) != 0)
        return complain(file->path, "without our block and its locks nobody can tell who is dead");
    repaired[0] = (int)vg_slots_reclaim(&space, &section, -1);
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        if (space.extension->slow[d] == 0 || !tool_lock(file, VG_LOCK_ADMISSION + d))
            continue;
        atomic_store(&space.extension->slow[d], 0);
        repaired[1]++;
        tool_unlock(file, VG_LOCK_ADMISSION + d);
    }
    int32_t slots = space.region->proc_num;
    if (slots < 0 || slots > VG_MAX_SLOTS)
        atomic_store(&space.region->proc_num, VG_MAX_SLOTS);
    return 0;
}

static int change(struct tool_file *file, const struct options *options, int repaired[2]) {
    if (!file->v1)
        return complain(file->path, "is no region of version 1: it can only be shown");
    if (!tool_map(file))
        return 1;
    int result = apply(file, options);
    if (result == 0 && options->reclaim)
        result = reclaim(file, repaired);
    return result == 0 && !tool_copy(file) ? 1 : result;
}

static int create_new(const char *path, bool force) {
    static struct vg_region_seed seed;
    struct vg_space space;
    struct tool_file file;
    if (access(path, F_OK) == 0 && tool_open(&file, path, false)) {
        unsigned live = 0;
        for (unsigned k = 0; k < file.slots; k++)
            live += tool_slot(&file, k).status != VG_SLOT_FREE && tool_live(&file, k);
        tool_close(&file);
        if (live != 0 && !force)
            return complain(path, "processes use it; --force makes it anew, and they move to it");
    }
    if (unlink(path) != 0 && errno != ENOENT)
        return complain(path, strerror(errno));
    for (int r = 0; r < VG_MAX_DEVICES; r++) {
        uint64_t sm = vg_config_sm(&config, "", r);
        seed.limits[r] = vg_config_memory(&config, "", r);
        seed.sm_limits[r] = sm == 0 || sm > VG_SM_LIMIT_NONE ? VG_SM_LIMIT_NONE : sm;
    }
    seed.priority = config.priority;
    tool_expect_cuts(path);
    return vg_region_open(&space, path, &seed) == VG_REGION_CREATED ? 0 : complain(path, "cannot be made");
}

static const char *look_up(const char *name) {
    const char *suffix = strrchr(name, '_');
    long index = VG_CONFIG_ALL;
    if (suffix != NULL && vg_parse_integer(suffix + 1, 0, VG_CONFIG_DEVICES - 1, &index) != VG_PARSED_VALUE)
        index = VG_CONFIG_ALL;
    return (strstr(name, "MEMORY") != NULL ? config.memory_set : config.sm_set)[index] ? "" : NULL;
}

static int work(const struct options *options) {
    const char *path = options->file != NULL ? options->file : config.cache_path;
    if (!config.from_file && options->file != NULL && !tool_limits_on_node(&config, path))
        return 1;
    const struct tool_sources sources = {config.from_file ? "limits file" : "environment", look_up};
    bool write = options->changes > 0 || options->suspend || options->resume || options->reclaim;
    struct tool_file file;
    int repaired[2] = {0, 0}, result = options->create ? create_new(path, options->force) : 0;
    if (result != 0 || !tool_open(&file, path, write))
        return result != 0 ? result : 1;
    if (write)
        result = change(&file, options, repaired);
    for (unsigned i = 0; i < options->changes && result == 0 && !options->json; i++)
        print_what_applies(&file, &options->change[i]);
    if (result == 0 && options->json)
        tool_print_json(&file, &sources, options->explain, options->reclaim ? repaired : NULL);
    else if (result == 0 && options->explain)
        tool_print_explanation(&file, &sources);
    else if (result == 0)
        tool_print_table(&file);
    if (result == 0 && options->reclaim && !options->json)
        printf("%d slots and %d flags cleared\n", repaired[0], repaired[1]);
    tool_close(&file);
    return result;
}

int main(int argc, char **argv) {
    static const struct option names[] = {{"file", required_argument, NULL, 'f'},
                                          {"print", no_argument, NULL, 'p'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"explain", no_argument, NULL, 'e'},
                                          {"set-limit", required_argument, NULL, 'l'},
                                          {"set-sm-limit", required_argument, NULL, 'c'},
                                          {"suspend", no_argument, NULL, 's'},
                                          {"resume", no_argument, NULL, 'r'},
                                          {"reclaim", no_argument, NULL, 'x'},
                                          {"create_new", no_argument, NULL, 'n'},
                                          {"force", no_argument, NULL, 'F'},
                                          {"version", no_argument, NULL, 'v'},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    struct options options = {0};
    for (int option; (option = getopt_long(argc, argv, "f:pjel:c:srxnFvh", names, NULL)) != -1;) {
        switch (option) {
        case 'f':
            options.file = optarg;
            break;
        case 'l':
        case 'c':
            if (!parse_change(&options, option == 'l', optarg))
                return complain("expected DEVICE=VALUE", optarg);
            break;
        case 'v':
            printf("shrreg size: %d, version %d.%d\n", VG_V1_MIN_LENGTH, VG_MAJOR, VG_MINOR);
            return 0;
        case 'h':
            fputs(help, stdout);
            return 0;
        case '?':
            fputs(help, stderr);
            return 2;
        default:
            options.json |= option == 'j';
            options.explain |= option == 'e';
            options.suspend |= option == 's';
            options.resume |= option == 'r';
            options.reclaim |= option == 'x';
            options.create |= option == 'n';
            options.force |= option == 'F';
        }
    }
    if (optind != argc || (options.suspend && options.resume)) {
        fputs(help, stderr);
        return 2;
    }
    vg_config_load(&config);
    return work(&options);
}
