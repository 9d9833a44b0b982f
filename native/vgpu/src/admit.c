#define _GNU_SOURCE
#include "admit.h"

#include "slots.h"
#include "util.h"

#include <sched.h>
#include <unistd.h>

static const uint64_t lock_timeout_ns = 1000000000u;
static const uint64_t past_holder_ns = 2000000u;
static const uint64_t undecided_timeout_ns = 100000000u;
static const uint64_t largest_limit = (uint64_t)1 << 45;

enum { TOO_MANY_ATTEMPTS = 255, YIELDS = 20 };

static _Atomic uint64_t *own_total(const struct vg_space *space, int device) {
    return &space->own_totals[(unsigned)device * space->totals_stride];
}

/* The same as the loop of pass(), for totals that somebody has written to: what no process can hold counts as
 * nothing, so that no sum wraps round and makes room. */
static uint64_t plausible_sum(const _Atomic uint64_t *row, unsigned used, int slot, uint64_t *attempts,
                              uint64_t *own) {
    const uint64_t mask = VG_ATTEMPT_MASK;
    uint64_t sum = *attempts = *own = 0;
    for (unsigned k = 0; k < used; k++) {
        uint64_t value = atomic_load_explicit(&row[k], memory_order_relaxed);
        if (value >= vg_implausible)
            continue;
        sum += value & ~mask;
        *attempts += value & mask;
        *own = (int)k == slot ? value & ~mask : *own;
    }
    return sum;
}

/* One pass over the totals. `*undecided` gets the attempts seen in the very values that were added; `pending`
 * is what the caller's own attempt has added. */
static uint64_t pass(const struct vg_space *space, int device, uint64_t pending, uint64_t *undecided) {
    const uint64_t mask = VG_ATTEMPT_MASK;
    uint64_t known =
        vg_own_bytes(space, device) + pending; /* first: what is freed meanwhile counts as before */
    uint64_t sum = 0, attempts = 0, own = 0, bits = 0;
    unsigned used = vg_region_slots(space->region);
    if (space->shared_extension) {
        const _Atomic uint64_t *row = vg_total(space->extension, device, 0);
        for (unsigned k = 0; k < used; k++) {
            uint64_t value = atomic_load_explicit(&row[k], memory_order_relaxed);
            sum += value & ~mask;
            attempts += value & mask;
            own = (int)k == space->slot ? value & ~mask : own;
            bits |= value;
        }
        if (bits >= vg_implausible)
            sum = plausible_sum(row, used, space->slot, &attempts, &own);
    }
    if (!space->shared_extension || space->slot < 0 || (unsigned)space->slot >= used) {
        uint64_t value = atomic_load_explicit(own_total(space, device), memory_order_relaxed);
        own = value < vg_implausible ? value & ~mask : 0;
        sum += own;
        attempts += value & mask;
    }
    if (own < known) /* somebody has written to the region */
        sum += known - own;
    atomic_thread_fence(memory_order_acquire);
    *undecided = attempts;
    return sum;
}

/* Orders the own addition before the reads that follow. On x86-64 the locked add has done so already. */
static inline void full_fence(void) {
#if defined(__x86_64__)
    atomic_signal_fence(memory_order_seq_cst);
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static void withdraw(struct vg_space *space, int device, uint64_t size) {
    atomic_fetch_sub_explicit(own_total(space, device), size + 1, memory_order_release);
}

static void decide(struct vg_space *space, int device) {
    atomic_fetch_sub_explicit(own_total(space, device), 1, memory_order_release);
}

static void attempt(struct vg_space *space, int device, uint64_t size) {
    atomic_fetch_add(own_total(space, device), size + 1);
    full_fence();
}

static void raise_peak(struct vg_space *space, int device, uint64_t usage) {
    _Atomic uint64_t *peak = &space->extension->devices[device].peak;
    uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < usage && !atomic_compare_exchange_weak(peak, &seen, usage))
        continue;
}

/* Safe while somebody else holds the admission lock: of all attempts the last to fence has seen the others.
 */
static bool attempt_past_holder(struct vg_space *space, int device, uint64_t size, uint64_t limit) {
    uint64_t undecided;
    attempt(space, device, size);
    if (pass(space, device, size, &undecided) <= limit) {
        decide(space, device);
        return true;
    }
    withdraw(space, device, size);
    return false;
}

/* Holding the admission lock: decides the own attempt. `*spent` adds up over both entries. */
static bool settle_attempt(struct vg_space *space, struct vg_section *section, int device, uint64_t size,
                           uint64_t limit, uint64_t *spent) {
    uint64_t start = vg_now(), undecided;
    bool reclaimed = false, admitted = false;
    for (unsigned clean_over = 0, unclean = 0; clean_over < 2;) {
        uint64_t sum = pass(space, device, size, &undecided);
        if (sum <= limit) {
            raise_peak(space, device, sum);
            admitted = true;
            break;
        }
        if (undecided <= 1)
            clean_over++;
        if (!reclaimed) {
            vg_slots_reclaim(space, section, device);
            reclaimed = true;
        } else if (undecided > 1) {
            if (++unclean <= YIELDS) {
                sched_yield();
            } else {
                vg_pause_ns(50000);
                vg_slots_reclaim(space, section, device);
            }
        }
        if (*spent + (vg_now() - start) > undecided_timeout_ns)
            break;
    }
    *spent += vg_now() - start;
    return admitted;
}

enum entry { ENTRY_ADMITTED, ENTRY_OVER, ENTRY_STUCK };

static enum entry enter_slow(struct vg_space *space, int device, uint64_t size, uint64_t limit,
                             uint64_t *spent) {
    struct vg_section section;
    uint64_t now = vg_now(), deadline = now + lock_timeout_ns, past = now + past_holder_ns, pause = 50000;
    for (;;) {
        enum vg_lock_result result = vg_section_try(&section, &space->locks, VG_LOCK_ADMISSION + device);
        if (result == VG_LOCK_GRANTED)
            break;
        now = vg_now();
        if (result == VG_LOCK_FAILED || now >= past) {
            if (attempt_past_holder(space, device, size, limit))
                return ENTRY_ADMITTED;
            past = now + past_holder_ns;
        }
        if (result == VG_LOCK_FAILED || now >= deadline)
            return ENTRY_STUCK;
        vg_pause_ns(pause / 2 + now % (pause / 2));
        pause = pause < 1000000 ? pause * 2 : pause;
    }
    _Atomic uint32_t *slow = &space->extension->slow[device];
    atomic_store(slow, (uint32_t)getpid());
    attempt(space, device, size);
    bool admitted = settle_attempt(space, &section, device, size, limit, spent);
    if (admitted)
        decide(space, device);
    else
        withdraw(space, device, size);
    atomic_store_explicit(slow, 0, memory_order_release);
    vg_section_leave(&section);
    return admitted ? ENTRY_ADMITTED : ENTRY_OVER;
}

static bool admit_slow(struct vg_space *space, int device, uint64_t size, uint64_t limit,
                       void (*settle)(void)) {
    uint64_t spent = 0;
    enum entry first = enter_slow(space, device, size, limit, &spent);
    if (first == ENTRY_ADMITTED)
        return true;
    if (settle != NULL)
        settle();
    if (first == ENTRY_STUCK)
        return attempt_past_holder(space, device, size, limit);
    return enter_slow(space, device, size, limit, &spent) == ENTRY_ADMITTED;
}

/* With a foreign extension block: the slots' own totals are summed, always under the admission lock. What is
 * reserved and not yet in the total stands in `offset`, which is 0 otherwise, so that the others see it. */
static bool admit_by_slots(struct vg_space *space, int device, uint64_t size, uint64_t limit) {
    struct vg_section section;
    if (vg_section_enter(&section, &space->locks, VG_LOCK_ADMISSION + device, vg_now() + lock_timeout_ns) !=
        VG_LOCK_GRANTED)
        return false;
    bool fits = false;
    for (int round = 0; round < 2 && !fits; round++) {
        uint64_t undecided, others = 0;
        unsigned used = vg_region_slots(space->region);
        for (unsigned k = 0; k < used; k++) {
            const struct vg_usage *bytes = &space->region->procs[k].used[device];
            uint64_t total = atomic_load(&bytes->total), reserved = atomic_load(&bytes->offset);
            if (space->region->procs[k].status != VG_SLOT_FREE && (int)k != space->slot)
                others += (total < vg_implausible ? total : 0) + (reserved < vg_implausible ? reserved : 0);
        }
        uint64_t sum = others + pass(space, device, 0, &undecided);
        fits = sum <= limit && size <= limit - sum;
        if (!fits && round == 0)
            vg_slots_reclaim(space, &section, device);
    }
    if (fits)
        vg_reserve(space, device, size);
    vg_section_leave(&section);
    return fits;
}

bool vg_admit(struct vg_space *space, int device, uint64_t size, uint64_t limit, void (*settle)(void)) {
    if (limit > largest_limit)
        limit = largest_limit;
    if (size > limit)
        return false;
    if (!space->shared_extension)
        return admit_by_slots(space, device, size, limit);
    const _Atomic uint32_t *slow = &space->extension->slow[device];
    if (atomic_load_explicit(slow, memory_order_acquire) != 0)
        return admit_slow(space, device, size, limit, settle);
    uint64_t before = atomic_fetch_add(own_total(space, device), size + 1), undecided;
    full_fence();
    if ((before & VG_ATTEMPT_MASK) < TOO_MANY_ATTEMPTS && atomic_load(slow) == 0 &&
        pass(space, device, size, &undecided) <= limit) {
        decide(space, device);
        return true;
    }
    withdraw(space, device, size);
    return admit_slow(space, device, size, limit, settle);
}

void vg_reserve(struct vg_space *space, int device, uint64_t size) {
    if (!space->shared_extension)
        atomic_fetch_add(&space->own->used[device].offset, size);
    atomic_fetch_add_explicit(own_total(space, device), size, memory_order_release);
}

void vg_unreserve(struct vg_space *space, int device, uint64_t size) {
    atomic_fetch_sub_explicit(own_total(space, device), size, memory_order_release);
    if (!space->shared_extension)
        atomic_fetch_sub(&space->own->used[device].offset, size);
}

uint64_t vg_reserved_total(const struct vg_space *space, int device) {
    uint64_t undecided;
    return pass(space, device, 0, &undecided);
}
