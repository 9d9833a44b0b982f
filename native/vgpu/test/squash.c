/* A preload: on the mount with the regions all files belong to somebody else, as on NFS with all_squash. The
 * kernel makes a new file first and then refuses O_NOATIME, which only the owner may ask for. */
#define _GNU_SOURCE
#include "preload_open.h"

#include <errno.h>

__attribute__((visibility("default"))) int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int fd = really_open(path, flags & ~O_NOATIME, more);
    va_end(more);
    if (fd < 0 || (flags & O_NOATIME) == 0 || !is_region(path))
        return fd;
    close(fd);
    errno = EPERM;
    return -1;
}
