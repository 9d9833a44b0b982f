/* A region file that the workload has written: joining it, taking a slot and counting must survive any
 * content, and a file that is not ours must stay as it is.
 *
 * Input: one byte for the length of the file, one for what it starts from, then edits of eleven bytes: place,
 * offset from it (16 bits), value (64 bits). */
#define _GNU_SOURCE
#include "admit.h"
#include "fuzz.h"
#include "log.h"
#include "region.h"
#include "slots.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EDIT = 11 };
enum start { START_BLANK, START_HAMI, START_OURS, STARTS };

static const off_t lengths[] = {
    0,
    1,
    10,
    64,
    1856,
    VG_V0_MIN_LENGTH,
    VG_V0_MIN_LENGTH + 1,
    VG_V1_MIN_LENGTH - 1,
    VG_V1_MIN_LENGTH,
    VG_V1_MIN_LENGTH + 1,
    VG_EXTENSION_OFFSET,
    VG_FILE_LENGTH - 1,
    VG_FILE_LENGTH,
    VG_FILE_LENGTH + 4096,
};
enum { LENGTHS = sizeof lengths / sizeof lengths[0] };

static const off_t places[] = {
    0,
    4,
    offsetof(struct vg_region, device_count),
    offsetof(struct vg_region, limit),
    offsetof(struct vg_region, procs),
    offsetof(struct vg_region, procs) + offsetof(struct vg_slot, status),
    offsetof(struct vg_region, procs) + offsetof(struct vg_slot, used),
    offsetof(struct vg_region, proc_num),
    VG_EXTENSION_OFFSET,
    VG_EXTENSION_OFFSET + 8,
    VG_EXTENSION_OFFSET + offsetof(struct vg_extension, claimed),
    VG_EXTENSION_OFFSET + offsetof(struct vg_extension, totals),
    VG_EXTENSION_OFFSET + offsetof(struct vg_extension, slow),
    VG_EXTENSION_OFFSET + offsetof(struct vg_extension, slots),
    VG_EXTENSION_OFFSET + offsetof(struct vg_extension, next_event),
};

#define U64(value) (value), 0, 0, 0, 0, 0, 0, 0
static const uint8_t blank[] = {0, START_BLANK};
static const uint8_t ours[] = {12, START_OURS, 3, 0, 0, U64(9), 10, 0, 0, U64(255), 11, 0, 0, U64(7)};
static const uint8_t hami[] = {9, START_HAMI, 7, 0, 0, U64(3), 6, 32, 0, U64(200), 5, 0, 0, U64(1)};
static const uint8_t foreign[] = {12, START_OURS, 1, 0, 0, U64(2)};
static const uint8_t old[] = {6, START_HAMI};
static const uint8_t other_extension[] = {12, START_OURS, 9, 0, 0, U64(2)};
static const uint8_t absurd[] = {13, START_OURS, 7, 0, 0,   255, 255, 255, 127, 0,   0,   0,
                                 0,  14,         0, 0, 255, 255, 255, 255, 255, 255, 255, 255};

static const uint8_t wraps[] = {12, START_OURS, 7,   0,   0,   U64(9), 10,  0,   0,   U64(255), 11,
                                0,  0,          250, 255, 255, 255,    255, 255, 255, 255};

#define SEED(bytes) {bytes, sizeof bytes}
const struct fuzz_seed fuzz_seeds[] = {
    SEED(blank),           SEED(ours),   SEED(hami),  SEED(foreign), SEED(old),
    SEED(other_extension), SEED(absurd), SEED(wraps),
};
const size_t fuzz_seed_count = sizeof fuzz_seeds / sizeof fuzz_seeds[0];

static char path[4096];

static void remove_file(void) {
    unlink(path);
}

static int make_file(void) {
    const char *directory = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/fuzz-XXXXXX.cache", directory != NULL ? directory : P_tmpdir);
    int fd = mkostemps(path, 6, O_CLOEXEC);
    FUZZ_CHECK(fd >= 0);
    atexit(remove_file);
    return fd;
}

static void put(int fd, off_t offset, const void *bytes, size_t length, off_t end) {
    if (offset < end) {
        if (offset + (off_t)length > end)
            length = (size_t)(end - offset);
        FUZZ_CHECK(pwrite(fd, bytes, length, offset) == (ssize_t)length);
    }
}

static void write_file(int fd, off_t length, enum start start, const uint8_t *edits, size_t size) {
    const uint32_t head[3] = {VG_MAGIC, VG_MAJOR, VG_MINOR};
    const uint32_t version[2] = {VG_EXTENSION_VERSION, VG_EXTENSION_LENGTH};
    const uint64_t one = 1;
    FUZZ_CHECK(ftruncate(fd, 0) == 0 && ftruncate(fd, length) == 0);
    if (start != START_BLANK) {
        put(fd, 0, head, sizeof head, length);
        put(fd, offsetof(struct vg_region, device_count), &one, sizeof one, length);
        put(fd, offsetof(struct vg_region, uuid), "GPU-x", 5, length);
    }
    if (start == START_OURS) {
        put(fd, VG_EXTENSION_OFFSET, "VGPUEXT1", 8, length);
        put(fd, VG_EXTENSION_OFFSET + 8, version, sizeof version, length);
    }
    for (; size >= EDIT; edits += EDIT, size -= EDIT) {
        off_t offset = places[edits[0] % (sizeof places / sizeof places[0])];
        put(fd, offset + edits[1] + 256 * edits[2], edits + 3, 8, length);
    }
}

/* What a process does with a region that it has joined. */
static void use(struct vg_space *space) {
    const uint64_t limit = (uint64_t)1 << 30;
    FUZZ_CHECK(space->region != NULL && space->extension != NULL);
    FUZZ_CHECK(space->region->magic == VG_MAGIC && space->region->major == VG_MAJOR);
    for (int d = 0; d < VG_MAX_DEVICES; d++) /* as an NVML client, which takes no slot */
        vg_slots_usage(space, d);
    vg_slot_find(space, getpid(), true, true);
    vg_slot_claim(space);
    FUZZ_CHECK(space->own != NULL && space->own_totals != NULL && space->slot < VG_MAX_SLOTS);
    FUZZ_CHECK(vg_region_slots(space->region) <= VG_MAX_SLOTS);
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        vg_slots_usage(space, d);
        vg_reserved_total(space, d);
        FUZZ_CHECK(vg_slot_own_usage(space, d) == 0);
    }
    FUZZ_CHECK(space->slot < 0 || vg_slot_find(space, getpid(), true, false) >= 0);
    vg_slot_find(space, 1, true, true);
    if (vg_admit(space, 0, 512, limit, NULL)) {
        vg_slot_add(space, 0, VG_KIND_DATA, 512);
        FUZZ_CHECK(vg_slot_own_usage(space, 0) == 512);
        vg_slot_subtract(space, 0, VG_KIND_DATA, 512);
        vg_unreserve(space, 0, 512);
    }
    vg_slot_add(space, 0, VG_KIND_DATA, 4096);
    atomic_store(&space->own->used[0].total, 77);
    vg_slot_mend(space);
    vg_slot_mend(space);
    FUZZ_CHECK(vg_slot_own_usage(space, 0) == 4096 && vg_reserved_total(space, 0) >= 4096);
    vg_slot_subtract(space, 0, VG_KIND_DATA, 4096);
    vg_unreserve(space, 0, 4096);
    vg_region_replaced(space);
    vg_region_event(space, VG_EVENT_REFUSAL, -1, 1);
    struct vg_section section;
    if (vg_section_try(&section, &space->locks, VG_LOCK_SWEEP) == VG_LOCK_GRANTED) {
        vg_slots_reclaim(space, &section, -1);
        vg_section_leave(&section);
    }
    vg_slot_release(space);
}

static void leave(struct vg_space *space) {
    if (space->slot >= 0)
        vg_long_lock_drop(&space->life);
    if (!space->shared_extension && space->extension != NULL)
        munmap(space->extension, VG_EXTENSION_LENGTH);
    munmap(space->region, VG_FILE_LENGTH);
}

/* libvgpu.md 3.4 and 3.8, for a file whose name ends in .cache. */
static enum vg_region_result expected(const char *head, off_t length) {
    int32_t words[2];
    memcpy(words, head, sizeof words);
    if (words[0] != VG_MAGIC || length < VG_V0_MIN_LENGTH)
        return VG_REGION_CREATED;
    return length < VG_V1_MIN_LENGTH || words[1] != VG_MAJOR ? VG_REGION_FOREIGN : VG_REGION_JOINED;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct vg_region_seed seed = {.device_count = 1, .uuids = {"GPU-y"}, .limits = {1 << 20}};
    static int fd = -1;
    static struct vg_space space;
    char before[64] = "", after[64] = "";
    if (size < 2)
        return 0;
    if (fd < 0)
        fd = make_file();
    vg_log_configure(VG_LOG_SILENT, NULL);
    off_t length = lengths[data[0] % LENGTHS];
    write_file(fd, length, (enum start)(data[1] % STARTS), data + 2, size - 2);
    ssize_t had = pread(fd, before, sizeof before, 0);
    enum vg_region_result result = vg_region_open(&space, path, &seed);
    vg_region_settle(&space);
    FUZZ_CHECK(result == expected(before, length));
    if (result != VG_REGION_FOREIGN) {
        FUZZ_CHECK(result == VG_REGION_JOINED || space.region->limit[0] == 1 << 20);
        use(&space);
        leave(&space);
    } else {
        struct stat st;
        FUZZ_CHECK(fstat(fd, &st) == 0 && st.st_size == length);
        FUZZ_CHECK(pread(fd, after, sizeof after, 0) == had && memcmp(before, after, sizeof before) == 0);
    }
    return 0;
}
