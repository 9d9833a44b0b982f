#define _GNU_SOURCE
#include "track.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

enum { STRIPES = 64, FIRST_CAPACITY = 128 };
enum state { STATE_EMPTY, STATE_LIVE, STATE_FREEING };

/* meta: size / 512 in bits 0-39, device 40-43, kind 44-46, state 47-48, managed 49, pooled 50. */
struct entry {
    uint64_t key, meta, context;
};

struct stripe {
    _Atomic uint32_t lock;
    uint32_t used;
    uint64_t capacity; /* a power of two, or 0 */
    struct entry *entries;
    char pad[40];
};
_Static_assert(sizeof(struct stripe) == 64, "a stripe is a cache line");

static struct stripe stripes[STRIPES];

static uint64_t make_meta(enum vg_record_kind kind, const struct vg_record *record, enum state state) {
    return (record->size >> 9 & 0xffffffffffu) | (uint64_t)(unsigned)record->device << 40 |
           (uint64_t)kind << 44 | (uint64_t)state << 47 | (uint64_t)record->managed << 49 |
           (uint64_t)record->pooled << 50;
}

static enum state state_of(const struct entry *entry) {
    return (enum state)(entry->meta >> 47 & 3);
}

static bool is(const struct entry *entry, enum vg_record_kind kind, uint64_t key) {
    return entry->key == key && (entry->meta >> 44 & 7) == (uint64_t)kind;
}

static void set_state(struct entry *entry, enum state state) {
    entry->meta = (entry->meta & ~((uint64_t)3 << 47)) | (uint64_t)state << 47;
}

static struct vg_record record_of(const struct entry *entry) {
    return (struct vg_record){.size = (entry->meta & 0xffffffffffu) << 9,
                              .context = entry->context,
                              .device = (int)(entry->meta >> 40 & 15),
                              .managed = (entry->meta >> 49 & 1) != 0,
                              .pooled = (entry->meta >> 50 & 1) != 0};
}

static uint64_t hash(enum vg_record_kind kind, uint64_t key) {
    uint64_t x = (key ^ (uint64_t)kind << 61) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 32;
}

static struct stripe *lock_stripe(uint64_t h) {
    struct stripe *stripe = &stripes[h >> 58];
    for (unsigned spins = 0; atomic_exchange_explicit(&stripe->lock, 1, memory_order_acquire) != 0;) {
        while (atomic_load_explicit(&stripe->lock, memory_order_relaxed) != 0)
            if (++spins > 100)
                sched_yield();
    }
    return stripe;
}

static void unlock(struct stripe *stripe) {
    atomic_store_explicit(&stripe->lock, 0, memory_order_release);
}

/* The entry, or the empty place where it would be. The table is never full. */
static struct entry *find(const struct stripe *stripe, uint64_t h, enum vg_record_kind kind, uint64_t key) {
    uint64_t mask = stripe->capacity - 1;
    for (uint64_t i = h & mask;; i = (i + 1) & mask) {
        struct entry *entry = &stripe->entries[i];
        if (state_of(entry) == STATE_EMPTY || is(entry, kind, key))
            return entry;
    }
}

static uint64_t hash_of(const struct entry *entry) {
    return hash((enum vg_record_kind)(entry->meta >> 44 & 7), entry->key);
}

static bool grow(struct stripe *stripe) {
    uint64_t capacity = stripe->capacity == 0 ? FIRST_CAPACITY : stripe->capacity * 2;
    struct stripe bigger = {.capacity = capacity};
    bigger.entries = mmap(NULL, capacity * sizeof(struct entry), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bigger.entries == MAP_FAILED)
        return false;
    for (uint64_t i = 0; i < stripe->capacity; i++) {
        const struct entry *entry = &stripe->entries[i];
        if (state_of(entry) != STATE_EMPTY)
            *find(&bigger, hash_of(entry), (enum vg_record_kind)(entry->meta >> 44 & 7), entry->key) = *entry;
    }
    if (stripe->entries != NULL)
        munmap(stripe->entries, stripe->capacity * sizeof(struct entry));
    stripe->entries = bigger.entries;
    stripe->capacity = capacity;
    return true;
}

/* Takes the entry out and moves later ones of the same chain up, so that no tombstones are needed. */
static void erase(struct stripe *stripe, struct entry *entry) {
    uint64_t mask = stripe->capacity - 1, hole = (uint64_t)(entry - stripe->entries);
    for (uint64_t i = (hole + 1) & mask; state_of(&stripe->entries[i]) != STATE_EMPTY; i = (i + 1) & mask) {
        uint64_t home = hash_of(&stripe->entries[i]) & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            stripe->entries[hole] = stripe->entries[i];
            hole = i;
        }
    }
    memset(&stripe->entries[hole], 0, sizeof(struct entry));
    stripe->used--;
}

bool vg_track_insert(enum vg_record_kind kind, uint64_t key, const struct vg_record *record) {
    uint64_t h = hash(kind, key);
    struct stripe *stripe = lock_stripe(h);
    bool room =
        (stripe->used + 1) * 4 <= stripe->capacity * 3 || grow(stripe) || stripe->used + 1 < stripe->capacity;
    if (room) {
        struct entry *entry = find(stripe, h, kind, key);
        if (state_of(entry) == STATE_EMPTY)
            stripe->used++;
        *entry = (struct entry){
            .key = key, .meta = make_meta(kind, record, STATE_LIVE), .context = record->context};
    }
    unlock(stripe);
    return room;
}

bool vg_track_freeing(enum vg_record_kind kind, uint64_t key, struct vg_record *record) {
    uint64_t h = hash(kind, key);
    struct stripe *stripe = lock_stripe(h);
    struct entry *entry = stripe->capacity != 0 ? find(stripe, h, kind, key) : NULL;
    bool found = entry != NULL && state_of(entry) == STATE_LIVE;
    if (found) {
        *record = record_of(entry);
        set_state(entry, STATE_FREEING);
    }
    unlock(stripe);
    return found;
}

void vg_track_finish(enum vg_record_kind kind, uint64_t key, bool freed) {
    uint64_t h = hash(kind, key);
    struct stripe *stripe = lock_stripe(h);
    struct entry *entry = stripe->capacity != 0 ? find(stripe, h, kind, key) : NULL;
    if (entry != NULL && state_of(entry) == STATE_FREEING) {
        if (freed)
            erase(stripe, entry);
        else
            set_state(entry, STATE_LIVE);
    }
    unlock(stripe);
}

void vg_track_drop(uint64_t context, int device, void (*taken)(const struct vg_record *record)) {
    for (unsigned s = 0; s < STRIPES; s++) {
        struct stripe *stripe = lock_stripe((uint64_t)s << 58);
        for (uint64_t i = 0; i < stripe->capacity;) {
            struct entry *entry = &stripe->entries[i];
            struct vg_record record = record_of(entry);
            bool matches = state_of(entry) == STATE_LIVE && record.device == device &&
                           (context == 0 || record.context == context);
            if (!matches) {
                i++;
                continue;
            }
            erase(stripe, entry); /* may move another entry to i, or, past the end, to the front */
            taken(&record);
        }
        unlock(stripe);
    }
}

uint64_t vg_track_count(void) {
    uint64_t count = 0;
    for (unsigned s = 0; s < STRIPES; s++) {
        struct stripe *stripe = lock_stripe((uint64_t)s << 58);
        count += stripe->used;
        unlock(stripe);
    }
    return count;
}

void vg_track_reset(void) {
    memset(stripes, 0, sizeof stripes);
}
