#define _GNU_SOURCE
#include "cost.h"

#include <sys/mman.h>

enum {
    LARGEST_SAMPLES = 256,
    LONG_KERNEL_NS = 400000,
    LARGEST_INTERVAL = 64,
    START_NS = 20000,
    MOST_DOUBTFUL = 8,
    LARGEST_FACTOR = 4,
    DEVICES = 16
};

_Atomic(struct vg_cost *) vg_costs;

static struct vg_cost *table(void) {
    struct vg_cost *costs = atomic_load_explicit(&vg_costs, memory_order_acquire);
    if (costs != NULL)
        return costs;
    size_t length = VG_COST_ENTRIES * sizeof *costs;
    struct vg_cost *made = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        return NULL;
    if (atomic_compare_exchange_strong(&vg_costs, &costs, made))
        return made;
    munmap(made, length);
    return costs;
}

struct vg_cost *vg_cost_get(uintptr_t function, uint64_t work, int device) {
    struct vg_cost *costs = table();
    if (costs == NULL)
        return NULL;
    uint64_t key = vg_cost_key(function, work, device);
    uint64_t at = key * 0x9e3779b97f4a7c15u >> 52;
    for (unsigned i = 0; i < VG_COST_PROBES; i++) {
        struct vg_cost *cost = &costs[(at + i) % VG_COST_ENTRIES];
        uint64_t found = atomic_load(&cost->key);
        if (found == 0) {
            /* Written before the key by everyone who may win it; readers see countdown 0 and come here. */
            uint32_t zero = 0;
            atomic_compare_exchange_strong(&cost->ns, &zero, VG_COST_UNKNOWN);
            if (atomic_compare_exchange_strong(&cost->key, &found, key))
                return cost;
        }
        if (found == key)
            return cost;
    }
    return NULL;
}

uint64_t vg_cost_start_value(uint64_t work, int sms, int threads_per_sm) {
    uint64_t parallel = (uint64_t)(sms > 0 ? sms : 1) * (uint64_t)(threads_per_sm > 0 ? threads_per_sm : 1);
    double ns = (double)START_NS * (double)work / (double)parallel;
    return ns < 1e9 ? (uint64_t)ns : 1000000000u;
}

uint64_t vg_cost_start_value_of_graph(uint64_t nodes) {
    return nodes < 1000000000u / START_NS ? nodes * START_NS : 1000000000u;
}

void vg_cost_forget(uintptr_t function, uint64_t work) {
    struct vg_cost *costs = atomic_load_explicit(&vg_costs, memory_order_acquire);
    for (int device = 0; device < DEVICES && costs != NULL; device++) {
        struct vg_cost *cost = vg_cost_find(costs, vg_cost_key(function, work, device));
        if (cost == NULL)
            continue;
        atomic_store(&cost->countdown, 0);
        atomic_store(&cost->ns, VG_COST_UNKNOWN);
        atomic_store(&cost->samples, 0);
        atomic_store(&cost->interval, 0);
        atomic_store(&cost->unmeasured, 0);
        atomic_store(&cost->doubtful, 0);
    }
}

uint32_t vg_cost_pending(const struct vg_cost *cost, int32_t countdown) {
    int32_t now = atomic_load(&cost->interval) - countdown + 1;
    return atomic_load(&cost->unmeasured) + (now > 0 ? (uint32_t)now : 1);
}

void vg_cost_postpone(struct vg_cost *cost, int32_t countdown) {
    atomic_store(&cost->unmeasured, vg_cost_pending(cost, countdown));
    atomic_store(&cost->countdown, atomic_load(&cost->interval));
}

static void learn(struct vg_cost *cost, uint64_t ns, uint32_t launches) {
    uint32_t known = atomic_load(&cost->ns), samples = atomic_load(&cost->samples);
    double mean = (double)ns;
    if (known != VG_COST_UNKNOWN) {
        double window = samples < LARGEST_SAMPLES ? samples : LARGEST_SAMPLES;
        double weight = launches / (window + launches);
        if (known >= LONG_KERNEL_NS && weight < 0.125)
            weight = 0.125;
        mean = known + ((double)ns - known) * weight;
    }
    uint32_t value = mean < 4e9 ? (uint32_t)mean : 4000000000u;
    uint32_t interval = value == 0 ? LARGEST_INTERVAL : LONG_KERNEL_NS / value;
    interval = interval < 1 ? 1 : interval > LARGEST_INTERVAL ? LARGEST_INTERVAL : interval;
    atomic_store(&cost->interval, (int32_t)interval);
    atomic_store(&cost->samples, samples + launches);
    atomic_store(&cost->ns, value);
    atomic_store(&cost->unmeasured, 0);
    atomic_store(&cost->countdown, (int32_t)interval);
}

void vg_cost_learn(struct vg_cost *cost, uint64_t ns, uint32_t launches) {
    atomic_store(&cost->doubtful, 0);
    learn(cost, ns, launches);
}

uint64_t vg_cost_learn_between(struct vg_cost *cost, uint64_t least, uint64_t most, bool sure,
                               uint64_t charged, uint32_t launches) {
    uint64_t part = most / LARGEST_FACTOR;
    if (sure || least >= part)
        atomic_store(&cost->doubtful, 0);
    else if (atomic_load(&cost->doubtful) < MOST_DOUBTFUL)
        atomic_fetch_add(&cost->doubtful, 1);
    else
        least = part;
    uint64_t ns = charged < least ? least : charged > most ? most : charged;
    bool guess = atomic_load(&cost->samples) == 0;
    learn(cost, ns, launches);
    if (guess) {
        atomic_store(&cost->samples, 0);
        atomic_store(&cost->interval, 1);
        atomic_store(&cost->countdown, 1);
    }
    return ns;
}
