/* What only the host can make: mounts. */
#ifndef VGPU_MOUNT_ROOT_H
#define VGPU_MOUNT_ROOT_H

#include <stdbool.h>
#include <sys/types.h>

/* The uid that root of another user namespace appears as. */
uid_t vg_overflow_uid(void);

/* True if the descriptor, opened at `path`, is the root of a mount. */
bool vg_is_mount_root(int fd, const char *path);

#endif
