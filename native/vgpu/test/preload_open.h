/* For preloads that stand in for open(): the call itself, and which files are regions. */
#ifndef VGPU_TEST_PRELOAD_OPEN_H
#define VGPU_TEST_PRELOAD_OPEN_H

#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline int really_open(const char *path, int flags, va_list more) {
    int mode = flags & O_CREAT ? va_arg(more, int) : 0;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static inline int is_region(const char *path) {
    size_t length = strlen(path);
    return length >= 6 && strcmp(path + length - 6, ".cache") == 0;
}

#endif
