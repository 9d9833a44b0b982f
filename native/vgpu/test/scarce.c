/* A preload: the first open of the limits file fails for want of a descriptor, as another thread can bring
 * about. */
#define _GNU_SOURCE
#include "preload_open.h"

#include <errno.h>

__attribute__((visibility("default"))) int open(const char *path, int flags, ...) {
    static int refused;
    if (!refused && strcmp(path, "/overrideEnv") == 0) {
        refused = 1;
        errno = EMFILE;
        return -1;
    }
    va_list more;
    va_start(more, flags);
    int fd = really_open(path, flags, more);
    va_end(more);
    return fd;
}
