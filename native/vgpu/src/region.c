#define _GNU_SOURCE
#include "region.h"

#include "log.h"
#include "mount_root.h"
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char extension_magic[8] = {'V', 'G', 'P', 'U', 'E', 'X', 'T', '1'};
static const uint64_t lock_timeout_ns = 5000000000u, seed_timeout_ns = 1000000000u;

/* sem_init(shared, 1) in the 64-bit representation of glibc. */
static void seed_semaphore(unsigned char *sem) {
    const uint64_t value = 1;
    const int32_t shared = 128;
    memset(sem, 0, 32);
    memcpy(sem, &value, sizeof value);
    memcpy(sem + 8, &shared, sizeof shared);
}

/* The bytes are zero already. */
static void seed_region(struct vg_region *region, const struct vg_region_seed *seed) {
    region->major = VG_MAJOR;
    region->minor = VG_MINOR;
    seed_semaphore(region->sem);
    seed_semaphore(region->sem_postinit);
    region->device_count = seed->device_count;
    memcpy(region->uuid, seed->uuids, sizeof region->uuid);
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        region->limit[d] = seed->limits[d];
        region->sm_limit[d] = seed->sm_limits[d];
    }
    region->utilization_switch = 1;
    region->recent_kernel = VG_RECENT_KERNEL_ACTIVE;
    region->priority = seed->priority;
    region->last_kernel_time = vg_unix_seconds();
    atomic_store_explicit(&region->magic, VG_MAGIC, memory_order_release);
}

static void seed_extension(struct vg_extension *extension) {
    extension->version = VG_EXTENSION_VERSION;
    extension->length = VG_EXTENSION_LENGTH;
    extension->tick = vg_unix_seconds();
    snprintf(extension->library_version, sizeof extension->library_version, "%s", "0.1.0");
    atomic_thread_fence(memory_order_release);
    memcpy(extension->magic, extension_magic, sizeof extension_magic);
}

static bool extension_is_ours(const struct vg_extension *extension) {
    return memcmp(extension->magic, extension_magic, sizeof extension_magic) == 0 &&
           extension->version == VG_EXTENSION_VERSION && extension->length == VG_EXTENSION_LENGTH;
}

static bool extension_is_blank(const struct vg_extension *extension) {
    static const char none[8];
    return memcmp(extension->magic, none, sizeof none) == 0;
}

/* The directory of the path is a mount made by the host: every user of the container shares it. */
static bool in_cache_directory(const char *path) {
    char directory[4096];
    const char *slash = strrchr(path, '/');
    if (slash == NULL || slash == path || (size_t)(slash - path) >= sizeof directory)
        return false;
    memcpy(directory, path, (size_t)(slash - path));
    directory[slash - path] = '\0';
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat st;
    if (fd < 0)
        return false;
    bool mounted = fstat(fd, &st) == 0 && (st.st_uid == 0 || st.st_uid == vg_overflow_uid()) &&
                   vg_is_mount_root(fd, directory);
    close(fd);
    return mounted;
}

/* Why an existing file cannot be the region of this container, or NULL. */
static const char *foreign(const struct stat *st, const char *path) {
    if (!S_ISREG(st->st_mode))
        return "is no regular file";
    if (st->st_nlink > 1)
        return "has more than one name";
    if (st->st_uid != 0 && st->st_uid != geteuid() && st->st_uid != vg_overflow_uid() &&
        !in_cache_directory(path))
        return "belongs to another user";
    return NULL;
}

enum content { CONTENT_READY, CONTENT_BLANK, CONTENT_FOREIGN };

static enum content classify(int fd, off_t length, const char *path) {
    int32_t head[2] = {0, 0};
    if (pread(fd, head, sizeof head, 0) < 0)
        return CONTENT_FOREIGN;
    size_t name = strlen(path);
    bool cache = name > 6 && strcmp(path + name - 6, ".cache") == 0;
    if (length > 0 && !cache && head[0] != VG_MAGIC)
        return CONTENT_FOREIGN;
    if (head[0] != VG_MAGIC || length < VG_V0_MIN_LENGTH)
        return CONTENT_BLANK;
    if (length < VG_V1_MIN_LENGTH || head[1] != VG_MAJOR)
        return CONTENT_FOREIGN;
    return CONTENT_READY;
}

static bool same_root(const struct vg_space *space) {
    struct stat root;
    return stat("/", &root) == 0 && root.st_dev == space->root_device && root.st_ino == space->root_inode;
}

bool vg_region_replaced(const struct vg_space *space) {
    struct stat st;
    if (space->locks.path == NULL)
        return false;
    if (lstat(space->locks.path, &st) != 0)
        return (errno == ENOENT || errno == ENOTDIR) && same_root(space);
    if (st.st_dev == space->locks.device && st.st_ino == space->locks.inode)
        return st.st_size < VG_FILE_LENGTH || atomic_load(&space->region->magic) != VG_MAGIC;
    return same_root(space);
}

static int open_existing(const char *path, struct stat *st) {
    int fd = vg_open_to_map(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, st) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* A start needs three descriptors at once, for the region and for locks of it. */
static bool has_descriptors(void) {
    enum { NEEDED = 3 };
    int fds[NEEDED], count = 0;
    while (count < NEEDED && (fds[count] = open("/", O_PATH | O_CLOEXEC)) >= 0)
        count++;
    bool enough = count == NEEDED || !vg_exhausted(errno);
    while (count > 0)
        close(fds[--count]);
    return enough;
}

/* Opens the file, making it if there is none. -1 with `*result` set: not possible. */
static int open_or_create(const char *path, struct stat *st, enum vg_region_result *result) {
    for (int attempt = 0; attempt < 8; attempt++) {
        int fd = open_existing(path, st);
        if (fd >= 0)
            return fd;
        if (vg_exhausted(errno)) {
            *result = VG_REGION_LATER;
            return -1;
        }
        if (errno != ENOENT) {
            VG_ERROR("region %s cannot be used: %s", path,
                     errno == ELOOP ? "it is a symbolic link" : strerror(errno));
            *result = VG_REGION_FOREIGN;
            return -1;
        }
        /* With O_NOATIME a file that the file system gives to somebody else (NFS) is made and then refused.
         */
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (fd >= 0) {
            if (fchmod(fd, 0666) == 0 && fstat(fd, st) == 0)
                return fd;
            close(fd);
        } else if (errno == EEXIST) {
            continue;
        }
        break;
    }
    VG_ERROR("region %s cannot be made: %s; limits hold for this process alone", path, strerror(errno));
    *result = VG_REGION_UNAVAILABLE;
    return -1;
}

static bool grow(int fd, off_t length) {
    if (length >= VG_FILE_LENGTH)
        return true;
    int error = posix_fallocate(fd, 0, VG_FILE_LENGTH);
    if (error != 0)
        errno = error;
    return error == 0;
}

/* Few of its pages are used: without read-ahead the first access does not fetch (or clear) all of them. */
static void *map_file(int fd) {
    void *base = mmap(NULL, VG_FILE_LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return NULL;
    madvise(base, VG_FILE_LENGTH, MADV_RANDOM);
    return base;
}

static void attach(struct vg_space *space, void *base) {
    space->region = base;
    space->extension = (struct vg_extension *)((char *)base + VG_EXTENSION_OFFSET);
    space->shared_extension = extension_is_ours(space->extension);
    if (!space->shared_extension) {
        void *memory =
            mmap(NULL, VG_EXTENSION_LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return;
        space->extension = memory;
        seed_extension(space->extension);
    }
}

/* The mapping of a file in which nothing is missing, else NULL. */
static void *map_if_complete(int fd, off_t length) {
    struct vg_region *region = length >= VG_FILE_LENGTH ? map_file(fd) : NULL;
    if (region == NULL)
        return NULL;
    if (atomic_load_explicit(&region->magic, memory_order_acquire) == VG_MAGIC && region->major == VG_MAJOR &&
        !extension_is_blank((struct vg_extension *)((char *)region + VG_EXTENSION_OFFSET)))
        return region;
    munmap(region, VG_FILE_LENGTH);
    return NULL;
}

/* The same for who looks again and again: most looks end at the first word, which is written last. */
static void *look_again(int fd) {
    struct stat st;
    int32_t magic = 0;
    if (pread(fd, &magic, sizeof magic, 0) != sizeof magic || magic != VG_MAGIC || fstat(fd, &st) != 0)
        return NULL;
    return map_if_complete(fd, st.st_size);
}

static void pause_for(uint64_t *pause) {
    vg_pause_ns(*pause / 2 + vg_now() % (*pause / 2));
    if (*pause < 1000000)
        *pause *= 2;
}

/* To prepare the seed takes the driver a while: one process does, the others wait for what it makes, a second
 * at most. The mapping of it, or NULL: prepare it; the lock is to be dropped. */
static void *await_seed(struct vg_space *space, int fd, struct vg_long_lock *turn) {
    uint64_t deadline = vg_now() + seed_timeout_ns, pause = 50000;
    void *base = look_again(fd);
    while (base == NULL && vg_long_lock_take(turn, &space->locks, VG_LOCK_SEED) == VG_LOCK_BUSY &&
           vg_now() < deadline) {
        pause_for(&pause);
        base = look_again(fd);
    }
    return base;
}

/* Waits for the region lock, or until whoever has it has filled in what was missing: then `*base` is the
 * mapping. */
static enum vg_lock_result enter_unless_ready(struct vg_section *section, struct vg_space *space, int fd,
                                              void **base) {
    uint64_t deadline = vg_now() + lock_timeout_ns, pause = 50000;
    for (;;) {
        enum vg_lock_result result = vg_section_try(section, &space->locks, VG_LOCK_REGION);
        if (result != VG_LOCK_BUSY || vg_now() >= deadline)
            return result;
        *base = look_again(fd);
        if (*base != NULL)
            return VG_LOCK_BUSY;
        pause_for(&pause);
    }
}

/* Fills in what is missing, under the region lock, and maps the file. */
static enum vg_region_result complete(struct vg_space *space, int fd, const char *path,
                                      const struct vg_region_seed *seed) {
    struct vg_section section;
    void *base = NULL;
    enum vg_lock_result entered = enter_unless_ready(&section, space, fd, &base);
    if (base != NULL) {
        attach(space, base);
        return VG_REGION_JOINED;
    }
    if (entered != VG_LOCK_GRANTED) {
        VG_ERROR("region %s cannot be locked; limits hold for this process alone", path);
        return VG_REGION_UNAVAILABLE;
    }
    enum vg_region_result result = VG_REGION_UNAVAILABLE;
    struct stat st;
    enum content content = fstat(fd, &st) == 0 ? classify(fd, st.st_size, path) : CONTENT_FOREIGN;
    if (content == CONTENT_FOREIGN)
        result = VG_REGION_FOREIGN;
    else if (grow(fd, st.st_size))
        base = map_file(fd);
    if (base != NULL) {
        struct vg_extension *extension = (struct vg_extension *)((char *)base + VG_EXTENSION_OFFSET);
        result = VG_REGION_JOINED;
        if (content == CONTENT_BLANK) {
            if (st.st_size != 0)
                memset(base, 0, VG_FILE_LENGTH);
            seed_extension(extension);
            seed_region(base, seed);
            result = VG_REGION_CREATED;
        } else if (extension_is_blank(extension)) {
            memset(extension, 0, sizeof *extension);
            seed_extension(extension);
        }
    } else if (result == VG_REGION_UNAVAILABLE && vg_exhausted(errno)) {
        result = VG_REGION_LATER;
    } else if (result == VG_REGION_UNAVAILABLE) {
        VG_ERROR("region %s cannot be made: %s; limits hold for this process alone", path, strerror(errno));
    }
    vg_section_leave(&section);
    if (base != NULL)
        attach(space, base);
    return result;
}

enum vg_region_result vg_region_open(struct vg_space *space, const char *path, struct vg_region_seed *seed) {
    struct vg_long_lock turn = {.page = MAP_FAILED, .kept_fd = -1};
    enum vg_region_result result = VG_REGION_LATER;
    struct stat st;
    memset(space, 0, sizeof *space);
    space->slot = -1;
    if (stat("/", &st) == 0) {
        space->root_device = st.st_dev;
        space->root_inode = st.st_ino;
    }
    int fd = has_descriptors() ? open_or_create(path, &st, &result) : -1;
    if (fd < 0) {
        if (result == VG_REGION_LATER)
            VG_ERROR("region %s: no descriptor or no memory for it; calls are refused until there is", path);
        return result;
    }
    const char *reason = foreign(&st, path);
    void *base = reason == NULL ? map_if_complete(fd, st.st_size) : NULL;
    if (base == NULL && (reason != NULL || classify(fd, st.st_size, path) == CONTENT_FOREIGN)) {
        VG_ERROR("region %s cannot be used: it %s", path,
                 reason != NULL ? reason : "is no region of this version");
        close(fd);
        return VG_REGION_FOREIGN;
    }
    space->locks =
        (struct vg_lock_file){.path = path, .device = st.st_dev, .inode = st.st_ino, .look = fd + 1};
    if (base == NULL && seed->prepare != NULL) {
        base = await_seed(space, fd, &turn);
        if (base == NULL)
            seed->prepare(seed);
    }
    if (base != NULL) {
        attach(space, base);
        result = VG_REGION_JOINED;
    } else {
        result = complete(space, fd, path, seed);
    }
    if (turn.page != MAP_FAILED || turn.kept_fd >= 0)
        vg_long_lock_drop(&turn);
    if (result != VG_REGION_JOINED && result != VG_REGION_CREATED)
        vg_region_settle(space);
    return result;
}

void vg_region_settle(struct vg_space *space) {
    int look = space->locks.look;
    space->locks.look = 0; /* first: a child forked meanwhile closes what stands here */
    if (look != 0)
        close(look - 1);
}

void vg_region_close(struct vg_space *space) {
    vg_region_settle(space);
    if (!space->shared_extension)
        munmap(space->extension, VG_EXTENSION_LENGTH);
    munmap(space->region, VG_FILE_LENGTH);
}

void vg_region_name_devices(struct vg_space *space, const struct vg_region_seed *before,
                            const struct vg_region_seed *seed) {
    struct vg_region *region = space->region;
    struct vg_section section;
    if (vg_section_enter(&section, &space->locks, VG_LOCK_REGION, vg_now() + lock_timeout_ns) !=
        VG_LOCK_GRANTED)
        return;
    if (region->uuid[0][0] == '\0') {
        memcpy(region->uuid, seed->uuids, sizeof region->uuid);
        for (int d = 0; d < VG_MAX_DEVICES; d++) {
            uint64_t limit = before->limits[d], sm = before->sm_limits[d];
            atomic_compare_exchange_strong(&region->limit[d], &limit, seed->limits[d]);
            atomic_compare_exchange_strong(&region->sm_limit[d], &sm, seed->sm_limits[d]);
        }
        atomic_store(&region->device_count, seed->device_count);
    }
    vg_section_leave(&section);
}

bool vg_region_private(struct vg_space *space, const struct vg_region_seed *seed) {
    memset(space, 0, sizeof *space);
    space->slot = -1;
    char *base = mmap(NULL, VG_FILE_LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return false;
    seed_extension((struct vg_extension *)(base + VG_EXTENSION_OFFSET));
    seed_region((struct vg_region *)base, seed);
    attach(space, base);
    return true;
}

void vg_region_event(struct vg_space *space, unsigned type, int device, uint64_t value) {
    uint64_t number = atomic_fetch_add(&space->extension->next_event, 1);
    struct vg_ext_event *event = &space->extension->events[number % VG_EVENT_RING];
    atomic_store_explicit(&event->sequence, 0, memory_order_release);
    event->time = vg_clock(CLOCK_REALTIME);
    event->type = (uint16_t)type;
    event->device = device < 0 ? 255 : (uint8_t)device;
    event->pid = getpid();
    event->value = value;
    atomic_store_explicit(&event->sequence, number + 1, memory_order_release);
}
