#define _GNU_SOURCE
#include "lock.h"

#include "log.h"
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_DONTFORK
#define MADV_DONTFORK 10
#endif

enum { MAX_KEPT = 4, PAGE = 4096 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool no_ofd, missed;
static int kept[MAX_KEPT]; /* descriptor + 1 */
static int cancel_state;   /* of the thread that has the mutex */
static _Thread_local unsigned
    held; /* a handler of a signal that forks may find the mutex with its own thread */

/* A thread that is cancelled does not end with the mutex, nor with a lock of the container. */
static void hold(void) {
    int before;
    if (held++ != 0)
        return;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    pthread_mutex_lock(&mutex);
    cancel_state = before;
}

static void allow(void) {
    int before = cancel_state;
    if (held == 0 || --held != 0)
        return;
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(before, NULL);
}

int vg_open_to_map(const char *path, int flags) {
    static _Atomic bool refused;
    if (!atomic_load_explicit(&refused, memory_order_relaxed)) {
        int fd = open(path, flags | O_NOATIME);
        if (fd >= 0 || errno != EPERM)
            return fd;
        atomic_store(&refused, true);
    }
    return open(path, flags);
}

static int open_checked(const struct vg_lock_file *file) {
    int fd = vg_open_to_map(file->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st;
    if (fd >= 0 && (fstat(fd, &st) != 0 || st.st_dev != file->device || st.st_ino != file->inode)) {
        close(fd);
        fd = -1;
    }
    if (fd < 0)
        atomic_store(&missed, true);
    return fd;
}

static int set_lock(int fd, off_t byte, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    if (!atomic_load_explicit(&no_ofd, memory_order_relaxed)) {
        if (fcntl(fd, F_OFD_SETLK, &lock) == 0)
            return 0;
        if (errno != EINVAL && errno != ENOSYS && errno != ENOLCK)
            return -1;
        if (!atomic_exchange(&no_ofd, true))
            VG_WARN("no open-file-description locks here: memory of killed processes stays counted");
    }
    return fcntl(fd, F_SETLK, &lock);
}

static bool would_block(int error) {
    return error == EAGAIN || error == EACCES || error == EINTR;
}

bool vg_lock_missed(void) {
    return atomic_load_explicit(&missed, memory_order_relaxed) && atomic_exchange(&missed, false);
}

bool vg_lock_lives(void) {
    return !atomic_load(&no_ofd);
}

enum vg_lock_result vg_section_try(struct vg_section *section, const struct vg_lock_file *file, off_t byte) {
    *section = (struct vg_section){.file = file, .fd = -1, .byte = byte};
    hold();
    if (file->path == NULL)
        return VG_LOCK_GRANTED;
    section->fd = open_checked(file);
    if (section->fd < 0) {
        allow();
        return VG_LOCK_FAILED;
    }
    if (set_lock(section->fd, byte, F_WRLCK) == 0)
        return VG_LOCK_GRANTED;
    enum vg_lock_result result = would_block(errno) ? VG_LOCK_BUSY : VG_LOCK_FAILED;
    close(section->fd);
    allow();
    return result;
}

enum vg_lock_result vg_section_enter(struct vg_section *section, const struct vg_lock_file *file, off_t byte,
                                     uint64_t deadline) {
    for (uint64_t pause = 50000;; pause = pause < 2500000 ? pause * 2 : 5000000) {
        enum vg_lock_result result = vg_section_try(section, file, byte);
        if (result != VG_LOCK_BUSY || vg_now() >= deadline)
            return result;
        vg_pause_ns(pause / 2 + vg_now() % (pause / 2));
    }
}

void vg_section_leave(struct vg_section *section) {
    if (section->fd >= 0) {
        set_lock(section->fd, section->byte, F_UNLCK);
        close(section->fd);
    }
    allow();
}

bool vg_section_take(struct vg_section *section, off_t byte) {
    return section->fd >= 0 && vg_lock_lives() && set_lock(section->fd, byte, F_WRLCK) == 0;
}

void vg_section_drop(struct vg_section *section, off_t byte) {
    set_lock(section->fd, byte, F_UNLCK);
}

static bool free_through(int fd, off_t byte) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool vg_seen_held(const struct vg_lock_file *file, off_t byte) {
    return file->look != 0 && !free_through(file->look - 1, byte);
}

/* Asked through another description: is the byte still locked after our descriptor was closed? */
static bool still_locked(const struct vg_lock_file *file, off_t byte) {
    if (file->look != 0)
        return vg_seen_held(file, byte);
    int fd = open_checked(file);
    if (fd < 0)
        return true;
    bool locked = !free_through(fd, byte);
    close(fd);
    return locked;
}

/* The mapping did not keep the lock: keep a descriptor, at a number that programs rarely touch. */
static enum vg_lock_result keep_descriptor(struct vg_long_lock *lock, const struct vg_lock_file *file,
                                           off_t byte) {
    struct rlimit limit;
    int low = 900;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / 2 < (rlim_t)low)
        low = (int)(limit.rlim_cur / 2);
    int fd = open_checked(file);
    if (fd < 0)
        return VG_LOCK_FAILED;
    bool locked = set_lock(fd, byte, F_WRLCK) == 0;
    if (locked)
        lock->kept_fd = fcntl(fd, F_DUPFD_CLOEXEC, low);
    close(fd);
    if (lock->kept_fd < 0)
        return locked ? VG_LOCK_FAILED : VG_LOCK_BUSY;
    for (int i = 0; i < MAX_KEPT; i++) {
        if (kept[i] == 0) {
            kept[i] = lock->kept_fd + 1;
            break;
        }
    }
    return VG_LOCK_GRANTED;
}

static enum vg_lock_result take_locked(struct vg_long_lock *lock, const struct vg_lock_file *file,
                                       off_t byte) {
    int fd = open_checked(file);
    if (fd < 0)
        return VG_LOCK_FAILED;
    enum vg_lock_result result = VG_LOCK_FAILED;
    if (set_lock(fd, byte, F_WRLCK) != 0) {
        result = would_block(errno) ? VG_LOCK_BUSY : VG_LOCK_FAILED;
    } else if (vg_lock_lives()) {
        lock->page = mmap(NULL, PAGE, PROT_NONE, MAP_SHARED, fd, 0);
        if (lock->page != MAP_FAILED && madvise(lock->page, PAGE, MADV_DONTFORK) == 0)
            result = VG_LOCK_GRANTED;
    }
    close(fd);
    if (result == VG_LOCK_GRANTED && !still_locked(file, byte))
        result = keep_descriptor(lock, file, byte);
    return result;
}

enum vg_lock_result vg_long_lock_take(struct vg_long_lock *lock, const struct vg_lock_file *file,
                                      off_t byte) {
    *lock = (struct vg_long_lock){.page = MAP_FAILED, .kept_fd = -1};
    if (file->path == NULL)
        return VG_LOCK_GRANTED;
    hold();
    enum vg_lock_result result = take_locked(lock, file, byte);
    if (result != VG_LOCK_GRANTED && lock->page != MAP_FAILED)
        munmap(lock->page, PAGE);
    allow();
    return result;
}

void vg_long_lock_drop(struct vg_long_lock *lock) {
    hold();
    for (int i = 0; i < MAX_KEPT; i++)
        if (lock->kept_fd >= 0 && kept[i] == lock->kept_fd + 1)
            kept[i] = 0;
    if (lock->kept_fd >= 0)
        close(lock->kept_fd);
    if (lock->page != MAP_FAILED)
        munmap(lock->page, PAGE);
    *lock = (struct vg_long_lock){.page = MAP_FAILED, .kept_fd = -1};
    allow();
}

void vg_forks_hold(void) {
    hold();
}

void vg_forks_allow(void) {
    allow();
}

void vg_lock_before_fork(void) {
    hold();
}

void vg_lock_after_fork_parent(void) {
    allow();
}

void vg_lock_after_fork_child(void) {
    for (int i = 0; i < MAX_KEPT; i++) {
        if (kept[i] != 0)
            close(kept[i] - 1);
        kept[i] = 0;
    }
    held = 0;
    pthread_mutex_init(&mutex, NULL);
    pthread_setcancelstate(cancel_state, NULL);
}
