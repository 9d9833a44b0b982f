#define _GNU_SOURCE
#include "region_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LARGEST = 16 << 20, MAX_MINOR = 9 };

static const char *cut_path;

static void say(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        _exit(1);
}

static void on_cut(int number) {
    (void)number;
    say("vgpu-region: ");
    say(cut_path);
    say(": somebody cut it while it was changed, and part of the change may be missing; look at it, and "
        "change it again\n");
    _exit(1);
}

void tool_expect_cuts(const char *path) {
    struct sigaction action = {.sa_handler = on_cut};
    cut_path = path;
    sigaction(SIGBUS, &action, NULL);
}

static void drop_data(struct tool_file *file) {
    if (file->data != MAP_FAILED)
        munmap(file->data, file->length);
    file->data = MAP_FAILED;
}

static bool wrong(struct tool_file *file, const char *why) {
    fprintf(stderr, "vgpu-region: %s: %s\n", file->path, why);
    tool_close(file);
    return false;
}

static unsigned at_most(uint64_t value, unsigned most) {
    return value > most ? most : (unsigned)value;
}

static bool recognise(struct tool_file *file) {
    int32_t magic;
    uint32_t major, minor;
    memcpy(&magic, file->data, sizeof magic);
    memcpy(&major, file->data + 4, sizeof major);
    memcpy(&minor, file->data + 8, sizeof minor);
    if (magic != VG_MAGIC)
        return wrong(file, "magic flag not matched");
    file->v1 = file->length >= VG_V1_MIN_LENGTH;
    if (file->v1 ? major != VG_MAJOR
                 : file->length < VG_V0_MIN_LENGTH || (major == VG_MAJOR && minor <= MAX_MINOR))
        return wrong(file, "no known region has this length and version");
    int32_t slots = file->v1 ? tool_region(file)->proc_num : tool_region_v0(file)->proc_num;
    file->minor = minor;
    file->devices = at_most(file->v1 ? tool_region(file)->device_count : tool_region_v0(file)->device_count,
                            VG_MAX_DEVICES);
    file->slots = slots < 0 ? 0 : at_most((uint64_t)slots, VG_MAX_SLOTS);
    const struct vg_extension *extension = tool_extension(file);
    file->extension = file->length >= VG_FILE_LENGTH && memcmp(extension->magic, "VGPUEXT1", 8) == 0 &&
                      extension->version == VG_EXTENSION_VERSION && extension->length == VG_EXTENSION_LENGTH;
    return true;
}

bool tool_open(struct tool_file *file, const char *path, bool write) {
    *file = (struct tool_file){.path = path, .data = MAP_FAILED};
    /* A container may have put anything there, and to open a device can start it. */
    struct stat st;
    char again[32];
    file->fd = open(path, O_PATH | O_CLOEXEC | O_NOFOLLOW);
    if (file->fd < 0)
        return wrong(file, strerror(errno));
    if (fstat(file->fd, &st) != 0 || !S_ISREG(st.st_mode))
        return wrong(file, "is not a regular file of a region's size");
    int place = file->fd;
    snprintf(again, sizeof again, "/proc/self/fd/%d", place);
    file->fd = open(again, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
    int error = errno;
    close(place);
    return file->fd < 0 ? wrong(file, strerror(error)) : tool_copy(file);
}

bool tool_copy(struct tool_file *file) {
    struct stat st;
    drop_data(file);
    if (fstat(file->fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > LARGEST)
        return wrong(file, "is not a regular file of a region's size");
    file->length = (size_t)st.st_size;
    if (file->length < 12)
        return wrong(file, "is too small for a region");
    file->data = mmap(NULL, file->length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (file->data == MAP_FAILED)
        return wrong(file, strerror(errno));
    if (pread(file->fd, file->data, file->length, 0) != (ssize_t)file->length)
        return wrong(file, "cannot be read");
    return recognise(file);
}

bool tool_map(struct tool_file *file) {
    struct stat st;
    if (fstat(file->fd, &st) != 0 || (size_t)st.st_size != file->length)
        return wrong(file, "its length changes, somebody else is at work on it");
    void *data = mmap(NULL, file->length, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
    if (data == MAP_FAILED)
        return wrong(file, strerror(errno));
    tool_expect_cuts(file->path);
    drop_data(file);
    file->data = data;
    return true;
}

void tool_close(struct tool_file *file) {
    drop_data(file);
    if (file->fd >= 0)
        close(file->fd);
    *file = (struct tool_file){.path = file->path, .fd = -1, .data = MAP_FAILED};
}

static struct flock one_byte(int64_t byte, short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
}

bool tool_live(const struct tool_file *file, unsigned slot) {
    struct flock lock = one_byte(VG_LOCK_SLOT + (int64_t)slot, F_WRLCK);
    return fcntl(file->fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool tool_lock(const struct tool_file *file, int64_t byte) {
    struct flock lock = one_byte(byte, F_WRLCK);
    return fcntl(file->fd, F_OFD_SETLK, &lock) == 0;
}

void tool_unlock(const struct tool_file *file, int64_t byte) {
    struct flock lock = one_byte(byte, F_UNLCK);
    fcntl(file->fd, F_OFD_SETLK, &lock);
}

struct tool_slot tool_slot(const struct tool_file *file, unsigned k) {
    if (file->v1) {
        const struct vg_slot *slot = &tool_region(file)->procs[k];
        return (struct tool_slot){slot->pid, slot->hostpid, slot->status};
    }
    const struct vg_slot_v0 *slot = &tool_region_v0(file)->procs[k];
    return (struct tool_slot){slot->pid, slot->hostpid, slot->status};
}

struct tool_usage tool_usage(const struct tool_file *file, unsigned k, unsigned d) {
    if (file->v1) {
        const struct vg_slot *slot = &tool_region(file)->procs[k];
        const struct vg_usage *used = &slot->used[d];
        return (struct tool_usage){used->context, used->module,         used->data,
                                   used->total,   slot->monitorused[d], slot->util[d].sm};
    }
    const struct vg_slot_v0 *slot = &tool_region_v0(file)->procs[k];
    const struct vg_usage_v0 *used = &slot->used[d];
    return (struct tool_usage){used->context, used->module,         used->data,
                               used->total,   slot->monitorused[d], slot->util[d].sm};
}

uint64_t tool_limit(const struct tool_file *file, unsigned d) {
    return file->v1 ? tool_region(file)->limit[d] : tool_region_v0(file)->limit[d];
}

uint64_t tool_sm_limit(const struct tool_file *file, unsigned d) {
    return file->v1 ? tool_region(file)->sm_limit[d] : tool_region_v0(file)->sm_limit[d];
}

void tool_uuid(const struct tool_file *file, unsigned d, char *out) {
    memcpy(out, file->v1 ? tool_region(file)->uuid[d] : tool_region_v0(file)->uuid[d], VG_UUID_LENGTH);
    out[VG_UUID_LENGTH] = '\0';
    for (char *c = out; *c != '\0'; c++)
        if (*c <= 0x20 || *c >= 0x7f || *c == '"' || *c == '\\')
            *c = '?';
}

struct tool_tail tool_tail(const struct tool_file *file) {
    if (file->v1) {
        const struct vg_region *region = tool_region(file);
        return (struct tool_tail){region->utilization_switch, region->recent_kernel, region->priority,
                                  region->last_kernel_time};
    }
    const struct vg_region_v0 *region = tool_region_v0(file);
    return (struct tool_tail){region->utilization_switch, region->recent_kernel, region->priority, 0};
}
