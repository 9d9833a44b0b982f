#define _GNU_SOURCE
#include "admit.h"

#include "slots.h"
#include "util.h"

#include <sched.h>
#include <unistd.h>

static const uint64_t lock_timeout_ns = 1000000000u;
static const uint64_t past_holder_ns = 10000000u;
static const uint64_t undecided_timeout_ns = 100000000u;
static const uint64_t largest_limit = (uint64_t)1 << 45;

enum { TOO_MANY_ATTEMPTS = 255, YIELDS = 20 };

static _Atomic uint64_t *own_total(const struct vg_space *space, int device) {
    return &space->own_totals[(unsigned)device * space->totals_stride];
}

/* One pass over the totals. `*undecided` gets the attempts seen in the very values that were added. */
static uint64_t pass(const struct vg_space *space, int device, uint64_t *undecided) {
    const uint64_t mask = VG_ATTEMPT_MASK;
    uint64_t sum = 0, attempts = 0;
    unsigned used = vg_region_slots(space->region);
    if (space->shared_extension) {
        const _Atomic uint64_t *row = vg_total(space->extension, device, 0);
        for (unsigned k = 0; k < used; k++) {
            uint64_t value = atomic_load_explicit(&row[k], memory_order_relaxed);
            sum += value & ~mask;
            attempts += value & mask;
        }
    }
    if (!space->shared_extension || space->slot < 0) {
        uint64_t value = atomic_load_explicit(own_total(space, device), memory_order_relaxed);
        sum += value & ~mask;
        attempts += value & mask;
    }
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
    if (pass(space, device, &undecided) <= limit) {
        decide(space, device);
        return true;
    }
    withdraw(space, device, size);
    return false;
}

/* Holding the admission lock: decides the own attempt. `*spent` adds up over both entries. */
static bool settle_attempt(struct vg_space *space, struct vg_section *section, int device, uint64_t limit,
                           uint64_t *spent) {
    uint64_t start = vg_now(), undecided;
    bool reclaimed = false, admitted = false;
    for (unsigned clean_over = 0, unclean = 0; clean_over < 2;) {
        uint64_t sum = pass(space, device, &undecided);
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
        pause = pause < 2500000 ? pause * 2 : 5000000;
    }
    _Atomic uint32_t *slow = &space->extension->slow[device];
    atomic_store(slow, (uint32_t)getpid());
    attempt(space, device, size);
    bool admitted = settle_attempt(space, &section, device, limit, spent);
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
    if (first != ENTRY_OVER)
        return first == ENTRY_ADMITTED;
    if (settle != NULL)
        settle();
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
        uint64_t undecided, others = vg_slots_usage(space, device) - vg_slot_own_usage(space, device);
        unsigned used = vg_region_slots(space->region);
        for (unsigned k = 0; k < used; k++)
            if (space->region->procs[k].status != VG_SLOT_FREE && (int)k != space->slot)
                others += atomic_load(&space->region->procs[k].used[device].offset);
        uint64_t sum = others + pass(space, device, &undecided);
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
        pass(space, device, &undecided) <= limit) {
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
    return pass(space, device, &undecided);
}
