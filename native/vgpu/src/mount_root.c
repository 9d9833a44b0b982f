#define _GNU_SOURCE
#include "mount_root.h"

#include "size.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef STATX_ATTR_MOUNT_ROOT
#define STATX_ATTR_MOUNT_ROOT 0x00002000
#endif

static ssize_t read_small(const char *path, char *out, size_t length) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t got = read(fd, out, length - 1);
    close(fd);
    out[got > 0 ? got : 0] = '\0';
    return got;
}

uid_t vg_overflow_uid(void) {
    char text[32];
    long value = 65534;
    if (read_small("/proc/sys/kernel/overflowuid", text, sizeof text) > 0) {
        text[strcspn(text, "\n")] = '\0';
        vg_parse_integer(text, 0, 4294967295L, &value);
    }
    return (uid_t)value;
}

/* Before Linux 5.8: the path has a line of its own in mountinfo (fifth field). */
static bool named_in_mountinfo(const char *path) {
    int fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    char buffer[4096], word[4096];
    size_t used = 0;
    int field = 0;
    bool found = false;
    for (ssize_t got; !found && (got = read(fd, buffer, sizeof buffer)) > 0;) {
        for (ssize_t i = 0; i < got && !found; i++) {
            char c = buffer[i];
            if (c != ' ' && c != '\n') {
                if (used < sizeof word - 1)
                    word[used++] = c;
                continue;
            }
            word[used] = '\0';
            used = 0;
            found = ++field == 5 && strcmp(word, path) == 0;
            if (c == '\n')
                field = 0;
        }
    }
    close(fd);
    return found;
}

bool vg_is_mount_root(int fd, const char *path) {
    struct statx info;
    memset(&info, 0, sizeof info);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &info) == 0 &&
        (info.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
        return (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
    return named_in_mountinfo(path);
}
