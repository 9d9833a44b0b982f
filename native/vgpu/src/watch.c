#define _GNU_SOURCE
#include "watch.h"

#include "admit.h"
#include "elf_walk.h"
#include "learn.h"
#include "process.h"
#include "sample.h"
#include "slots.h"
#include "thread.h"
#include "util.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

enum { STACK = 131072, ROUNDS_A_SECOND = 8, SWEEP_ROUNDS = 5 * ROUNDS_A_SECOND, STALE_SECONDS = 3 };
static const uint64_t round_ns = 1000000000u / ROUNDS_A_SECOND;

static struct vg_long_lock leadership;

static void sweep(struct vg_space *space) {
    struct vg_section section;
    if (vg_section_try(&section, &space->locks, VG_LOCK_SWEEP) != VG_LOCK_GRANTED)
        return;
    vg_slots_reclaim(space, &section, -1);
    vg_section_leave(&section);
}

static void raise_peaks(struct vg_space *space) {
    for (int d = 0; d < VG_MAX_DEVICES; d++) {
        uint64_t usage = vg_reserved_total(space, d);
        _Atomic uint64_t *peak = &space->extension->devices[d].peak;
        uint64_t seen = atomic_load(peak);
        while (seen < usage && !atomic_compare_exchange_weak(peak, &seen, usage))
            continue;
    }
}

static void once_a_second(struct vg_space *space) {
    atomic_store(&space->extension->tick, vg_unix_seconds());
    vg_limits_refresh();
    raise_peaks(space);
}

/* The region was replaced: the new one has a leader already, or it is led from here. */
static bool lead_there(struct vg_space *space) {
    vg_long_lock_drop(&leadership);
    if (vg_long_lock_take(&leadership, &space->locks, VG_LOCK_LEADER) != VG_LOCK_GRANTED && vg_lock_lives()) {
        atomic_store(&vg_gate->leading, false);
        return false;
    }
    atomic_store(&space->extension->leader, (uint32_t)(space->slot + 1));
    return true;
}

static void *lead(void *unused) {
    struct vg_space *space = vg_here();
    (void)unused;
    prctl(PR_SET_NAME, "vgpu-watch");
    vg_thread.in_hook = true; /* its driver calls are our own */
    for (unsigned round = 0, step;; round += step) {
        bool limited = atomic_load(&vg_gate->limited_mask) != 0;
        if (limited)
            vg_learn_reading();
        if (round % ROUNDS_A_SECOND == 0)
            once_a_second(space);
        if (vg_here() != space && !lead_there(space = vg_here()))
            return NULL;
        if (round % SWEEP_ROUNDS == 0)
            sweep(space);
        if (round % (vg_process.config.oom_killer ? ROUNDS_A_SECOND : SWEEP_ROUNDS) == 0)
            vg_sample_memory();
        if (limited || round % SWEEP_ROUNDS == 0)
            vg_sample_utilisation();
        step = limited ? 1 : ROUNDS_A_SECOND - round % ROUNDS_A_SECOND;
        vg_pause_ns(step * round_ns);
    }
    return NULL;
}

/* Resolved at run time: before glibc 2.34 they are in libpthread, and a preload that drags it in changes
 * single-threaded programs. */
static bool start_thread(void) {
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = (int (*)(
        pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))vg_libc_function("pthread_create");
    int (*set_stack)(pthread_attr_t *, size_t) =
        (int (*)(pthread_attr_t *, size_t))vg_libc_function("pthread_attr_setstacksize");
    if (create == NULL)
        return false;
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (set_stack != NULL)
        set_stack(&attributes, STACK);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* of this thread: the new one inherits it */
    int result = create(&thread, &attributes, lead, NULL);
    sigprocmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return result == 0;
}

void vg_watch_look(void) {
    static _Atomic uint64_t not_before; /* where no thread can be had just now */
    struct vg_space *space = vg_here();
    if (atomic_load_explicit(&vg_gate->leading, memory_order_relaxed) ||
        vg_unix_seconds() < atomic_load_explicit(&not_before, memory_order_relaxed))
        return;
    bool led = atomic_load(&space->extension->leader) != 0;
    uint64_t tick = atomic_load(&space->extension->tick);
    if ((led && vg_unix_seconds() < tick + STALE_SECONDS) || atomic_exchange(&vg_gate->leading, true))
        return;
    /* Without locks that live on, the word itself keeps a second leader away, near enough. */
    enum vg_lock_result result = vg_long_lock_take(&leadership, &space->locks, VG_LOCK_LEADER);
    if (result != VG_LOCK_GRANTED && vg_lock_lives()) {
        atomic_store(&vg_gate->leading, false);
        vg_region_moved(space);
        return;
    }
    if (start_thread()) {
        atomic_store(&space->extension->leader, (uint32_t)(space->slot + 1));
        return;
    }
    vg_long_lock_drop(&leadership);
    atomic_store(&not_before, vg_unix_seconds() + 1);
    atomic_store(&vg_gate->leading, false);
}
