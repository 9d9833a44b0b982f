/* Where the configuration comes from: the limits file if it can be trusted, else the environment. */
#define _GNU_SOURCE
#include "config.h"
#include "log.h"
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "mount_root.h"

/* Redirected by a test build only. */
#ifndef VG_LIMITS_FILE
#define VG_LIMITS_FILE "/overrideEnv"
#endif

enum { ENVIRON_LENGTH = 262144 };

struct source {
    const struct vg_pairs *file;
    bool secure;
};

/* What was read last, to notice a change. */
static struct {
    bool known;
    off_t size;
    struct timespec modified, changed;
} seen;

static char *trim(char *start) {
    while (*start == ' ' || *start == '\t' || *start == '\r')
        start++;
    size_t length = strlen(start);
    while (length > 0 && (start[length - 1] == ' ' || start[length - 1] == '\t' || start[length - 1] == '\r'))
        start[--length] = '\0';
    return start;
}

void vg_pairs_parse(struct vg_pairs *pairs, char *text) {
    pairs->count = 0;
    char *rest = text;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
        line = trim(line);
        if (*line == '\0' || *line == '#')
            continue;
        char *equals = strchr(line, '=');
        if (equals == NULL || equals == line ||
            pairs->count == sizeof pairs->pairs / sizeof pairs->pairs[0]) {
            VG_WARN("limits file: a line is malformed and is skipped");
            continue;
        }
        *equals = '\0';
        pairs->pairs[pairs->count].key = trim(line);
        pairs->pairs[pairs->count++].value = trim(equals + 1);
    }
}

const char *vg_pairs_get(const void *source, const char *name) {
    const struct vg_pairs *pairs = source;
    for (unsigned i = pairs->count; i > 0; i--)
        if (strcmp(pairs->pairs[i - 1].key, name) == 0)
            return pairs->pairs[i - 1].value;
    return NULL;
}

static bool is_log_key(const char *name) {
    return strcmp(name, "LIBCUDA_LOG_LEVEL") == 0 || strcmp(name, "VGPU_LOG_FILE") == 0;
}

static const char *look_up(const void *context, const char *name) {
    const struct source *source = context;
    const char *environment = source->secure ? NULL : getenv(name);
    if (source->file == NULL)
        return environment;
    if (is_log_key(name) && environment != NULL)
        return environment;
    const char *value = vg_pairs_get(source->file, name);
    /* A file of an older plugin says nothing about the broker; the environment does. */
    return value == NULL && strcmp(name, "LIBVGPU_HOSTPID_BROKER") == 0 ? environment : value;
}

/* Why the descriptor is no limits file of the host, or NULL if it is one. */
static const char *distrust(int fd, const struct stat *st) {
    struct statvfs fs;
    if (!S_ISREG(st->st_mode))
        return "is no regular file";
    if (st->st_uid != 0 && st->st_uid != vg_overflow_uid())
        return "is not owned by root";
    if (!vg_is_mount_root(fd, VG_LIMITS_FILE))
        return "is not a mount of its own";
    if (fstatvfs(fd, &fs) != 0 || (fs.f_flag & ST_RDONLY) == 0)
        return "is not mounted read-only";
    return NULL;
}

static size_t read_all(int fd, char *text, size_t length) {
    size_t used = 0;
    for (ssize_t got; used < length && (got = read(fd, text + used, length - used)) > 0;)
        used += (size_t)got;
    return used;
}

/* The trusted text, NUL-terminated, in a mapping of VG_LIMITS_FILE_LENGTH + 1 bytes; NULL: there is none, or
 * with `*later` nobody can tell. */
static char *read_limits_file(struct stat *st, bool *later) {
    int fd = open(VG_LIMITS_FILE, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    *later = fd < 0 && vg_exhausted(errno);
    if (fd < 0) {
        if (errno != ENOENT)
            VG_WARN("%s cannot be opened (errno %d) and is ignored", VG_LIMITS_FILE, errno);
        return NULL;
    }
    char *text = NULL;
    errno = 0;
    const char *reason = fstat(fd, st) != 0 ? "cannot be read" : distrust(fd, st);
    *later = reason != NULL && vg_exhausted(errno);
    if (reason == NULL && st->st_size > VG_LIMITS_FILE_LENGTH)
        reason = "is larger than 64 KiB";
    if (reason == NULL) {
        text =
            mmap(NULL, VG_LIMITS_FILE_LENGTH + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (text == MAP_FAILED)
            text = NULL;
        *later = text == NULL;
        if (text != NULL)
            read_all(fd, text, VG_LIMITS_FILE_LENGTH);
    } else {
        VG_WARN("%s %s and is ignored", VG_LIMITS_FILE, reason);
    }
    close(fd);
    return text;
}

static void remember(const struct stat *st) {
    seen.known = true;
    seen.size = st->st_size;
    seen.modified = st->st_mtim;
    seen.changed = st->st_ctim;
}

static void build_from_file(struct vg_config *config, char *text) {
    struct vg_pairs pairs;
    vg_pairs_parse(&pairs, text);
    const char *format = vg_pairs_get(&pairs, "HAMI_LIMITS_FORMAT");
    if (format != NULL && strcmp(format, "1") != 0)
        VG_WARN("%s has format %.20s, read as 1", VG_LIMITS_FILE, format);
    struct source source = {.file = &pairs, .secure = getauxval(AT_SECURE) != 0};
    vg_config_build(config, look_up, &source);
    config->from_file = true;
}

static bool says_nothing(const struct vg_config *config, const struct source *environment) {
    for (int i = 0; i <= VG_CONFIG_ALL; i++)
        if (config->memory_set[i] || config->sm_set[i])
            return false;
    return look_up(environment, "CUDA_DEVICE_MEMORY_SHARED_CACHE") == NULL;
}

bool vg_config_load(struct vg_config *config) {
    struct source environment = {.file = NULL, .secure = getauxval(AT_SECURE) != 0};
    const char *level = look_up(&environment, "LIBCUDA_LOG_LEVEL");
    if (level != NULL && level[0] >= '0' && level[0] <= '4' && level[1] == '\0')
        vg_log_configure(level[0] - '0', look_up(&environment, "VGPU_LOG_FILE"));
    struct stat st;
    bool later;
    char *text = read_limits_file(&st, &later);
    if (text != NULL) {
        build_from_file(config, text);
        remember(&st);
        munmap(text, VG_LIMITS_FILE_LENGTH + 1);
    } else if (later) {
        return false;
    } else {
        vg_config_build(config, look_up, &environment);
        config->lost = says_nothing(config, &environment);
    }
    vg_log_configure(config->log_level, config->log_file);
    return true;
}

/* NUL-separated KEY=VALUE texts. */
struct environ {
    const char *text;
    size_t length;
};

static const char *look_up_in(const void *context, const char *name) {
    const struct environ *environ = context;
    size_t length = strlen(name);
    if (strncmp(name, "VGPU_", 5) == 0) /* choices of ours: for the environment that has them */
        return NULL;
    for (const char *p = environ->text; p < environ->text + environ->length; p += strlen(p) + 1)
        if (strncmp(p, name, length) == 0 && p[length] == '=')
            return p + length + 1;
    return NULL;
}

bool vg_config_load_of_init(struct vg_config *config) {
    int fd = open("/proc/1/environ", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return !vg_exhausted(errno);
    char *text = mmap(NULL, ENVIRON_LENGTH + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (text != MAP_FAILED) {
        struct environ environ = {.text = text, .length = read_all(fd, text, ENVIRON_LENGTH)};
        if (environ.length > 0) {
            vg_config_build(config, look_up_in, &environ);
            vg_log_configure(config->log_level, config->log_file);
        }
        munmap(text, ENVIRON_LENGTH + 1);
    }
    close(fd);
    return text != MAP_FAILED;
}

bool vg_config_refresh(struct vg_config *config) {
    struct stat st;
    bool later;
    if (!seen.known || stat(VG_LIMITS_FILE, &st) != 0)
        return false;
    if (st.st_size == seen.size && memcmp(&st.st_mtim, &seen.modified, sizeof seen.modified) == 0 &&
        memcmp(&st.st_ctim, &seen.changed, sizeof seen.changed) == 0)
        return false;
    bool shrank = later = st.st_size < seen.size; /* perhaps half written */
    remember(&st);
    char *text = shrank ? NULL : read_limits_file(&st, &later);
    if (later)
        seen.size = -1; /* it is looked at again a second later */
    if (text == NULL)
        return false;
    static struct vg_config fresh; /* too large for a stack; the caller serialises */
    build_from_file(&fresh, text);
    munmap(text, VG_LIMITS_FILE_LENGTH + 1);
    *config = fresh;
    return true;
}
