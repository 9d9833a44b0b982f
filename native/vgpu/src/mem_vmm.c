/* Virtual memory management: physical memory is released when no handle and no mapping of it is left, and no
 * file that it was exported as. A handle that this process exported and imports again is one more handle of
 * the same object. */
#define _GNU_SOURCE
#include "charge.h"
#include "devices.h"
#include "guard.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"
#include "sorted.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { POSIX_FILE = 1, LAST_MARK = 64, GIVEN_BACK_AT_ONCE = 16 };

struct object {
    uint64_t size; /* charged bytes */
    uint64_t mapped;
    uint32_t references; /* of all handles */
    int device;
    int mark, file;    /* of its last export, see mark_of; 0: never exported */
    uint64_t exported; /* that export's number */
};

static struct vg_sorted handles; /* handle -> object; the length is the number of references of the handle */
static struct vg_sorted ranges;  /* address -> object, length */
static struct vg_sorted parked;  /* number of the export -> object that only its file keeps */
static _Atomic uint32_t guard;

static void lock(void) {
    vg_guard_take(&guard);
}

static void unlock(void) {
    vg_guard_leave(&guard);
}

/* Objects are few and small: they come from one table and are reused. */
static struct object *new_object(void) {
    struct object *object = vg_sorted_block(sizeof *object);
    return object;
}

/* The file of an export is marked so that it is recognised, whatever number it has by then: the owner and the
 * signal of an open file travel with it and do nothing as long as nobody asks for signals. 0: not a file that
 * this process exported. */
static int mark_of(int file) {
    return fcntl(file, F_GETOWN) == getpid() ? fcntl(file, F_GETSIG) : 0;
}

struct directory_entry {
    uint64_t inode;
    int64_t next;
    unsigned short length;
    unsigned char type;
    char name[];
};

static uint64_t mark_bit(int mark) {
    return mark > 0 && mark <= LAST_MARK ? (uint64_t)1 << (mark - 1) : 0;
}

/* The marks of the files that this process has open; all, if nobody can tell. */
static uint64_t open_marks(void) {
    char buffer[1024] __attribute__((aligned(8)));
    int cancel_state, before = errno;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state); /* no thread ends with the guard */
    int directory = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint64_t marks = directory < 0 ? UINT64_MAX : 0;
    long length = 1;
    while (directory >= 0 && (length = syscall(SYS_getdents64, directory, buffer, sizeof buffer)) > 0) {
        for (long at = 0; at < length;) {
            const struct directory_entry *entry = (const struct directory_entry *)(buffer + at);
            if (entry->name[0] != '.')
                marks |= mark_bit(mark_of(atoi(entry->name)));
            at += entry->length;
        }
    }
    if (directory >= 0)
        close(directory);
    pthread_setcancelstate(cancel_state, NULL);
    errno = before;
    return length < 0 ? UINT64_MAX : marks;
}

/* Under the lock. The charge to give back when nothing refers to the object any more; the object is freed. */
static uint64_t finish(struct object *object, int *device) {
    if (object->references != 0 || object->mapped != 0)
        return 0;
    if (object->mark > 0 && (open_marks() & mark_bit(object->mark)) !=
                                0) { /* without memory for the entry it stays charged for ever */
        vg_sorted_put(&parked, object->exported, 0, object);
        return 0;
    }
    uint64_t size = object->size;
    *device = object->device;
    vg_sorted_block_free(object, sizeof *object);
    return size;
}

/* Under the lock. The handle stands for one reference of the object more. False: no memory. */
static bool name(uint64_t handle, struct object *object) {
    struct vg_sorted_entry *entry = vg_sorted_find(&handles, handle);
    uint64_t known = entry != NULL && entry->value == object ? entry->length : 0;
    return vg_sorted_put(&handles, handle, known + 1, object);
}

/* Under the lock. While the driver is called the object is referred to by the call: whatever other threads do
 * to it, it is still there afterwards. */
static struct object *pin(struct object *object) {
    if (object != NULL)
        object->references++;
    return object;
}

static struct object *pin_handle(uint64_t handle) {
    if (vg_ready() != VG_MODE_COUNT)
        return NULL;
    lock();
    struct object *object = pin(vg_sorted_get(&handles, handle));
    unlock();
    return object;
}

static void unpin(struct object *object) {
    int device = -1;
    if (object == NULL)
        return;
    lock();
    object->references--;
    uint64_t given_back = finish(object, &device);
    unlock();
    if (given_back != 0)
        vg_discharge(device, given_back);
}

int vg_vmm_create(vg_fn_vmm_create driver, uint64_t *handle, size_t size, const struct vg_alloc_prop *prop,
                  uint64_t flags) {
    struct vg_charge charge = {.counted = false};
    int device = -1;
    if (prop != NULL && vg_ready() == VG_MODE_COUNT)
        device = vg_device_of(vg_location_device(&prop->location));
    int result = vg_charge_begin(&charge, device, size);
    if (result != VG_CUDA_SUCCESS)
        return result;
    result = driver(handle, size, prop, flags);
    if (result != VG_CUDA_SUCCESS || !charge.counted) {
        vg_charge_abandon(&charge);
        return result;
    }
    lock();
    struct object *object = new_object();
    if (object != NULL) {
        *object = (struct object){.size = charge.size, .device = device, .references = 1};
        if (!name(*handle, object)) /* no memory for its records: it is never given back */
            vg_sorted_block_free(object, sizeof *object);
    }
    unlock();
    vg_charge_publish(&charge);
    return result;
}

/* The driver may hand the handle's value out again at once: it is forgotten before the call. */
int vg_vmm_release(vg_fn_vmm_release driver, uint64_t handle) {
    struct object *object = NULL;
    if (vg_ready() == VG_MODE_COUNT) {
        lock();
        struct vg_sorted_entry *entry = vg_sorted_find(&handles, handle);
        if (entry != NULL) {
            object = entry->value;
            if (--entry->length == 0)
                vg_sorted_remove(&handles, handle);
        }
        unlock();
    }
    int result = driver(handle);
    if (object == NULL)
        return result;
    if (result == VG_CUDA_SUCCESS) {
        unpin(object);
    } else {
        lock();
        name(handle, object);
        unlock();
    }
    vg_vmm_settle();
    return result;
}

int vg_vmm_map(vg_fn_vmm_map driver, uint64_t address, size_t size, size_t offset, uint64_t handle,
               uint64_t flags) {
    struct object *object = pin_handle(handle);
    int result = driver(address, size, offset, handle, flags);
    if (result == VG_CUDA_SUCCESS && object != NULL) {
        lock();
        object->mapped += size;
        vg_sorted_put(&ranges, address, size, object); /* without memory it stays charged for ever */
        unlock();
    }
    unpin(object);
    return result;
}

int vg_vmm_unmap(vg_fn_vmm_unmap driver, uint64_t address, size_t size) {
    int result = driver(address, size);
    if (result != VG_CUDA_SUCCESS || vg_ready() != VG_MODE_COUNT)
        return result;
    for (;;) {
        struct vg_sorted_entry range;
        int device = -1;
        uint64_t given_back = 0;
        lock();
        bool found = vg_sorted_overlap(&ranges, address, size, &range);
        if (found) {
            struct object *object = range.value;
            uint64_t start = range.key > address ? range.key : address;
            uint64_t end =
                range.key + range.length < address + size ? range.key + range.length : address + size;
            vg_sorted_remove(&ranges, range.key);
            if (start > range.key)
                vg_sorted_put(&ranges, range.key, start - range.key, object);
            if (range.key + range.length > end)
                vg_sorted_put(&ranges, end, range.key + range.length - end, object);
            object->mapped -= end - start;
            given_back = finish(object, &device);
        }
        unlock();
        if (given_back != 0)
            vg_discharge(device, given_back);
        if (!found)
            return result;
    }
}

int vg_vmm_retain(vg_fn_vmm_retain driver, uint64_t *handle, void *address) {
    struct object *object = NULL;
    struct vg_sorted_entry range;
    if (vg_ready() == VG_MODE_COUNT) {
        lock();
        if (vg_sorted_overlap(&ranges, (uint64_t)(uintptr_t)address, 1, &range))
            object = pin(range.value);
        unlock();
    }
    int result = driver(handle, address);
    if (result != VG_CUDA_SUCCESS) {
        unpin(object);
    } else if (object != NULL) {
        lock();
        name(*handle, object);
        unlock();
    }
    return result;
}

int vg_vmm_export(vg_fn_vmm_export driver, void *shareable, uint64_t handle, int type, uint64_t flags) {
    static uint64_t exports;
    struct object *object = type == POSIX_FILE ? pin_handle(handle) : NULL;
    int result = driver(shareable, handle, type, flags);
    if (result == VG_CUDA_SUCCESS && object != NULL) {
        int before = errno, file = *(int *)shareable;
        lock();
        int mark = mark_of(file); /* the driver may have given the same open file as before */
        if (mark <= 0) {
            mark = object->mark > 0 ? object->mark : 1 + (int)(exports % LAST_MARK);
            if (fcntl(file, F_SETOWN, getpid()) != 0 || fcntl(file, F_SETSIG, mark) != 0)
                mark = 0;
        }
        object->mark = mark;
        object->file = file;
        object->exported = ++exports;
        unlock();
        errno = before;
    }
    unpin(object);
    return result;
}

/* Under the lock. The object of ours that was exported into the file. With more exports than marks several
 * may have its mark: the last of them, one with the file's number first. */
static struct object *exported_as(int file) {
    int mark = mark_of(file);
    struct object *best = NULL;
    const struct vg_sorted *maps[] = {&handles, &ranges, &parked};
    for (unsigned map = 0; mark > 0 && map < sizeof maps / sizeof *maps; map++) {
        const struct vg_sorted *objects = maps[map];
        for (size_t i = 0; i < objects->count; i++) {
            struct object *object = objects->entries[i].value;
            if (object->mark == mark &&
                (best == NULL || (object->file == file) > (best->file == file) ||
                 ((object->file == file) == (best->file == file) && object->exported > best->exported)))
                best = object;
        }
    }
    return best;
}

static struct object *pin_export(int file) {
    int before = errno;
    lock();
    struct object *object = pin(exported_as(file));
    if (object != NULL)
        vg_sorted_remove(&parked, object->exported);
    unlock();
    errno = before;
    return object;
}

/* Memory of another process is that process's charge; here it only has to be told from what was made here. */
int vg_vmm_import(vg_fn_vmm_import driver, uint64_t *handle, void *shared, int type) {
    bool ours = type == POSIX_FILE && vg_ready() == VG_MODE_COUNT;
    struct object *object = ours ? pin_export((int)(intptr_t)shared) : NULL, *unused = object;
    int result = driver(handle, shared, type);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT) {
        lock();
        struct object *known = vg_sorted_get(&handles, *handle);
        if (known != NULL && known != object)
            object = pin(known);
        else
            unused = NULL;
        if (object == NULL && (object = new_object()) != NULL)
            *object = (struct object){.device = -1, .references = 1};
        if (object != NULL)
            name(*handle, object);
        unlock();
    }
    unpin(unused);
    return result;
}

void vg_vmm_settle(void) {
    int device[GIVEN_BACK_AT_ONCE];
    uint64_t size[GIVEN_BACK_AT_ONCE];
    unsigned count;
    do {
        count = 0;
        lock();
        uint64_t marks = parked.count != 0 ? open_marks() : 0;
        for (size_t i = parked.count; i > 0 && count < GIVEN_BACK_AT_ONCE; i--) {
            struct object *object = parked.entries[i - 1].value;
            if ((marks & mark_bit(object->mark)) != 0)
                continue;
            vg_sorted_remove(&parked, object->exported);
            device[count] = object->device;
            size[count++] = object->size;
            vg_sorted_block_free(object, sizeof *object);
        }
        unlock();
        for (unsigned i = 0; i < count; i++)
            vg_discharge(device[i], size[i]);
    } while (count == GIVEN_BACK_AT_ONCE);
}
