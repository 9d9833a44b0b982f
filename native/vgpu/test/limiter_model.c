/* The bucket of the core limit alone, in simulated time: programs that know what their kernels cost take from
 * it, launch on a card that runs one kernel after another, and wait for the end. Every window of ten seconds
 * but the first has to be near the limit. "vgpu_limiter_model" prints what does not hold and ends with 1. */
#include "bucket.h"

#include <stdio.h>

enum { PROGRAMS = 8, SECONDS = 60, WINDOW = 10, WINDOWS = SECONDS / WINDOW };
static const uint64_t second = 1000000000u, long_nap = 100000000u;

struct run {
    unsigned limit, later; /* per cent, from the middle on */
    uint64_t kernels[2];   /* ns; half of the programs have the one, half the other */
    int survivors;         /* the others pay once more in the middle and are gone */
};

static void add(uint64_t *busy, uint64_t from, uint64_t to) {
    for (uint64_t end; from < to; from = end) {
        uint64_t window = from / (WINDOW * second);
        end = (window + 1) * WINDOW * second < to ? (window + 1) * WINDOW * second : to;
        if (window < WINDOWS)
            busy[window] += end - from;
    }
}

static void simulate(const struct run *run, uint64_t *busy) {
    _Atomic uint64_t due = second;
    uint64_t next[PROGRAMS], free_at = second, forgiven = 0, middle = SECONDS / 2 * second;
    for (int i = 0; i < PROGRAMS; i++)
        next[i] = second + (uint64_t)i * 1000;
    for (;;) {
        int who = 0;
        for (int i = 1; i < PROGRAMS; i++)
            who = next[i] < next[who] ? i : who;
        uint64_t now = next[who], cost = run->kernels[who % 2];
        if (now >= SECONDS * second)
            return;
        uint64_t wait = vg_bucket_take(&due, now, cost, now < middle ? run->limit : run->later, &forgiven);
        if (wait != 0) {
            next[who] = now + (wait < long_nap ? wait : long_nap);
        } else if (now >= middle && who >= run->survivors) {
            next[who] = UINT64_MAX; /* killed between charge and launch */
        } else {
            uint64_t start = free_at > now ? free_at : now;
            free_at = next[who] = start + cost;
            add(busy, start, free_at);
        }
    }
}

static int off(const struct run *run) {
    uint64_t busy[WINDOWS] = {0};
    int bad = 0;
    simulate(run, busy);
    for (int w = 1; w < WINDOWS; w++) {
        double share = 100.0 * (double)busy[w] / (double)(WINDOW * second);
        double wanted = w < WINDOWS / 2 ? run->limit : run->later, error = share - wanted;
        int settling = w == WINDOWS / 2 && (run->limit != run->later || run->survivors < PROGRAMS);
        if (settling || (error <= 3 && error >= -3))
            continue;
        printf("limit %u then %u, kernels of %llu and %llu us, window %d: %.1f\n", run->limit, run->later,
               (unsigned long long)run->kernels[0] / 1000, (unsigned long long)run->kernels[1] / 1000, w,
               share);
        bad = 1;
    }
    return bad;
}

int main(void) {
    static const uint64_t kernels[][2] = {{1000000, 1000000},     {5000000, 5000000},   {20000000, 20000000},
                                          {200000000, 200000000}, {5000000, 200000000}, {1000000, 200000000}};
    static const unsigned limits[][2] = {{10, 10}, {30, 30}, {50, 50}, {90, 90}, {30, 70}, {90, 10}};
    int bad = 0;
    for (unsigned k = 0; k < sizeof kernels / sizeof *kernels; k++)
        for (unsigned l = 0; l < sizeof limits / sizeof *limits; l++)
            for (int survivors = PROGRAMS / 2; survivors <= PROGRAMS; survivors += PROGRAMS / 2)
                bad |= off(&(struct run){.limit = limits[l][0],
                                         .later = limits[l][1],
                                         .kernels = {kernels[k][0], kernels[k][1]},
                                         .survivors = survivors});
    return bad;
}
