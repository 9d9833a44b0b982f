#define _GNU_SOURCE
#include "node_lock.h"

#include "lock.h"
#include "log.h"
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const uint64_t first_pause_ns = 1000000u, longest_pause_ns = 100000000u;
static _Atomic int held; /* descriptor + 1 */

static bool safe_component(int fd, bool last) {
    struct stat st;
    struct statvfs mount;
    if (fstat(fd, &st) != 0 || st.st_uid != 0)
        return false;
    bool others_write = (st.st_mode & (S_IWGRP | S_IWOTH)) != 0;
    if (!last)
        return !others_write || (st.st_mode & S_ISVTX) != 0;
    return !others_write && fstatvfs(fd, &mount) == 0 && (mount.f_flag & ST_RDONLY) != 0;
}

/* Component by component, without following a symbolic link. The last one is opened for the lock. */
static int open_directory(void) {
    static const char *const names[] = {"tmp", "vgpulock", "hostpid"};
    enum { COUNT = sizeof names / sizeof names[0] };
    int at = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; at >= 0 && i < COUNT; i++) {
        bool last = i == COUNT - 1;
        int next = openat(at, names[i],
                          (last ? O_RDONLY | O_NONBLOCK : O_PATH) | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(at);
        at = next;
        if (at >= 0 && !safe_component(at, last)) {
            close(at);
            at = -1;
        }
    }
    return at;
}

static bool still_there(int fd) {
    struct stat locked, found;
    int again = open_directory();
    bool same = again >= 0 && fstat(fd, &locked) == 0 && fstat(again, &found) == 0 &&
                locked.st_dev == found.st_dev && locked.st_ino == found.st_ino;
    if (again >= 0)
        close(again);
    return same;
}

static int open_tracked(void) {
    vg_forks_hold();
    int fd = open_directory();
    atomic_store(&held, fd + 1);
    vg_forks_allow();
    return fd;
}

int vg_node_lock_take(uint64_t deadline) {
    int fd = open_tracked();
    if (fd < 0)
        return -1;
    bool granted = false, waiting = true;
    for (uint64_t pause = first_pause_ns; waiting && !granted;) {
        granted = flock(fd, LOCK_EX | LOCK_NB) == 0;
        uint64_t now = vg_now();
        waiting = !granted && (errno == EWOULDBLOCK || errno == EINTR) && now < deadline;
        if (waiting)
            vg_pause_ns(pause < deadline - now ? pause : deadline - now);
        pause = pause * 2 < longest_pause_ns ? pause * 2 : longest_pause_ns;
    }
    if (granted && still_there(fd))
        return fd;
    VG_INFO("the node's lock for finding host PIDs was not granted");
    vg_node_lock_drop(fd);
    return -1;
}

void vg_node_lock_drop(int fd) {
    if (fd < 0)
        return;
    vg_forks_hold();
    atomic_store(&held, 0);
    flock(fd, LOCK_UN);
    close(fd);
    vg_forks_allow();
}

void vg_node_lock_after_fork_child(void) {
    int fd = atomic_exchange(&held, 0) - 1;
    if (fd >= 0)
        close(fd);
}
