#include "state.h"

#include "engine.h"
#include "identity.h"
#include "setup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FG_MAGIC     0x3155504745544146ull
#define FG_INIT_BYTE (1 << 20)

struct fg_process fg = {.lock_fd = -1, .daemon_fd = -1};
static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t fg_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static struct flock byte_lock(short type, off_t byte) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
}

int fg_slot_alive(uint32_t index) {
    struct flock query = byte_lock(F_WRLCK, index);
    return fcntl(fg.lock_fd, F_OFD_GETLK, &query) != 0 || query.l_type != F_UNLCK;
}

/* After the owner of a card's lock was killed: derive everything again from the slots. */
static void repair_device(struct fg_device *device) {
    uint32_t d = (uint32_t)(device - fg.shared->devices);
    device->used_bytes = 0;
    for (uint32_t i = 0; i < FG_MAX_SLOTS; i++)
        if (fg.shared->slot_used[i])
            for (int k = 0; k < FG_KINDS; k++)
                device->used_bytes += fg.shared->slots[i].on[d].physical[k];
    fg_engine_repair(device);
}

void fg_lock_device(struct fg_device *device) {
    if (pthread_mutex_lock(&device->lock) == EOWNERDEAD) {
        repair_device(device);
        pthread_mutex_consistent(&device->lock);
    }
}

void fg_unlock_device(struct fg_device *device) {
    pthread_mutex_unlock(&device->lock);
}

void fg_lock_slots(void) {
    if (pthread_mutex_lock(&fg.shared->slots_lock) == EOWNERDEAD)
        pthread_mutex_consistent(&fg.shared->slots_lock);
}

void fg_unlock_slots(void) {
    pthread_mutex_unlock(&fg.shared->slots_lock);
}

static void init_mutex(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

static void create_shared(struct fg_shared *shared) {
    memset(shared, 0, offsetof(struct fg_shared, slots_lock));
    fg_setup(shared, fg.path);
    init_mutex(&shared->slots_lock);
    for (int d = 0; d < FG_MAX_DEVICES; d++)
        init_mutex(&shared->devices[d].lock);
    shared->size = sizeof *shared;
    __atomic_store_n(&shared->magic, FG_MAGIC, __ATOMIC_RELEASE);
}

static int open_file(const char *name) {
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", fg.path, name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        fprintf(stderr,
                "fakegpu: cannot open %s: %s; set FAKEGPU_STATE to a directory that this process may write\n",
                path, strerror(errno));
    else
        (void)!fchmod(fd,
                      0666); /* other users of the same test; fails harmlessly for a file of somebody else */
    return fd;
}

/* The state that another process has made, without waiting for those that are about to. */
static struct fg_shared *map_made(int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size != sizeof(struct fg_shared))
        return NULL;
    struct fg_shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        return NULL;
    if (__atomic_load_n(&shared->magic, __ATOMIC_ACQUIRE) == FG_MAGIC)
        return shared;
    munmap(shared, sizeof *shared);
    return NULL;
}

/* One process makes it, the others find it made. */
static int make_state(int fd, struct fg_shared **out) {
    struct flock init = byte_lock(F_WRLCK, FG_INIT_BYTE);
    if (fcntl(fg.lock_fd, F_OFD_SETLKW, &init) != 0 || ftruncate(fd, sizeof(struct fg_shared)) != 0)
        return errno;
    struct fg_shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = shared == MAP_FAILED ? errno : 0;
    if (!error && __atomic_load_n(&shared->magic, __ATOMIC_ACQUIRE) != FG_MAGIC)
        create_shared(shared);
    init.l_type = F_UNLCK;
    fcntl(fg.lock_fd, F_OFD_SETLK, &init);
    *out = shared;
    return error;
}

static int map_state(void) {
    if (fg_config_state_path(fg.path, sizeof fg.path) != 0) {
        fprintf(stderr, "fakegpu: FAKEGPU_STATE is too long\n");
        return ENAMETOOLONG;
    }
    (void)mkdir(fg.path, 0777);
    if (fg.lock_fd < 0 && (fg.lock_fd = open_file("locks")) < 0)
        return errno ? errno : EIO;
    int fd = open_file("state");
    if (fd < 0)
        return errno ? errno : EIO;
    struct fg_shared *shared = map_made(fd);
    int error = shared ? 0 : make_state(fd, &shared);
    close(fd);
    if (error)
        return error;
    if (shared->size != sizeof *shared) {
        fprintf(stderr, "fakegpu: %s was made by another version; remove it\n", fg.path);
        munmap(shared, sizeof *shared);
        return EINVAL;
    }
    fg.pid_namespace = fg_pid_namespace(fg.path);
    fg.visible_count = fg_visible_devices(shared, fg.path, fg.visible, fg.mig_gpu);
    fg.shared = shared;
    return 0;
}

int fg_open(void) {
    pthread_mutex_lock(&process_lock);
    int error = fg.shared ? 0 : map_state();
    pthread_mutex_unlock(&process_lock);
    return error;
}

/* Under slots_lock: give back what slot `index` held. */
static void release_slot(uint32_t index) {
    struct fg_slot *slot = &fg.shared->slots[index];
    for (uint32_t d = 0; d < fg.shared->device_count; d++) {
        struct fg_device *device = &fg.shared->devices[d];
        fg_lock_device(device);
        struct fg_account *account = &slot->on[d];
        for (int k = 0; k < FG_KINDS; k++)
            device->used_bytes -= account->physical[k];
        fg_engine_drop(device, account->channel);
        memset(account, 0, sizeof *account);
        fg_unlock_device(device);
    }
    fg.shared->slot_used[index] = 0;
}

static void sweep_locked(void) {
    for (uint32_t i = 0; i < fg.shared->slot_high; i++)
        if (fg.shared->slot_used[i] && !fg_slot_alive(i))
            release_slot(i);
    while (fg.shared->slot_high > 0 && !fg.shared->slot_used[fg.shared->slot_high - 1])
        fg.shared->slot_high--;
}

void fg_sweep(void) {
    fg_lock_slots();
    sweep_locked();
    fg_unlock_slots();
}

static int claim_free_slot(uint32_t *index) {
    for (uint32_t i = 0; i < FG_MAX_SLOTS; i++) {
        struct flock mine = byte_lock(F_WRLCK, i);
        /* A free slot whose byte is still locked belongs to a process that forgot it (fork); never share it.
         */
        if (!fg.shared->slot_used[i] && fcntl(fg.lock_fd, F_SETLK, &mine) == 0) {
            *index = i;
            return 0;
        }
    }
    return EAGAIN;
}

static int attach_locked(const struct fg_slot *self, const char *container) {
    uint32_t index;
    if (claim_free_slot(&index) != 0) {
        sweep_locked();
        if (claim_free_slot(&index) != 0)
            return EAGAIN;
    }
    struct fg_slot *slot = &fg.shared->slots[index];
    *slot = *self;
    slot->generation = fg.generation = ++fg.shared->generation;
    slot->container = fg_container_index(fg.shared, container);
    memcpy(slot->mig_gpu, fg.mig_gpu, sizeof slot->mig_gpu);
    if (index >= fg.shared->slot_high)
        fg.shared->slot_high = index + 1;
    fg.shared->slot_used[index] = 1;
    fg.slot = index;
    return 0;
}

int fg_attach(void) {
    int error = fg_open();
    if (error)
        return error;
    pthread_mutex_lock(&process_lock);
    if (!fg.attached) {
        struct fg_slot self = {0}; /* found out before the lock: everybody who starts waits for that */
        char container[64];
        fg_identify(fg.path, &self, container, sizeof container);
        fg_lock_slots();
        error = attach_locked(&self, container);
        fg_unlock_slots();
        if (!error) {
            fg.attached = 1;
            fg_ask_daemon(fg.path, &fg.shared->slots[fg.slot], &fg.daemon_fd);
        }
    }
    pthread_mutex_unlock(&process_lock);
    return error;
}

void fg_forget_slot(void) {
    pthread_mutex_init(&process_lock, NULL);
    if (fg.daemon_fd >= 0)
        close(fg.daemon_fd);
    fg.daemon_fd = -1;
    fg.attached = 0;
}

struct fg_account *fg_own(uint32_t device) {
    return &fg.shared->slots[fg.slot].on[device];
}

static int try_account(struct fg_device *device, struct fg_account *own, enum fg_kind kind, int64_t physical,
                       int64_t units) {
    fg_lock_device(device);
    int fits = physical <= 0 ||
               (uint64_t)physical <= device->total_bytes - device->reserved_bytes - device->used_bytes;
    if (fits) {
        device->used_bytes += (uint64_t)physical;
        own->physical[kind] += (uint64_t)physical;
        __atomic_fetch_add(&own->units[kind], (uint64_t)units,
                           __ATOMIC_RELAXED); /* heap.c adds without the lock */
    }
    fg_unlock_device(device);
    return fits;
}

int fg_account(uint32_t device, enum fg_kind kind, int64_t physical, int64_t units) {
    struct fg_device *card = &fg.shared->devices[device];
    if (try_account(card, fg_own(device), kind, physical, units))
        return 0;
    fg_sweep();
    return try_account(card, fg_own(device), kind, physical, units) ? 0 : 2;
}

void fg_memory_info(uint32_t device, uint64_t *free_bytes, uint64_t *total_bytes) {
    struct fg_device *card = &fg.shared->devices[device];
    fg_sweep();
    fg_lock_device(card);
    *free_bytes = card->total_bytes - card->reserved_bytes - card->used_bytes;
    *total_bytes = card->total_bytes;
    fg_unlock_device(card);
}

uint32_t fg_visible_pid(const struct fg_slot *slot) {
    if (fg.shared->pid_convention == FG_PIDS_HOST)
        return (uint32_t)slot->host_pid;
    if (slot->pid_namespace == fg.pid_namespace)
        return (uint32_t)slot->pid;
    return fg.pid_namespace == FG_INITIAL_PID_NAMESPACE ? (uint32_t)slot->host_pid : 0;
}
