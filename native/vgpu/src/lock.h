/* Kernel-released locks on bytes far behind the data of the region file (open-file-description record locks).
 *
 * All of them run under one process mutex, which the fork handlers hold, so that no child inherits a
 * descriptor. */
#ifndef VGPU_LOCK_H
#define VGPU_LOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct vg_lock_file {
    const char *path; /* NULL: a private region, nothing is shared and every lock is granted */
    dev_t device;
    ino_t inode;
    int look; /* while a region is joined: an open descriptor of it plus one, to ask through; it holds no lock
               */
};

/* Opens a file to be mapped: for its owner without an access time, which each mapping would write to the
 * disk. */
int vg_open_to_map(const char *path, int flags);

enum vg_lock_result { VG_LOCK_GRANTED, VG_LOCK_BUSY, VG_LOCK_FAILED };

/* A section: one byte held, and the process mutex with it. */
struct vg_section {
    const struct vg_lock_file *file;
    int fd; /* -1: private region */
    off_t byte;
};

/* One try. Only GRANTED needs vg_section_leave. */
enum vg_lock_result vg_section_try(struct vg_section *section, const struct vg_lock_file *file, off_t byte);

/* Tries with growing pauses until the deadline (CLOCK_MONOTONIC ns). */
enum vg_lock_result vg_section_enter(struct vg_section *section, const struct vg_lock_file *file, off_t byte,
                                     uint64_t deadline);
void vg_section_leave(struct vg_section *section);

/* Inside a section: another byte, only ever tried. */
bool vg_section_take(struct vg_section *section, off_t byte);
void vg_section_drop(struct vg_section *section, off_t byte);

/* A lock that lives as long as this process image; kept without a descriptor where the file system allows. */
struct vg_long_lock {
    void *page;
    int kept_fd; /* -1 unless the mapping does not keep the lock (overlayfs) */
};

enum vg_lock_result vg_long_lock_take(struct vg_long_lock *lock, const struct vg_lock_file *file, off_t byte);
void vg_long_lock_drop(struct vg_long_lock *lock);

/* True if somebody is seen to hold the byte. False also where there is nothing open to ask through. */
bool vg_seen_held(const struct vg_lock_file *file, off_t byte);

/* False on kernels and file systems without open-file-description locks: then no slot is ever reclaimed. */
bool vg_lock_lives(void);

/* No fork of this process happens in between; whoever holds it does nothing that waits. */
void vg_forks_hold(void);
void vg_forks_allow(void);

/* True once after a lock could not be opened or led to another file: the region was perhaps replaced. */
bool vg_lock_missed(void);

/* Fork handlers; the child's copy of every long lock with a descriptor is closed. */
void vg_lock_before_fork(void);
void vg_lock_after_fork_parent(void);
void vg_lock_after_fork_child(void);

#endif
