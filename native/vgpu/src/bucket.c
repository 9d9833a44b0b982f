#include "bucket.h"

static const uint64_t burst_ns = 500000000u;
static const uint64_t largest_debt_ns = 30000000000u;

/* min(max(due, now - burst) + charge, now + largest debt); what the cap cuts off is added to `forgiven`. */
static uint64_t moved(uint64_t due, uint64_t now, int64_t charge, uint64_t *forgiven) {
    uint64_t oldest = now > burst_ns ? now - burst_ns : 0;
    uint64_t start = due > oldest ? due : oldest;
    uint64_t back = charge < 0 ? (uint64_t)-charge : 0;
    uint64_t end = charge >= 0 ? start + (uint64_t)charge : start - (back < start ? back : start);
    if (end > now + largest_debt_ns) {
        *forgiven += end - (now + largest_debt_ns);
        end = now + largest_debt_ns;
    }
    return end;
}

uint64_t vg_bucket_take(_Atomic uint64_t *due, uint64_t now, uint64_t cost, unsigned limit,
                        uint64_t *forgiven) {
    uint64_t seen = atomic_load(due);
    for (;;) {
        uint64_t lost = 0;
        if (seen > now && seen - now <= largest_debt_ns)
            return seen - now;
        /* Later than any debt of ours: a clock of another boot, or a stranger's value. It starts anew. */
        uint64_t next = moved(seen > now ? now : seen, now, (int64_t)(cost * 100 / limit), &lost);
        if (atomic_compare_exchange_weak(due, &seen, next)) {
            *forgiven += lost;
            return 0;
        }
    }
}

void vg_bucket_correct(_Atomic uint64_t *due, uint64_t now, int64_t difference, unsigned limit,
                       uint64_t *forgiven) {
    uint64_t seen = atomic_load(due), lost, next;
    do {
        lost = 0;
        next = moved(seen, now, difference * 100 / (int64_t)limit, &lost);
    } while (!atomic_compare_exchange_weak(due, &seen, next));
    *forgiven += lost;
}

void vg_bucket_rescale(_Atomic uint64_t *due, uint64_t now, uint64_t factor, uint64_t before) {
    uint64_t seen = atomic_load(due), next;
    do {
        if (seen <= now)
            return;
        double debt = (double)(seen - now) * (double)factor / (double)before;
        next = now + (debt < (double)largest_debt_ns ? (uint64_t)debt : largest_debt_ns);
    } while (!atomic_compare_exchange_weak(due, &seen, next));
}
