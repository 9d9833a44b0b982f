#define _GNU_SOURCE
#include "discover.h"

#include "elf_walk.h"
#include "region_abi.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_region(int directory, const char *name) {
    size_t length = strlen(name);
    int32_t magic = 0;
    struct stat st;
    if (length <= 6 || strcmp(name + length - 6, ".cache") != 0)
        return false;
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool found = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= VG_V1_MIN_LENGTH &&
                 read(fd, &magic, sizeof magic) == sizeof magic && magic == VG_MAGIC;
    close(fd);
    return found;
}

bool vg_discover_region(const void *address, char *path, size_t length) {
    const char *own = vg_object_path(address), *slash = own != NULL ? strrchr(own, '/') : NULL;
    char folder[4096];
    if (slash == NULL || slash == own || (size_t)(slash - own) >= sizeof folder)
        return false;
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - own), own);
    DIR *directory = opendir(folder);
    if (directory == NULL)
        return false;
    unsigned found = 0;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (is_region(dirfd(directory), entry->d_name) && ++found == 1 &&
            (size_t)snprintf(path, length, "%s/%s", folder, entry->d_name) >= length)
            found = 2;
    closedir(directory);
    return found == 1;
}
