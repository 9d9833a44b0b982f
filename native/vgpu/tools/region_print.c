/* The same object and the same sentences as `hami region`. */
#define _GNU_SOURCE
#include "region_file.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const uint64_t minute_ns = 60000000000u;
enum { STALE_HEARTBEAT_S = 30 };

static const char *const host_pid_paths[] = {"not asked yet", "same namespace", "broker", "NVML", "none"};
static const char *const slot_flags[] = {"blocked by priority", "waiting for the core limit",
                                         "without events", "lock kept by a descriptor"};
static const char *const event_names[] = {
    "",
    "refusal",
    "reclaimed",
    "throttled",
    "host PID fell back",
    "private region",
    "priority block",
    "limits file read again",
    "managed fallback",
    "no OFD locks",
    "no per-process NVML data",
    "debt forgiven",
    "region replaced",
};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* A known name, or the number as text. */
static const char *name_of(const char *const *names, size_t count, uint64_t value, char text[24]) {
    if (value < count && names[value][0] != '\0')
        return names[value];
    snprintf(text, 24, "%" PRIu64, value);
    return text;
}

static const char *status_name(int32_t status, char text[24]) {
    static const char *const names[] = {"free", "running", "suspended"};
    snprintf(text, 24, "%d", status);
    return status >= 0 && (size_t)status < COUNT(names) ? names[status] : text;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t used_on(const struct tool_file *file, unsigned d) {
    uint64_t sum = 0;
    for (unsigned k = 0; k < file->slots; k++)
        if (tool_slot(file, k).status != VG_SLOT_FREE)
            sum += tool_usage(file, k, d).total;
    return sum;
}

/* Event `number` if it is complete, else NULL. */
static const struct vg_ext_event *event_at(const struct tool_file *file, uint64_t number) {
    const struct vg_ext_event *event = &tool_extension(file)->events[number % VG_EVENT_RING];
    return event->sequence == number + 1 ? event : NULL;
}

static uint64_t first_event(const struct tool_file *file) {
    uint64_t written = tool_extension(file)->next_event;
    return written > VG_EVENT_RING ? written - VG_EVENT_RING : 0;
}

/* ---- why a program is slow or refused ---- */

struct explained {
    uint64_t memory_limit, core_limit;
    const char *memory_from, *core_from;
    unsigned throttled_percent;
    const struct vg_ext_event *last_refusal;
};

static const char *origin(const char *base, bool is_region, unsigned d, const struct tool_sources *sources) {
    char name[48];
    snprintf(name, sizeof name, "%s_%u", base, d);
    if (!is_region || sources->look_up(name) != NULL || sources->look_up(base) != NULL)
        return sources->source;
    return "region";
}

static struct explained explain(const struct tool_file *file, unsigned d,
                                const struct tool_sources *sources) {
    const struct vg_ext_device *device = file->extension ? &tool_extension(file)->devices[d] : NULL;
    struct explained found = {
        .memory_limit = device != NULL ? device->memory_limit : tool_limit(file, d),
        .core_limit = device != NULL ? device->core_limit : 0,
    };
    found.memory_from =
        origin("CUDA_DEVICE_MEMORY_LIMIT", found.memory_limit == tool_limit(file, d), d, sources);
    found.core_from = origin("CUDA_DEVICE_SM_LIMIT",
                             device == NULL || found.core_limit == tool_sm_limit(file, d), d, sources);
    uint64_t throttled = 0, now = now_ns();
    if (!file->extension)
        return found;
    for (uint64_t n = first_event(file), end = tool_extension(file)->next_event; n < end; n++) {
        const struct vg_ext_event *event = event_at(file, n);
        if (event == NULL || event->device != d)
            continue;
        if (event->type == VG_EVENT_REFUSAL)
            found.last_refusal = event;
        if (event->type == VG_EVENT_THROTTLED && event->time <= now && now - event->time <= minute_ns)
            throttled += event->value < minute_ns ? event->value : minute_ns;
    }
    found.throttled_percent = throttled >= minute_ns ? 100 : (unsigned)(throttled * 100 / minute_ns);
    return found;
}

static void print_size(uint64_t bytes) {
    if (bytes % (1 << 20) == 0)
        printf("%" PRIu64 " MiB", bytes >> 20);
    else
        printf("%" PRIu64 " bytes", bytes);
}

static void explain_device(const struct tool_file *file, unsigned d, const struct tool_sources *sources) {
    static const struct vg_ext_device none;
    const struct vg_ext_device *device = file->extension ? &tool_extension(file)->devices[d] : &none;
    struct explained about = explain(file, d, sources);
    char uuid[VG_UUID_LENGTH + 1];
    tool_uuid(file, d, uuid);
    printf("device %u %s: memory limit ", d, uuid);
    if (about.memory_limit != 0) {
        print_size(about.memory_limit);
        printf(" (%s)", about.memory_from);
    } else {
        printf("no limit");
    }
    printf(", used ");
    print_size(used_on(file, d));
    if (file->extension) {
        printf(", peak ");
        print_size(device->peak);
    }
    if (device->residual != 0) {
        printf(", uncounted ");
        print_size(device->residual);
    }
    if (device->oversubscribed != 0) {
        printf(", managed ");
        print_size(device->oversubscribed);
    }
    uint64_t set_to = file->extension ? tool_sm_limit(file, d) : 0;
    printf("\n  core limit ");
    if (about.core_limit != 0)
        printf("%" PRIu64 " %% (%s)", about.core_limit, about.core_from);
    else if (set_to > 0 && set_to < VG_SM_LIMIT_NONE)
        printf("%" PRIu64 " %%, not in force", set_to);
    else
        printf("none");
    printf(", throttled %.1f s in all, %u %% of the last minute\n  refused %" PRIu64 " times",
           (double)device->throttled / 1e9, about.throttled_percent, (uint64_t)device->refusals);
    if (about.last_refusal != NULL) {
        char when[32];
        time_t seconds = (time_t)(about.last_refusal->time / 1000000000u);
        struct tm utc;
        gmtime_r(&seconds, &utc);
        strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &utc);
        printf(", last ");
        print_size(about.last_refusal->value);
        printf(" to process %d at %s", about.last_refusal->pid, when);
    }
    printf("\n");
}

static void explain_process(const struct tool_file *file, unsigned k) {
    struct tool_slot slot = tool_slot(file, k);
    const char *separator = "";
    bool any = false;
    printf("process %d: ", slot.pid);
    for (unsigned d = 0; d < file->devices; d++) {
        struct tool_usage used = tool_usage(file, k, d);
        if (used.total == 0 && used.nvml == 0)
            continue;
        printf("%sdevice %u ", any ? ", " : "", d);
        print_size(used.total);
        any = true;
    }
    printf("%s; host PID ", any ? "" : "no memory");
    if (slot.hostpid != 0)
        printf("%d", slot.hostpid);
    else
        printf("unknown");
    uint32_t flags = 0;
    if (file->extension) {
        const struct vg_ext_slot *extra = &tool_extension(file)->slots[k];
        char text[24];
        flags = extra->flags;
        printf(" (%s", name_of(host_pid_paths, COUNT(host_pid_paths), extra->host_pid_path, text));
        if (extra->broker_error != 0)
            printf(", broker: %s", strerror((int)extra->broker_error));
        printf(")");
    }
    printf("; ");
    for (unsigned i = 0; i < COUNT(slot_flags); i++) {
        if ((flags >> i & 1) == 0)
            continue;
        printf("%s%s", separator, slot_flags[i]);
        separator = ", ";
    }
    if (slot.status == VG_SLOT_SUSPENDED) {
        printf("%ssuspended", separator);
        separator = ", ";
    }
    if (!tool_live(file, k)) {
        printf("%sdead", separator);
        separator = ", ";
    }
    printf("%s\n", separator[0] == '\0' ? "not blocked" : "");
}

void tool_print_explanation(const struct tool_file *file, const struct tool_sources *sources) {
    struct tool_tail tail = tool_tail(file);
    uint64_t heartbeat = file->extension ? tool_extension(file)->heartbeat : 0;
    if (!file->extension)
        printf("This region has no block of our library: only its limits and sums can be told.\n");
    if (heartbeat == 0) {
        printf("monitor: no monitor of ours has written here");
    } else {
        int64_t age = (int64_t)(now_ns() / 1000000000u - heartbeat);
        printf("monitor: the monitor's heartbeat is %" PRId64 " s old%s", age,
               age > STALE_HEARTBEAT_S ? ", its blocks are not obeyed" : "");
    }
    printf("%s; priority %d (0 is high)\n",
           tail.recent_kernel < 0 ? ", launches are BLOCKED by a container of higher priority" : "",
           tail.priority);
    for (unsigned d = 0; d < file->devices; d++)
        explain_device(file, d, sources);
    for (unsigned k = 0; k < file->slots; k++)
        if (tool_slot(file, k).status != VG_SLOT_FREE)
            explain_process(file, k);
}

/* ---- the table ---- */

static const char *version_of(const struct tool_file *file, char text[24]) {
    if (file->v1)
        snprintf(text, 24, "v1.%u", file->minor);
    else
        snprintf(text, 24, "v0");
    return text;
}

void tool_print_table(const struct tool_file *file) {
    struct tool_tail tail = tool_tail(file);
    char version[24], uuid[VG_UUID_LENGTH + 1], status[24];
    printf("%s, %zu bytes, %s our block, switch %d, activity %d, priority %d\n", version_of(file, version),
           file->length, file->extension ? "with" : "without", tail.utilization_switch, tail.recent_kernel,
           tail.priority);
    for (unsigned d = 0; d < file->devices; d++) {
        tool_uuid(file, d, uuid);
        printf("device %u %s: limit %" PRIu64 " bytes, cores %" PRIu64 " %%, used %" PRIu64 "\n", d, uuid,
               tool_limit(file, d), tool_sm_limit(file, d), used_on(file, d));
    }
    printf("%4s %10s %10s %-10s %-5s BYTES BY DEVICE\n", "SLOT", "PID", "HOST PID", "STATUS", "LIVE");
    for (unsigned k = 0; k < file->slots; k++) {
        struct tool_slot slot = tool_slot(file, k);
        if (slot.status == VG_SLOT_FREE)
            continue;
        bool any = false;
        printf("%4u %10d %10d %-10s %-5s", k, slot.pid, slot.hostpid, status_name(slot.status, status),
               tool_live(file, k) ? "yes" : "no");
        for (unsigned d = 0; d < file->devices; d++) {
            struct tool_usage used = tool_usage(file, k, d);
            if (used.total == 0 && used.nvml == 0)
                continue;
            printf(" %u:%" PRIu64, d, used.total);
            any = true;
        }
        printf("%s\n", any ? "" : " -");
    }
}

/* ---- JSON ---- */

static void json_number(const char *name, uint64_t value) {
    printf(", \"%s\": %" PRIu64, name, value);
}

static void json_device(const struct tool_file *file, unsigned d) {
    char uuid[VG_UUID_LENGTH + 1];
    tool_uuid(file, d, uuid);
    printf("%s{\"index\": %u, \"uuid\": \"%s\"", d > 0 ? ", " : "", d, uuid);
    json_number("limit", tool_limit(file, d));
    json_number("sm_limit", tool_sm_limit(file, d));
    json_number("used", used_on(file, d));
    if (file->extension) {
        const struct vg_ext_device *device = &tool_extension(file)->devices[d];
        json_number("memory_limit", device->memory_limit);
        json_number("core_limit", device->core_limit);
        json_number("peak", device->peak);
        json_number("residual", device->residual);
        json_number("oversubscribed", device->oversubscribed);
        json_number("refusals", device->refusals);
        json_number("launches", device->launches);
        json_number("throttled", device->throttled);
        json_number("forgiven", device->forgiven);
    }
    printf("}");
}

static void json_process(const struct tool_file *file, unsigned k, bool first) {
    struct tool_slot slot = tool_slot(file, k);
    char text[24];
    bool any = false;
    printf("%s{\"slot\": %u, \"pid\": %d, \"hostpid\": %d, \"status\": \"%s\", \"live\": %s, \"devices\": [",
           first ? "" : ", ", k, slot.pid, slot.hostpid, status_name(slot.status, text),
           tool_live(file, k) ? "true" : "false");
    for (unsigned d = 0; d < file->devices; d++) {
        struct tool_usage used = tool_usage(file, k, d);
        if (used.total == 0 && used.nvml == 0)
            continue;
        printf("%s{\"index\": %u", any ? ", " : "", d);
        json_number("context", used.context);
        json_number("module", used.module);
        json_number("data", used.data);
        json_number("total", used.total);
        json_number("nvml", used.nvml);
        json_number("sm", used.sm);
        printf("}");
        any = true;
    }
    printf("]");
    if (file->extension) {
        const struct vg_ext_slot *extra = &tool_extension(file)->slots[k];
        const char *separator = "";
        printf(", \"host_pid_path\": \"%s\"",
               name_of(host_pid_paths, COUNT(host_pid_paths), extra->host_pid_path, text));
        json_number("broker_error", extra->broker_error);
        printf(", \"state\": [");
        for (unsigned i = 0; i < COUNT(slot_flags); i++) {
            if ((extra->flags >> i & 1) == 0)
                continue;
            printf("%s\"%s\"", separator, slot_flags[i]);
            separator = ", ";
        }
        printf("]");
        json_number("throttled", extra->throttled);
        json_number("refusals", extra->refusals);
    }
    printf("}");
}

static void json_events(const struct tool_file *file) {
    const char *separator = "";
    for (uint64_t n = first_event(file), end = tool_extension(file)->next_event; n < end; n++) {
        const struct vg_ext_event *event = event_at(file, n);
        char text[24];
        if (event == NULL)
            continue;
        printf("%s{\"time\": %" PRIu64 ", \"type\": \"%s\", \"device\": %d, \"pid\": %d, \"value\": %" PRIu64
               "}",
               separator, (uint64_t)event->time, name_of(event_names, COUNT(event_names), event->type, text),
               event->device == 255 ? -1 : event->device, event->pid, (uint64_t)event->value);
        separator = ", ";
    }
}

static void json_explanation(const struct tool_file *file, const struct tool_sources *sources) {
    uint64_t heartbeat = file->extension ? tool_extension(file)->heartbeat : 0;
    printf(", \"explain\": {\"heartbeat_age_s\": ");
    if (heartbeat != 0)
        printf("%" PRId64, (int64_t)(now_ns() / 1000000000u - heartbeat));
    else
        printf("null");
    printf(", \"devices\": [");
    for (unsigned d = 0; d < file->devices; d++) {
        struct explained about = explain(file, d, sources);
        printf("%s{\"index\": %u", d > 0 ? ", " : "", d);
        json_number("memory_limit", about.memory_limit);
        printf(", \"memory_limit_from\": \"%s\"", about.memory_from);
        json_number("core_limit", about.core_limit);
        printf(", \"core_limit_from\": \"%s\"", about.core_from);
        json_number("throttled_of_last_minute_percent", about.throttled_percent);
        printf(", \"last_refusal\": ");
        if (about.last_refusal != NULL)
            printf("{\"time\": %" PRIu64 ", \"value\": %" PRIu64 ", \"pid\": %d}}",
                   (uint64_t)about.last_refusal->time, (uint64_t)about.last_refusal->value,
                   about.last_refusal->pid);
        else
            printf("null}");
    }
    printf("]}");
}

void tool_print_json(const struct tool_file *file, const struct tool_sources *sources, bool explain,
                     const int repaired[2]) {
    struct tool_tail tail = tool_tail(file);
    char version[24];
    bool first = true;
    printf(
        "{\"version\": \"%s\", \"bytes\": %zu, \"extension\": %s, \"priority\": %d, \"recent_kernel\": %d, "
        "\"utilization_switch\": %d",
        version_of(file, version), file->length, file->extension ? "true" : "false", tail.priority,
        tail.recent_kernel, tail.utilization_switch);
    json_number("last_kernel_time", tail.last_kernel_time);
    json_number("heartbeat", file->extension ? tool_extension(file)->heartbeat : 0);
    json_number("tick", file->extension ? tool_extension(file)->tick : 0);
    json_number("slots", file->slots);
    printf(", \"devices\": [");
    for (unsigned d = 0; d < file->devices; d++)
        json_device(file, d);
    printf("], \"processes\": [");
    for (unsigned k = 0; k < file->slots; k++) {
        if (tool_slot(file, k).status == VG_SLOT_FREE)
            continue;
        json_process(file, k, first);
        first = false;
    }
    printf("], \"events\": [");
    if (file->extension)
        json_events(file);
    printf("]");
    if (repaired != NULL)
        printf(", \"repaired\": {\"slots_cleared\": %d, \"flags_cleared\": %d}", repaired[0], repaired[1]);
    if (explain)
        json_explanation(file, sources);
    printf("}\n");
}
