/* Preloaded before libvgpu.so: writes one line to the file VGPU_CALLS for each flock, "flock PATH", and for
 * each lock on a byte of a file, "byte OFFSET". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *text) {
    const char *path = getenv("VGPU_CALLS");
    int fd = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (fd < 0)
        return;
    ssize_t written = write(fd, text, strlen(text));
    (void)written;
    close(fd);
}

__attribute__((visibility("default"))) int flock(int fd, int operation) {
    static int (*next)(int, int);
    char link[64], path[256], line[320];
    if (next == NULL)
        next = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    snprintf(line, sizeof line, "flock %s\n", path);
    note(line);
    return next(fd, operation);
}

__attribute__((visibility("default"))) int fcntl(int fd, int command, ...) {
    static int (*next)(int, int, void *);
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (next == NULL)
        next = (int (*)(int, int, void *))dlsym(RTLD_NEXT, "fcntl");
    if (command == F_OFD_SETLK && ((struct flock *)argument)->l_type != F_UNLCK) {
        char line[64];
        snprintf(line, sizeof line, "byte %lld\n", (long long)((struct flock *)argument)->l_start);
        note(line);
    }
    return next(fd, command, argument);
}
