#define _GNU_SOURCE
#include "slots.h"

#include "log.h"
#include "util.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* For a process that got no slot in the region. */
static struct {
    struct vg_slot slot;
    struct vg_ext_slot extension;
    _Atomic uint64_t totals[VG_MAX_DEVICES];
} alone;

static void clear_u64(_Atomic uint64_t *word) {
    if (atomic_load_explicit(word, memory_order_relaxed) != 0)
        atomic_store(word, 0);
}

static void clear_u32(_Atomic uint32_t *word) {
    if (atomic_load_explicit(word, memory_order_relaxed) != 0)
        atomic_store(word, 0);
}

static void clear_usage(struct vg_usage *used) {
    clear_u64(&used->total);
    clear_u64(&used->context);
    clear_u64(&used->module);
    clear_u64(&used->data);
    clear_u64(&used->offset);
    clear_u64(&used->residual);
}

/* What a process holds in managed memory because the card was full is gone with it. */
static void clear_managed(struct vg_space *space, int device, struct vg_usage *used) {
    uint64_t gone = atomic_load_explicit(&used->managed, memory_order_relaxed);
    if (gone == 0)
        return;
    atomic_store(&used->managed, 0);
    _Atomic uint64_t *all = &space->extension->devices[device].oversubscribed;
    for (uint64_t seen = atomic_load(all);
         !atomic_compare_exchange_weak(all, &seen, seen > gone ? seen - gone : 0);)
        continue;
}

/* Everything but the bit in `claimed`, in the order that readers and the sum rely on; of the totals those of
 * the first `devices` devices. */
static void clear_slot(struct vg_space *space, unsigned k, unsigned devices) {
    struct vg_slot *slot = &space->region->procs[k];
    atomic_store(&slot->status, VG_SLOT_FREE);
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        clear_usage(&slot->used[d]);
        clear_managed(space, d, &slot->used[d]);
        clear_u64(&slot->monitorused[d]);
        clear_u64(&slot->util[d].decoder);
        clear_u64(&slot->util[d].encoder);
        clear_u64(&slot->util[d].sm);
        if (space->shared_extension && (unsigned)d < devices)
            clear_u64(vg_total(space->extension, d, k));
    }
    atomic_store(&slot->hostpid, 0);
    if (space->shared_extension) {
        struct vg_ext_slot *extra = &space->extension->slots[k];
        clear_u64(&extra->start);
        clear_u64(&extra->pid_namespace);
        clear_u32(&extra->flags);
        clear_u32(&extra->host_pid_path);
        clear_u32(&extra->broker_error);
        clear_u64(&extra->throttled);
        clear_u64(&extra->refusals);
    }
    atomic_store(&slot->pid, 0);
}

static bool set_bit(struct vg_extension *extension, unsigned k) {
    uint64_t bit = (uint64_t)1 << (k % 64);
    return (atomic_fetch_or(&extension->claimed[k / 64], bit) & bit) == 0;
}

static bool bit_is_set(struct vg_extension *extension, unsigned k) {
    return (atomic_load_explicit(&extension->claimed[k / 64], memory_order_relaxed) >> (k % 64)) & 1;
}

static void clear_bit(struct vg_extension *extension, unsigned k) {
    atomic_fetch_and_explicit(&extension->claimed[k / 64], ~((uint64_t)1 << (k % 64)), memory_order_release);
}

static void raise_proc_num(struct vg_region *region, unsigned count) {
    int32_t seen = atomic_load(&region->proc_num);
    while ((seen < (int32_t)count || seen > VG_MAX_SLOTS) &&
           !atomic_compare_exchange_weak(&region->proc_num, &seen, (int32_t)count))
        continue;
}

static uint64_t pid_namespace(void) {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

static void publish(struct vg_space *space, unsigned k, unsigned devices) {
    space->slot = (int)k;
    space->own = &space->region->procs[k];
    clear_slot(space, k, devices);
    space->own->pid = getpid();
    if (space->shared_extension) {
        space->own_extension = &space->extension->slots[k];
        space->own_totals = vg_total(space->extension, 0, k);
        space->totals_stride = VG_MAX_SLOTS;
    } else {
        space->own_extension = &alone.extension;
        space->own_totals = alone.totals;
        space->totals_stride = 1;
    }
    space->own_extension->start = vg_clock(CLOCK_BOOTTIME);
    space->own_extension->pid_namespace = space->pid_namespace;
    space->own_extension->flags = space->life.kept_fd > 0 ? VG_SLOT_FLAG_KEPT_DESCRIPTOR : 0;
    if (!vg_lock_lives() &&
        (atomic_fetch_or(&space->extension->flags, VG_FLAG_NO_OFD_LOCKS) & VG_FLAG_NO_OFD_LOCKS) == 0)
        vg_region_event(space, VG_EVENT_NO_OFD_LOCKS, -1, 0);
    atomic_store_explicit(&space->own->status, VG_SLOT_RUNNING, memory_order_release);
    raise_proc_num(space->region, k + 1);
}

/* A slot whose owner keeps its lock by a descriptor that its program may have closed. */
static bool may_live(const struct vg_space *space, unsigned k) {
    if (!space->shared_extension || (space->extension->slots[k].flags & VG_SLOT_FLAG_KEPT_DESCRIPTOR) == 0)
        return false;
    int32_t pid = space->region->procs[k].pid;
    if (space->extension->slots[k].pid_namespace != pid_namespace())
        return true;
    return pid > 0 && (kill(pid, 0) == 0 || errno != ESRCH);
}

static enum vg_lock_result own_byte(struct vg_space *space, unsigned k) {
    if (space->locks.path != NULL && !vg_lock_lives())
        return VG_LOCK_GRANTED;
    enum vg_lock_result result = vg_long_lock_take(&space->life, &space->locks, VG_LOCK_SLOT + (off_t)k);
    if (result != VG_LOCK_GRANTED)
        return space->locks.path != NULL && !vg_lock_lives() ? VG_LOCK_GRANTED : result;
    if (!may_live(space, k))
        return VG_LOCK_GRANTED;
    vg_long_lock_drop(&space->life);
    return VG_LOCK_BUSY;
}

/* A slot without its bit was never used, or cleared before it lost the bit: its totals are zero, whoever has
 * not tampered with them, and lie on a page for each device. Those of the region's own devices are looked at.
 */
static unsigned devices_to_clear(const struct vg_region *region) {
    uint64_t count = region->device_count;
    return count > 0 && count < VG_MAX_DEVICES ? (unsigned)count : VG_MAX_DEVICES;
}

/* Claims by the bitmap first, because each lock call walks all locks of the file. */
static enum vg_lock_result claim_from(struct vg_space *space, unsigned first, unsigned end) {
    for (unsigned k = first; k < end; k++) {
        if (bit_is_set(space->extension, k) || !set_bit(space->extension, k))
            continue;
        enum vg_lock_result result = own_byte(space, k);
        if (result == VG_LOCK_GRANTED)
            publish(space, k, devices_to_clear(space->region));
        else if (result == VG_LOCK_FAILED)
            clear_bit(space->extension, k);
        if (result != VG_LOCK_BUSY)
            return result;
    }
    return VG_LOCK_BUSY;
}

/* A dead owner's slot, two probes from a place of our own. */
static enum vg_lock_result claim_dead(struct vg_space *space, unsigned end) {
    enum vg_lock_result result = VG_LOCK_BUSY;
    for (unsigned i = 0; i < 2 && end > 0 && vg_lock_lives() && result == VG_LOCK_BUSY; i++) {
        unsigned k = (unsigned)((vg_now() / 64 + (uint64_t)getpid() * 2654435761u + i) % end);
        if (vg_seen_held(&space->locks, VG_LOCK_SLOT + (off_t)k))
            continue;
        result = own_byte(space, k);
        if (result == VG_LOCK_GRANTED) {
            set_bit(space->extension, k);
            publish(space, k, VG_MAX_DEVICES);
        }
    }
    return result;
}

static enum vg_lock_result claim(struct vg_space *space) {
    unsigned used = vg_region_slots(space->region);
    enum vg_lock_result result = claim_from(space, 0, used);
    if (result == VG_LOCK_BUSY && space->locks.path != NULL)
        result = claim_dead(space, used);
    return result == VG_LOCK_BUSY ? claim_from(space, used, VG_MAX_SLOTS) : result;
}

bool vg_slot_claim(struct vg_space *space) {
    space->pid_namespace = pid_namespace(); /* asked of the kernel once: each time costs as much as a claim */
    enum vg_lock_result claimed = claim(space);
    vg_region_settle(space);
    if (claimed == VG_LOCK_FAILED)
        VG_ERROR("the locks of the region cannot be opened; calls are refused until they can");
    if (claimed != VG_LOCK_BUSY)
        return claimed == VG_LOCK_GRANTED;
    VG_ERROR("all %d slots of the region are taken: this process is counted alone", VG_MAX_SLOTS);
    space->slot = -1;
    space->own = &alone.slot;
    space->own_extension = &alone.extension;
    space->own_totals = alone.totals;
    space->totals_stride = 1;
    space->own->pid = getpid();
    space->own->status = VG_SLOT_RUNNING;
    return true;
}

void vg_slot_release(struct vg_space *space) {
    if (space->slot < 0 || !space->shared_extension)
        return;
    for (int d = 0; d < VG_MAX_DEVICES; d++)
        if (atomic_load(vg_total(space->extension, d, (unsigned)space->slot)) != 0)
            return;
    clear_slot(space, (unsigned)space->slot, VG_MAX_DEVICES);
    clear_bit(space->extension, (unsigned)space->slot);
}

unsigned vg_slots_reclaim(struct vg_space *space, struct vg_section *section, int device) {
    unsigned cleared = 0, used = vg_region_slots(space->region);
    for (unsigned k = 0; k < used; k++) {
        if ((int)k == space->slot)
            continue;
        uint64_t held = 0;
        for (int d = 0; d < VG_MAX_DEVICES; d++)
            if (device < 0 || device == d)
                held += space->shared_extension ? atomic_load(vg_total(space->extension, d, k))
                                                : atomic_load(&space->region->procs[k].used[d].total);
        bool wanted = device >= 0 ? held != 0 : bit_is_set(space->extension, k) || held != 0;
        if (!wanted || !vg_section_take(section, VG_LOCK_SLOT + (off_t)k))
            continue;
        if (!may_live(space, k)) {
            clear_slot(space, k, VG_MAX_DEVICES);
            clear_bit(space->extension, k);
            vg_region_event(space, VG_EVENT_RECLAIMED, device, held & ~(uint64_t)VG_ATTEMPT_MASK);
            cleared++;
        }
        vg_section_drop(section, VG_LOCK_SLOT + (off_t)k);
    }
    return cleared;
}

uint64_t vg_slots_usage(const struct vg_space *space, int device) {
    uint64_t sum = 0;
    unsigned used = vg_region_slots(space->region);
    for (unsigned k = 0; k < used; k++)
        if (atomic_load_explicit(&space->region->procs[k].status, memory_order_relaxed) != VG_SLOT_FREE)
            sum += atomic_load_explicit(&space->region->procs[k].used[device].total, memory_order_relaxed);
    if (space->slot < 0 && space->own != NULL)
        sum += atomic_load_explicit(&space->own->used[device].total, memory_order_relaxed);
    return sum;
}

uint64_t vg_slot_own_usage(const struct vg_space *space, int device) {
    return space->own != NULL ? atomic_load_explicit(&space->own->used[device].total, memory_order_relaxed)
                              : 0;
}

uint64_t vg_slot_beside_contexts(const struct vg_space *space, int device) {
    uint64_t context = atomic_load(&space->own_bytes[device].kind[VG_KIND_CONTEXT]);
    uint64_t reserved =
        atomic_load(&space->own_totals[(unsigned)device * space->totals_stride]) & ~(uint64_t)VG_ATTEMPT_MASK;
    uint64_t published = vg_own_bytes(space, device);
    uint64_t all = reserved > published && reserved < vg_implausible ? reserved : published;
    return all > context ? all - context : 0;
}

uint64_t vg_slot_changes(const struct vg_space *space) {
    return atomic_load(&space->own->seqlock);
}

int vg_slot_find(const struct vg_space *space, int32_t pid, bool own_namespace, bool host) {
    unsigned used = vg_region_slots(space->region);
    for (unsigned k = 0; k < used && pid != 0; k++) {
        struct vg_slot *slot = &space->region->procs[k];
        if (atomic_load(&slot->status) == VG_SLOT_FREE)
            continue;
        if ((own_namespace && atomic_load(&slot->pid) == pid) || (host && atomic_load(&slot->hostpid) == pid))
            return (int)k;
    }
    return -1;
}

static _Atomic uint64_t *kind_word(struct vg_usage *used, enum vg_kind kind) {
    return kind == VG_KIND_CONTEXT ? &used->context : kind == VG_KIND_MODULE ? &used->module : &used->data;
}

/* Even, and it grows; that two threads may write the same next value does no harm. */
static void bump(struct vg_slot *slot) {
    uint64_t value = atomic_load_explicit(&slot->seqlock, memory_order_relaxed);
    atomic_store_explicit(&slot->seqlock, (value + 2) & ~(uint64_t)1, memory_order_release);
}

void vg_slot_add(struct vg_space *space, int device, enum vg_kind kind, uint64_t bytes) {
    struct vg_usage *used = &space->own->used[device];
    atomic_fetch_add_explicit(&space->own_bytes[device].kind[kind], bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(kind_word(used, kind), bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&used->total, bytes, memory_order_release);
    if (!space->shared_extension)
        atomic_fetch_sub(&used->offset, bytes);
    bump(space->own);
}

void vg_slot_subtract(struct vg_space *space, int device, enum vg_kind kind, uint64_t bytes) {
    struct vg_usage *used = &space->own->used[device];
    if (!space->shared_extension)
        atomic_fetch_add(&used->offset, bytes);
    atomic_fetch_sub_explicit(&space->own_bytes[device].kind[kind], bytes, memory_order_relaxed);
    atomic_fetch_sub_explicit(&used->total, bytes, memory_order_relaxed);
    atomic_fetch_sub_explicit(kind_word(used, kind), bytes, memory_order_release);
    bump(space->own);
}

static void move_word(_Atomic uint64_t *from, _Atomic uint64_t *to) {
    if (from != to && atomic_load_explicit(from, memory_order_relaxed) != 0)
        atomic_fetch_add(to, atomic_exchange(from, 0));
}

void vg_slot_move(struct vg_space *from, struct vg_space *to) {
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        struct vg_usage *old = &from->own->used[d], *new = &to->own->used[d];
        move_word(&from->own_totals[(unsigned)d * from->totals_stride],
                  &to->own_totals[(unsigned)d * to->totals_stride]);
        for (int kind = 0; kind < VG_KINDS; kind++) {
            move_word(&from->own_bytes[d].kind[kind], &to->own_bytes[d].kind[kind]);
            move_word(kind_word(old, (enum vg_kind)kind), kind_word(new, (enum vg_kind)kind));
        }
        move_word(&old->offset, &new->offset);
        move_word(&old->managed, &new->managed);
        move_word(&old->total, &new->total);
    }
    if (from->own != to->own)
        atomic_store(&from->own->status, VG_SLOT_FREE);
}

/* Adds to the word what it lacks of `truth`; `there` is what of it counts. A thread that is just adding makes
 * a difference too, but not twice the same a second apart. */
static void mend(_Atomic uint64_t *word, uint64_t truth, uint64_t there, uint64_t *last) {
    uint64_t difference = truth - there;
    bool again = difference != 0 && difference == *last;
    *last = again ? 0 : difference;
    if (again)
        atomic_fetch_add(word, difference);
}

void vg_slot_mend(struct vg_space *space) {
    static uint64_t last[VG_MAX_DEVICES][VG_KINDS + 2];
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        struct vg_usage *used = &space->own->used[d];
        _Atomic uint64_t *total = &space->own_totals[(unsigned)d * space->totals_stride];
        uint64_t sum = vg_own_bytes(space, d);
        for (int kind = 0; kind < VG_KINDS; kind++) {
            _Atomic uint64_t *word = kind_word(used, (enum vg_kind)kind);
            uint64_t truth = atomic_load(&space->own_bytes[d].kind[kind]);
            mend(word, truth, atomic_load(word), &last[d][kind]);
        }
        mend(&used->total, sum, atomic_load(&used->total), &last[d][VG_KINDS]);
        /* Only what the total lacks is added, unless nobody can hold so much; that of a device without a byte
         * is never touched. */
        uint64_t reserved = sum == 0 ? 0 : atomic_load(total) & ~(uint64_t)VG_ATTEMPT_MASK;
        bool wrong = reserved < sum || reserved >= vg_implausible;
        mend(total, sum, wrong ? reserved : sum, &last[d][VG_KINDS + 1]);
    }
    if (space->slot < 0)
        return;
    unsigned k = (unsigned)space->slot;
    if (atomic_load(&space->own->pid) != getpid())
        atomic_store(&space->own->pid, getpid());
    int32_t gone = VG_SLOT_FREE;
    atomic_compare_exchange_strong(&space->own->status, &gone, VG_SLOT_RUNNING);
    if (space->shared_extension && !bit_is_set(space->extension, k))
        set_bit(space->extension, k);
    raise_proc_num(space->region, k + 1);
}
