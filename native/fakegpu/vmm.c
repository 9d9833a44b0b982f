/* Virtual memory management: address ranges, handles, mappings. A handle is a file of memory, so that it can
 * be mapped twice and handed to another process; its memory goes when neither a reference nor a mapping is
 * left. */
#include "driver.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HANDLE_MAGIC = 0x564D4831, POSIX_FILE = 1 };

struct handle {
    uint32_t magic, card;
    int fd, imported, on_host, ordinal;
    uint64_t size, references, mappings;
    struct handle *next;
};

struct mapping {
    uintptr_t start;
    size_t size;
    struct handle *handle;
    struct mapping *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles;
static struct mapping *mappings;

void fg_vmm_forget(void) {
    pthread_mutex_init(&lock, NULL);
    handles = NULL;
    mappings = NULL;
}

static struct handle *find(CUmemGenericAllocationHandle value) {
    struct handle *each = handles;
    while (each && (CUmemGenericAllocationHandle)(uintptr_t)each != value)
        each = each->next;
    return each;
}

/* Another handle of this process for the same memory, through an import: the memory stays as long as one of
 * them does. */
static struct handle *same_memory(const struct handle *handle) {
    struct stat ours, theirs;
    if (fstat(handle->fd, &ours) != 0)
        return NULL;
    for (struct handle *each = handles; each; each = each->next)
        if (each != handle && each->imported && fstat(each->fd, &theirs) == 0 &&
            theirs.st_ino == ours.st_ino && theirs.st_dev == ours.st_dev)
            return each;
    return NULL;
}

/* Under the lock. */
static void drop_if_unused(struct handle *handle) {
    if (handle->references > 0 || handle->mappings > 0)
        return;
    for (struct handle **link = &handles; *link; link = &(*link)->next)
        if (*link == handle) {
            *link = handle->next;
            break;
        }
    struct handle *heir = handle->imported ? NULL : same_memory(handle);
    if (heir) {
        heir->imported = 0;
        heir->card = handle->card;
        heir->on_host = handle->on_host;
    } else if (!handle->imported && !handle->on_host)
        fg_account(handle->card, FG_DATA, -(int64_t)handle->size, -(int64_t)handle->size);
    close(handle->fd);
    free(handle);
}

static CUresult enter(struct handle *values, CUmemGenericAllocationHandle *out) {
    struct handle *handle = values->fd < 0 ? NULL : malloc(sizeof *handle);
    if (!handle)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = *values;
    pthread_mutex_lock(&lock);
    handle->next = handles;
    handles = handle;
    pthread_mutex_unlock(&lock);
    *out = (CUmemGenericAllocationHandle)(uintptr_t)handle;
    return CUDA_SUCCESS;
}

static int card_of(const CUmemAllocationProp *properties, struct handle *handle) {
    handle->on_host = properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
    handle->ordinal = properties->location.id;
    if (handle->on_host)
        return properties->location.type >= 2 && properties->location.type <= 4;
    if (fg_need_device(properties->location.id) != CUDA_SUCCESS)
        return 0;
    handle->card = fg_driver.card[properties->location.id];
    return 1;
}

FG_FUNCTION(cuMemCreate,
            (CUmemGenericAllocationHandle * out, size_t size, const CUmemAllocationProp *properties,
             unsigned long long flags),
            {
                struct handle handle = {.magic = HANDLE_MAGIC, .fd = -1, .size = size, .references = 1};
                if (!fg_driver.initialized)
                    return CUDA_ERROR_NOT_INITIALIZED;
                if (!out || !properties || flags != 0 || properties->type != 1 || size == 0 ||
                    size % FG_GRANULE || !card_of(properties, &handle))
                    return CUDA_ERROR_INVALID_VALUE;
                if (size > INT64_MAX / 2 ||
                    (!handle.on_host && fg_account(handle.card, FG_DATA, (int64_t)size, (int64_t)size) != 0))
                    return CUDA_ERROR_OUT_OF_MEMORY;
                handle.fd = memfd_create("fakegpu", MFD_CLOEXEC);
                CUresult result = handle.fd >= 0 && ftruncate(handle.fd, (off_t)size) == 0
                                      ? enter(&handle, out)
                                      : CUDA_ERROR_OUT_OF_MEMORY;
                if (result != CUDA_SUCCESS) {
                    if (handle.fd >= 0)
                        close(handle.fd);
                    if (!handle.on_host)
                        fg_account(handle.card, FG_DATA, -(int64_t)size, -(int64_t)size);
                }
                return result;
            })

FG_FUNCTION(cuMemRelease, (CUmemGenericAllocationHandle value), {
    pthread_mutex_lock(&lock);
    struct handle *handle = find(value);
    CUresult result = handle && handle->references > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        handle->references--;
        drop_if_unused(handle);
    }
    pthread_mutex_unlock(&lock);
    return result;
})

FG_FUNCTION(cuMemGetAllocationGranularity,
            (size_t *granularity, const CUmemAllocationProp *properties, int option), {
                if (!granularity || !properties || option < 0 || option > 1)
                    return CUDA_ERROR_INVALID_VALUE;
                *granularity = FG_GRANULE;
                return CUDA_SUCCESS;
            })

FG_FUNCTION(cuMemGetAllocationPropertiesFromHandle,
            (CUmemAllocationProp * properties, CUmemGenericAllocationHandle value), {
                pthread_mutex_lock(&lock);
                struct handle *handle = find(value);
                CUresult result = handle && properties ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
                if (result == CUDA_SUCCESS)
                    *properties =
                        (CUmemAllocationProp){.type = 1,
                                              .location = {handle->on_host ? CU_MEM_LOCATION_TYPE_HOST
                                                                           : CU_MEM_LOCATION_TYPE_DEVICE,
                                                           handle->ordinal}};
                pthread_mutex_unlock(&lock);
                return result;
            })

FG_FUNCTION(cuMemAddressReserve,
            (CUdeviceptr * pointer, size_t size, size_t alignment, CUdeviceptr wish,
             unsigned long long flags),
            {
                (void)wish;
                if (!fg_driver.initialized)
                    return CUDA_ERROR_NOT_INITIALIZED;
                if (!pointer || size == 0 || size % FG_GRANULE || flags != 0 ||
                    (alignment & (alignment - 1)) || size > (size_t)1 << 46)
                    return CUDA_ERROR_INVALID_VALUE;
                size_t align = alignment > FG_GRANULE ? alignment : FG_GRANULE;
                char *start =
                    mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (start == MAP_FAILED)
                    return CUDA_ERROR_OUT_OF_MEMORY;
                size_t head = (align - (uintptr_t)start % align) % align;
                if (head)
                    munmap(start, head);
                munmap(start + head + size, align - head);
                CUresult result = fg_heap_enter(NULL, start + head, size, FG_BLOCK_RANGE);
                *pointer = (uintptr_t)(start + head);
                return result;
            })

FG_FUNCTION(cuMemAddressFree, (CUdeviceptr pointer, size_t size), {
    struct fg_block block;
    if (!fg_heap_find((uintptr_t)pointer, &block) || block.start != pointer || block.size != size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = fg_heap_free((uintptr_t)pointer, 1u << FG_BLOCK_RANGE);
    if (result == CUDA_SUCCESS)
        munmap((void *)(uintptr_t)pointer, size);
    return result;
})

static int in_range(CUdeviceptr pointer, size_t size) {
    struct fg_block block;
    return size > 0 && fg_heap_find((uintptr_t)pointer, &block) && block.kind == FG_BLOCK_RANGE &&
           size <= block.start + block.size - pointer;
}

static CUresult map(CUdeviceptr pointer, size_t size, size_t offset, struct handle *handle) {
    for (struct mapping *each = mappings; each; each = each->next)
        if (pointer < each->start + each->size && each->start < pointer + size)
            return CUDA_ERROR_INVALID_VALUE;
    struct mapping *mapping = malloc(sizeof *mapping);
    if (!mapping)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *where = (void *)(uintptr_t)pointer;
    if (mmap(where, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, handle->fd,
             (off_t)offset) == MAP_FAILED) {
        free(mapping);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *mapping =
        (struct mapping){.start = (uintptr_t)pointer, .size = size, .handle = handle, .next = mappings};
    mappings = mapping;
    handle->mappings++;
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuMemMap,
            (CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle value,
             unsigned long long flags),
            {
                if (flags != 0 || pointer % FG_GRANULE || size % FG_GRANULE || offset % FG_GRANULE ||
                    !in_range(pointer, size))
                    return CUDA_ERROR_INVALID_VALUE;
                pthread_mutex_lock(&lock);
                struct handle *handle = find(value);
                CUresult result = handle && offset <= handle->size && size <= handle->size - offset
                                      ? map(pointer, size, offset, handle)
                                      : CUDA_ERROR_INVALID_VALUE;
                pthread_mutex_unlock(&lock);
                return result;
            })

FG_FUNCTION(cuMemUnmap, (CUdeviceptr pointer, size_t size), {
    if (!in_range(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (struct mapping **link = &mappings; *link;) {
        struct mapping *each = *link;
        if (each->start < pointer || each->start + each->size > pointer + size) {
            link = &each->next;
            continue;
        }
        mmap((void *)each->start, each->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        *link = each->next;
        each->handle->mappings--;
        drop_if_unused(each->handle);
        free(each);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
})

FG_FUNCTION(cuMemSetAccess, (CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count), {
    return access && count > 0 && in_range(pointer, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
})

FG_FUNCTION(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer), {
    if (!flags || !location || !in_range(pointer, 1))
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 3; /* read and write */
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * out, void *address), {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (struct mapping *each = mappings; each; each = each->next)
        if ((uintptr_t)address >= each->start && (uintptr_t)address < each->start + each->size) {
            each->handle->references++;
            *out = (CUmemGenericAllocationHandle)(uintptr_t)each->handle;
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
})

FG_FUNCTION(cuMemExportToShareableHandle,
            (void *out, CUmemGenericAllocationHandle value, int type, unsigned long long flags), {
                if (!out || type != POSIX_FILE || flags != 0)
                    return CUDA_ERROR_INVALID_VALUE;
                pthread_mutex_lock(&lock);
                struct handle *handle = find(value);
                int fd = handle ? fcntl(handle->fd, F_DUPFD_CLOEXEC, 0) : -1;
                pthread_mutex_unlock(&lock);
                if (fd < 0)
                    return handle ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_VALUE;
                *(int *)out = fd;
                return CUDA_SUCCESS;
            })

FG_FUNCTION(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle * out, void *os_handle, int type), {
    struct stat info;
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    int theirs = (int)(intptr_t)os_handle;
    if (!out || type != POSIX_FILE || fstat(theirs, &info) != 0 || info.st_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct handle handle = {.magic = HANDLE_MAGIC,
                            .fd = fcntl(theirs, F_DUPFD_CLOEXEC, 0),
                            .imported = 1,
                            .size = (uint64_t)info.st_size,
                            .references = 1};
    return enter(&handle, out);
})

FG_FUNCTION(cuMulticastCreate, (CUmemGenericAllocationHandle * out, const void *properties), {
    (void)out, (void)properties;
    return CUDA_ERROR_NOT_SUPPORTED;
})
