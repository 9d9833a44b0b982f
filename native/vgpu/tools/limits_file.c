#define _GNU_SOURCE
#include "limits_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* X/limits/NAME for a file in X/containers/NAME; false if it is in no such directory. */
static bool path_of(const char *region, char out[PATH_MAX + 16]) {
    char copy[PATH_MAX], directory[PATH_MAX];
    const char *slash = strrchr(region, '/');
    size_t length = slash == NULL ? 1 : slash == region ? 1 : (size_t)(slash - region);
    if (length >= sizeof copy)
        return false;
    memcpy(copy, slash == NULL ? "." : region, length);
    copy[length] = '\0';
    if (realpath(copy, directory) == NULL)
        return false;
    char *name = strrchr(directory, '/');
    *name++ = '\0';
    char *parent = strrchr(directory, '/');
    if (parent == NULL || strcmp(parent + 1, "containers") != 0)
        return false;
    *parent = '\0';
    snprintf(out, PATH_MAX + 16, "%s/limits/%s", directory, name);
    return true;
}

bool tool_limits_on_node(struct vg_config *config, const char *region) {
    static char path[PATH_MAX + 16], text[VG_LIMITS_FILE_LENGTH + 2]; /* too large for a stack */
    static struct vg_pairs pairs;
    struct stat st;
    if (!path_of(region, path))
        return true;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return true;
    ssize_t got = -1;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
        got = pread(fd, text, sizeof text - 1, 0);
    if (fd >= 0)
        close(fd);
    if (got < 0 || got > VG_LIMITS_FILE_LENGTH) {
        fprintf(stderr, "vgpu-region: %s: is no limits file that can be read\n", path);
        return false;
    }
    text[got] = '\0';
    vg_pairs_parse(&pairs, text);
    vg_config_build(config, vg_pairs_get, &pairs);
    config->from_file = true;
    return true;
}
