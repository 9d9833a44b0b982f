#define _GNU_SOURCE
#include "log.h"

#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LINES_PER_SECOND = 10, LINE_LENGTH = 512 };

static _Atomic int threshold = VG_LOG_ERROR;
static _Atomic int descriptor = STDERR_FILENO;
static _Atomic bool identified;
static dev_t device;
static ino_t inode;

/* -1: something else is in its place, which could keep the program waiting. */
static int open_file(const char *path) {
    struct stat st;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0644);
    if (fd >= 0 && (fstat(fd, &st) != 0 || (!S_ISREG(st.st_mode) && !S_ISCHR(st.st_mode)))) {
        close(fd);
        return -1;
    }
    return fd;
}

void vg_log_configure(int level, const char *file) {
    atomic_store(&threshold, level);
    if (atomic_load(&descriptor) != STDERR_FILENO)
        return;
    struct stat st = {0};
    int fd = file != NULL && file[0] != '\0' ? open_file(file) : -1;
    if (fd < 0)
        fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 200);
    if (fd < 0) /* all numbers from there on are out of reach */
        fd = STDERR_FILENO;
    fstat(fd, &st); /* of a descriptor that is not open nothing is known, and nothing is written to it */
    device = st.st_dev;
    inode = st.st_ino;
    atomic_store(&descriptor, fd);
    atomic_store(&identified, true);
}

int vg_log_enabled(enum vg_log_level level) {
    return (int)level <= atomic_load_explicit(&threshold, memory_order_relaxed);
}

/* The number of lines left out before this one, or -1: leave this one out too. */
static int admit_line(struct vg_log_site *site) {
    uint64_t second = vg_clock(CLOCK_MONOTONIC_COARSE) / 1000000000u;
    if (atomic_exchange(&site->second, second) != second)
        atomic_store(&site->lines, 0);
    if (atomic_fetch_add(&site->lines, 1) < LINES_PER_SECOND)
        return (int)atomic_exchange(&site->suppressed, 0);
    atomic_fetch_add(&site->suppressed, 1);
    return -1;
}

/* The program may have closed our descriptor and opened a file of its own under the same number. */
static bool still_ours(int fd) {
    struct stat st;
    return !atomic_load(&identified) || (fstat(fd, &st) == 0 && st.st_dev == device && st.st_ino == inode);
}

/* Neither a full pipe, which would keep the program waiting, nor one that nobody reads any more, which would
 * end it. */
static bool takes_a_line(int fd) {
    struct pollfd polled = {.fd = fd, .events = POLLOUT};
    return poll(&polled, 1, 0) == 1 && polled.revents == POLLOUT;
}

void vg_log_line(struct vg_log_site *site, enum vg_log_level level, const char *format, ...) {
    static const char *const names[] = {"", "ERROR", "Warn", "Info", "Debug"};
    int saved = errno, left_out = admit_line(site), fd = atomic_load(&descriptor);
    if (left_out >= 0 && still_ours(fd) && takes_a_line(fd)) {
        char line[LINE_LENGTH];
        int used = snprintf(line, sizeof line, "[HAMI-core %s(%d:%ld)]: ", names[level], (int)getpid(),
                            (long)syscall(SYS_gettid));
        va_list arguments;
        va_start(arguments, format);
        used += vsnprintf(line + used, sizeof line - (size_t)used, format, arguments);
        va_end(arguments);
        if (used > (int)sizeof line - 40)
            used = (int)sizeof line - 40;
        if (left_out > 0)
            used += snprintf(line + used, sizeof line - (size_t)used, " (suppressed %d)", left_out);
        line[used++] = '\n';
        ssize_t written = write(fd, line, (size_t)used);
        (void)written;
    }
    errno = saved;
}
