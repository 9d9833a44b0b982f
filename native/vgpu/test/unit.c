/* Tests of the pure pieces: "vgpu_unit NAME [FILE]" runs one and ends with 0 if it holds. The file is a path
 * for a region. Built with every sanitizer too. */
#define _GNU_SOURCE
#include "admit.h"
#include "bucket.h"
#include "config.h"
#include "cost.h"
#include "factor.h"
#include "gate.h"
#include "region.h"
#include "size.h"
#include "slots.h"
#include "sorted.h"
#include "track.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static const char *path;

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* ---- sizes and configuration ---- */

static void sizes(void) {
    static const struct {
        const char *text;
        enum vg_parsed parsed;
        uint64_t bytes;
    } rows[] = {
        {"3000m", VG_PARSED_VALUE, 3145728000u},
        {"2g", VG_PARSED_VALUE, 2147483648u},
        {"2G", VG_PARSED_VALUE, 2147483648u},
        {"512k", VG_PARSED_VALUE, 524288},
        {"1048576", VG_PARSED_VALUE, 1048576},
        {"0", VG_PARSED_VALUE, 0},
        {"0m", VG_PARSED_VALUE, 0},
        {"", VG_PARSED_EMPTY, 0},
        {"  ", VG_PARSED_EMPTY, 0},
        {"010m", VG_PARSED_VALUE, 10485760},
        {"0x10m", VG_PARSED_REJECTED, 0},
        {"1.5g", VG_PARSED_VALUE, 1610612736},
        {"0.3333k", VG_PARSED_VALUE, 341},
        {"1gb", VG_PARSED_VALUE, 1073741824},
        {"1Gi", VG_PARSED_VALUE, 1073741824},
        {"1GiB", VG_PARSED_VALUE, 1073741824},
        {"512Mi", VG_PARSED_VALUE, 536870912},
        {"-1m", VG_PARSED_REJECTED, 0},
        {"+1m", VG_PARSED_REJECTED, 0},
        {" 64m ", VG_PARSED_VALUE, 67108864},
        {"64 m", VG_PARSED_REJECTED, 0},
        {"64mm", VG_PARSED_REJECTED, 0},
        {"64m x", VG_PARSED_REJECTED, 0},
        {"1.", VG_PARSED_REJECTED, 0},
        {".5g", VG_PARSED_REJECTED, 0},
        {"99999999999g", VG_PARSED_REJECTED, 0},
        {"18446744073709551615", VG_PARSED_VALUE, UINT64_MAX},
        {"18446744073709551616", VG_PARSED_REJECTED, 0},
        {"1.99999999999999999999999999g", VG_PARSED_VALUE, 2147483647},
        {"abc", VG_PARSED_REJECTED, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint64_t bytes = 0;
        enum vg_parsed parsed = vg_parse_size(rows[i].text, &bytes);
        if (parsed != rows[i].parsed || (parsed == VG_PARSED_VALUE && bytes != rows[i].bytes)) {
            fprintf(stderr, "\"%s\": %d, %" PRIu64 "\n", rows[i].text, parsed, bytes);
            exit(1);
        }
    }
    long value = 7;
    CHECK(vg_parse_integer(" -12 ", -20, 20, &value) == VG_PARSED_VALUE && value == -12);
    CHECK(vg_parse_integer("21", -20, 20, &value) == VG_PARSED_REJECTED && value == -12);
    CHECK(vg_parse_integer("9999999999999999999", 0, 20, &value) == VG_PARSED_REJECTED);
    CHECK(vg_parse_integer("1k", 0, 2000, &value) == VG_PARSED_REJECTED);
}

static struct vg_config config;

static void configure(const char *text) {
    static char copy[1024];
    static struct vg_pairs pairs;
    snprintf(copy, sizeof copy, "%s", text);
    vg_pairs_parse(&pairs, copy);
    vg_config_build(&config, vg_pairs_get, &pairs);
}

static void configuration(void) {
    configure(
        "# a comment\r\n\r\n CUDA_DEVICE_MEMORY_LIMIT = 2g \nCUDA_DEVICE_MEMORY_LIMIT_1=512m\n=x\nnonsense\n"
        "CUDA_DEVICE_MEMORY_LIMIT_1=256m\nCUDA_DEVICE_SM_LIMIT_0=0\nCUDA_DEVICE_SM_LIMIT=40\n");
    CHECK(vg_config_memory(&config, "GPU-x", 0) == (uint64_t)2 << 30);
    CHECK(vg_config_memory(&config, "GPU-x", 1) == (uint64_t)256 << 20);
    CHECK(vg_config_sm(&config, "GPU-x", 0) == 0);
    CHECK(vg_config_sm(&config, "GPU-x", 5) == 40);
    CHECK(config.priority == 1 && config.policy == VG_POLICY_DEFAULT && config.record_interval == 1);
    configure("CUDA_TASK_PRIORITY=high\nGPU_CORE_UTILIZATION_POLICY=FORCE\nRECORD_KERNEL_INTERVAL=0\n");
    CHECK(config.priority == 1 && config.policy == VG_POLICY_FORCE && config.record_interval == 1);
    configure("HAMI_DEVICE_UUIDS=GPU-00000000-0000-0000-0000-00000000000b,GPU-00000000-0000-0000-0000-"
              "00000000000a\n"
              "NVIDIA_VISIBLE_DEVICES=GPU-00000000-0000-0000-0000-00000000000a\nCUDA_DEVICE_MEMORY_LIMIT=3g\n"
              "CUDA_DEVICE_MEMORY_LIMIT_0=1g\nCUDA_DEVICE_MEMORY_LIMIT_1=2g\n");
    CHECK(vg_config_memory(&config, "GPU-00000000-0000-0000-0000-00000000000a", 0) == (uint64_t)2 << 30);
    CHECK(vg_config_memory(&config, "GPU-00000000-0000-0000-0000-00000000000b", 1) == (uint64_t)1 << 30);
    CHECK(vg_config_memory(&config, "GPU-00000000-0000-0000-0000-00000000000c", 2) == (uint64_t)3 << 30);
    CHECK(vg_config_memory(&config, "", 1) == (uint64_t)2 << 30);
    configure("NVIDIA_VISIBLE_DEVICES=all\nCUDA_DEVICE_MEMORY_LIMIT_1=2g\n");
    CHECK(config.uuid_count == 0 && vg_config_memory(&config, "GPU-x", 1) == (uint64_t)2 << 30);
}

/* ---- records ---- */

enum { KEYS = 4096, STEPS = 200000 };

static uint64_t dropped_bytes, dropped_count;

static void dropped(const struct vg_record *record) {
    dropped_bytes += record->size;
    dropped_count++;
}

/* Random operations against a plain array. */
static void records(void) {
    static struct vg_record model[KEYS];
    static bool live[KEYS];
    uint64_t random = 1, count = 0;
    for (int step = 0; step < STEPS; step++) {
        uint64_t k = next_random(&random) % KEYS, key = (uint64_t)0x7f0000000000 + k * 512;
        struct vg_record record;
        if (!live[k]) {
            model[k] =
                (struct vg_record){(next_random(&random) % 1000 + 1) * 512, next_random(&random) % 3 + 1,
                                   (int)(k % 16), k % 3 == 0, k % 5 == 0};
            CHECK(vg_track_insert(VG_RECORD_LINEAR, key, &model[k]));
            live[k] = true;
            count++;
        } else {
            CHECK(vg_track_freeing(VG_RECORD_LINEAR, key, &record));
            CHECK(record.size == model[k].size && record.device == model[k].device &&
                  record.managed == model[k].managed && record.pooled == model[k].pooled);
            CHECK(!vg_track_freeing(VG_RECORD_LINEAR, key, &record));
            bool freed = next_random(&random) % 4 != 0;
            vg_track_finish(VG_RECORD_LINEAR, key, freed);
            live[k] = !freed;
            count -= freed;
        }
        CHECK(!vg_track_freeing(VG_RECORD_ARRAY, key, &record));
    }
    CHECK(vg_track_count() == count);
    uint64_t bytes = 0, number = 0;
    for (int k = 0; k < KEYS; k++)
        if (live[k] && model[k].context == 2 && model[k].device == 5) {
            bytes += model[k].size;
            number++;
        }
    vg_track_drop(2, 5, dropped);
    CHECK(dropped_bytes == bytes && dropped_count == number && vg_track_count() == count - number);
}

/* The driver hands an address out again before the thread that freed it has finished. */
static void reused_address(void) {
    struct vg_record first = {.size = 512, .context = 1}, second = {.size = 1024, .context = 1}, got;
    CHECK(vg_track_insert(VG_RECORD_LINEAR, 4096, &first));
    CHECK(vg_track_freeing(VG_RECORD_LINEAR, 4096, &got) && got.size == 512);
    CHECK(vg_track_insert(VG_RECORD_LINEAR, 4096, &second));
    vg_track_finish(VG_RECORD_LINEAR, 4096, true);
    CHECK(vg_track_freeing(VG_RECORD_LINEAR, 4096, &got) && got.size == 1024);
}

static void ranges(void) {
    struct vg_sorted map = {NULL, 0, 0};
    struct vg_sorted_entry found;
    int object;
    for (uint64_t i = 0; i < 1000; i++)
        CHECK(vg_sorted_put(&map, (i * 617 % 1000) * 100, 50, &object));
    CHECK(map.count == 1000 && vg_sorted_get(&map, 4200) == &object && vg_sorted_get(&map, 4201) == NULL);
    CHECK(vg_sorted_overlap(&map, 4249, 1, &found) && found.key == 4200);
    CHECK(!vg_sorted_overlap(&map, 4250, 50, &found));
    CHECK(vg_sorted_overlap(&map, 4250, 51, &found) && found.key == 4300);
    vg_sorted_remove(&map, 4300);
    CHECK(map.count == 999 && !vg_sorted_overlap(&map, 4250, 100, &found));
}

/* ---- bucket and costs ---- */

static void bucket(void) {
    const uint64_t second = 1000000000u;
    _Atomic uint64_t due = 0;
    uint64_t forgiven = 0, now = 100 * second, taken = 0;
    /* An idle bucket allows half a second of wall time at once, then the limit, whatever the size of a piece.
     */
    for (uint64_t end = now + 10 * second; now < end;) {
        uint64_t wait = vg_bucket_take(&due, now, 1000000, 25, &forgiven);
        taken += wait == 0 ? 1000000 : 0;
        now += wait;
    }
    CHECK(taken >= 2620000000u && taken <= 2640000000u && forgiven == 0);
    vg_bucket_correct(&due, now, -(int64_t)second, 25, &forgiven);
    CHECK(vg_bucket_take(&due, now, second, 25, &forgiven) == 0);
    vg_bucket_correct(&due, now, (int64_t)(1000 * second), 25, &forgiven);
    CHECK(vg_bucket_take(&due, now, 1, 25, &forgiven) == 30 * second && forgiven > 3900 * second);
    due = UINT64_MAX; /* nonsense from outside does not stop the container */
    CHECK(vg_bucket_take(&due, now, 1, 25, &forgiven) == 0);
}

enum { SLEEPERS = 8, DUE_TIMES = 200 };

/* All wake at the same due time; the clock moves on when every one has tried. */
static struct {
    _Atomic uint64_t due;
    uint64_t now;
    _Atomic unsigned passed;
    pthread_barrier_t barrier;
} sleepers;

static void *sleeper(void *argument) {
    uint64_t forgiven = 0;
    (void)argument;
    for (int i = 0; i < DUE_TIMES; i++) {
        pthread_barrier_wait(&sleepers.barrier);
        if (vg_bucket_take(&sleepers.due, sleepers.now, 1000000, 50, &forgiven) == 0)
            atomic_fetch_add(&sleepers.passed, 1);
        pthread_barrier_wait(&sleepers.barrier);
    }
    return NULL;
}

static void bucket_of_sleepers(void) {
    pthread_t threads[SLEEPERS];
    sleepers.now = sleepers.due = 1000000000000u;
    CHECK(pthread_barrier_init(&sleepers.barrier, NULL, SLEEPERS + 1) == 0);
    for (int i = 0; i < SLEEPERS; i++)
        CHECK(pthread_create(&threads[i], NULL, sleeper, NULL) == 0);
    for (unsigned i = 1; i <= DUE_TIMES; i++) {
        uint64_t before = sleepers.due;
        pthread_barrier_wait(&sleepers.barrier);
        pthread_barrier_wait(&sleepers.barrier);
        CHECK(sleepers.passed == i && sleepers.due == before + 2000000);
        sleepers.now = sleepers.due;
    }
    for (int i = 0; i < SLEEPERS; i++)
        pthread_join(threads[i], NULL);
}

static void costs(void) {
    struct vg_cost *cost = vg_cost_get(0x1000, 1024, 3);
    CHECK(cost != NULL && cost == vg_cost_get(0x1000, 2047, 3) && cost != vg_cost_get(0x1000, 2048, 3));
    CHECK(cost != vg_cost_get(0x1000, 1024, 2) && cost->ns == VG_COST_UNKNOWN);
    vg_thread.slice_device = 3;
    vg_thread.slice_ns = 1000000;
    CHECK(!vg_cost_pay(0x1000, 1024, 3));
    vg_cost_learn(cost, 10000, 1);
    CHECK(cost->ns == 10000 && cost->countdown == 40);
    CHECK(vg_cost_pay(0x1000, 1024, 3) && vg_thread.slice_ns == 990000 && cost->countdown == 39);
    vg_cost_learn(cost, 20000, 39);
    CHECK(cost->ns == 19750); /* weighted by what each stands for */
    vg_cost_learn(cost, 1000000, 256);
    CHECK(cost->interval == 1 && !vg_cost_pay(0x1000, 1024, 3));
    vg_cost_forget(0x1000, 1024);
    CHECK(cost->ns == VG_COST_UNKNOWN && cost->samples == 0 && !vg_cost_pay(0x1000, 1024, 3));
    vg_cost_forget(0x77000, 1); /* never seen */
    /* The host was away: the guess is what was charged, as far as it can be true. */
    CHECK(vg_cost_learn_between(cost, 100000, 20000000, false, 95, 1) == 100000 && cost->ns == 100000);
    CHECK(cost->samples == 0 && !vg_cost_pay(0x1000, 1024, 3)); /* and the next launch is measured */
    CHECK(vg_cost_learn_between(cost, 0, 30000, false, 100000, 1) == 30000 && cost->ns == 30000);
    vg_cost_learn(cost, 10000, 1);
    CHECK(cost->ns == 10000 && cost->samples == 1);
    CHECK(vg_cost_learn_between(cost, 5000, 20000000, false, 10000, 39) == 10000 && cost->ns == 10000);
    CHECK(cost->samples == 40 && cost->countdown == 40);
    CHECK(vg_cost_learn_between(cost, 50000, 20000000, false, 10000, 40) == 50000 && cost->ns == 30000);
    vg_cost_learn(cost, 10000, 1);
    for (int i = 0; i < 8; i++) /* a while nobody can tell: what was charged is as good as anything */
        CHECK(vg_cost_learn_between(cost, 0, 20000000, false, 10000, 40) == 10000);
    CHECK(vg_cost_learn_between(cost, 0, 20000000, false, 10000, 40) == 5000000);
    CHECK(vg_cost_learn_between(cost, 1000, 20000000, true, 10000, 40) == 10000);
    CHECK(vg_cost_learn_between(cost, 0, 20000000, false, 10000, 40) == 10000);
    CHECK(vg_cost_start_value_of_graph(10) == 200000);
    CHECK(vg_cost_start_value_of_graph(UINT64_MAX) == 1000000000u);
    for (uint64_t f = 1; f < 100000; f++) /* a full table is no error */
        vg_cost_get(f << 4, 1, 0);
    CHECK(vg_work(65536, 65536, 1, 1024, 1, 1) == (uint64_t)1 << 42); /* beyond 32 bits */
    CHECK(vg_work(2147483647, 65535, 65535, 1024, 1, 1) == UINT64_MAX);
    CHECK(vg_cost_start_value(132 * 2048, 132, 2048) == 20000);
    CHECK(vg_cost_start_value(UINT64_MAX, 0, 0) == 1000000000u);
}

static bool near(double value, double expected) {
    return value > expected - 0.02 && value < expected + 0.02;
}

static void factor(void) {
    struct vg_factor f = {0, 0, 0};
    double g = 1;
    CHECK(vg_factor_learn(&f, 1, 0, 0, 1) == 1.0); /* nothing charged, nothing known */
    for (int i = 0; i < 100; i++)
        g = vg_factor_learn(&f, 0.2, 0.06, 0.12, 1); /* stretched to double: 30 % used, 60 % charged */
    CHECK(near(g, 0.5));
    for (int i = 0; i < 100; i++)
        g = vg_factor_learn(&f, 0.2, 0.06, 0.0602, 1); /* within NVML's resolution: no correction */
    CHECK(near(g, 1));
    for (int i = 0; i < 400; i++)
        g = vg_factor_learn(&f, 0.2, 0, 0.2, 1);
    CHECK(near(g, 0.02));
    for (int i = 0; i < 100; i++)
        g = vg_factor_learn(&f, 0.2, 0.2, 0.001, 8);
    CHECK(g == 4.0);
    vg_factor_resume(&f, 0.5, 30); /* a new leader goes on from the old factor */
    CHECK(near(vg_factor_learn(&f, 0.2, 0.06, 0.12, 1), 0.5));
    _Atomic uint64_t due = 1000;
    vg_bucket_rescale(&due, 2000, 1, 2);
    CHECK(due == 1000);
    vg_bucket_rescale(&due, 500, 1, 2);
    CHECK(due == 750);
}

/* ---- admission ---- */

enum { THREADS = 4, ROUNDS = 3000 };
static const uint64_t unit = (uint64_t)1 << 20, limit = (uint64_t)16 << 20;
static _Atomic uint64_t held;

/* Each thread is a process of its own to the region. */
static void *process(void *argument) {
    struct vg_space *space = argument;
    uint64_t random = (uint64_t)space->slot * 77 + 1;
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t size = (next_random(&random) % 8 + 1) * unit;
        if (!vg_admit(space, 0, size, limit, NULL))
            continue;
        CHECK(atomic_fetch_add(&held, size) + size <= limit);
        vg_slot_add(space, 0, VG_KIND_DATA, size);
        vg_slot_subtract(space, 0, VG_KIND_DATA, size);
        atomic_fetch_sub(&held, size);
        vg_unreserve(space, 0, size);
    }
    return NULL;
}

static void open_spaces(struct vg_space *spaces, unsigned count) {
    static struct vg_region_seed seed = {
        .device_count = 1, .uuids = {"GPU-x"}, .limits = {(uint64_t)16 << 20}};
    for (unsigned i = 0; i < count; i++) {
        enum vg_region_result result = vg_region_open(&spaces[i], path, &seed);
        CHECK(result == (i == 0 ? VG_REGION_CREATED : VG_REGION_JOINED));
        vg_slot_claim(&spaces[i]);
        CHECK(spaces[i].slot == (int)i);
    }
}

static void admission_race(void) {
    static struct vg_space spaces[THREADS];
    pthread_t threads[THREADS];
    open_spaces(spaces, THREADS);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, process, &spaces[i]) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(vg_reserved_total(&spaces[0], 0) == 0 && spaces[0].extension->slow[0] == 0);
}

/* What fits is admitted to the byte, what does not is refused, and a free makes room at once. */
static void admission_exact(void) {
    static struct vg_space spaces[2];
    open_spaces(spaces, 2);
    CHECK(vg_admit(&spaces[0], 0, limit, limit, NULL));
    CHECK(!vg_admit(&spaces[1], 0, 512, limit, NULL));
    vg_unreserve(&spaces[0], 0, 512);
    CHECK(vg_admit(&spaces[1], 0, 512, limit, NULL));
    CHECK(!vg_admit(&spaces[0], 0, 512, limit, NULL));
    CHECK(!vg_admit(&spaces[0], 0, UINT64_MAX & ~(uint64_t)511, limit, NULL));
    CHECK(vg_reserved_total(&spaces[0], 0) == limit);
    CHECK(vg_round_charge(1) == 512 && vg_round_charge(512) == 512 && vg_round_charge(UINT64_MAX) > limit);
}

/* An attempt that another process never decides delays a refusal, but neither blocks nor admits wrongly. */
static void admission_undecided(void) {
    static struct vg_space spaces[2];
    open_spaces(spaces, 2);
    atomic_fetch_add(&spaces[1].own_totals[0], limit / 2 + 1);
    CHECK(vg_admit(&spaces[0], 0, limit / 2, limit, NULL));
    CHECK(!vg_admit(&spaces[0], 0, 512, limit, NULL));
    atomic_fetch_sub(&spaces[1].own_totals[0], limit / 2 + 1);
    CHECK(vg_admit(&spaces[0], 0, limit / 2, limit, NULL));
}

/* Run where such locks fail: nothing is ever reclaimed, limits hold, an orderly exit gives the slot back. */
static void without_ofd_locks(void) {
    static struct vg_space spaces[2];
    open_spaces(spaces, 2);
    CHECK(!vg_lock_lives() && (spaces[0].extension->flags & VG_FLAG_NO_OFD_LOCKS) != 0);
    CHECK(vg_admit(&spaces[0], 0, limit / 2, limit, NULL) && vg_admit(&spaces[1], 0, limit / 4, limit, NULL));
    CHECK(!vg_admit(&spaces[1], 0, limit / 2, limit, NULL));
    CHECK(vg_reserved_total(&spaces[1], 0) == limit / 4 * 3);
    vg_slot_release(&spaces[0]);
    CHECK(spaces[0].own->pid != 0); /* it still holds memory */
    vg_unreserve(&spaces[1], 0, limit / 4);
    vg_slot_release(&spaces[1]);
    CHECK(spaces[1].own->pid == 0 && (spaces[1].extension->claimed[0] & 3) == 1);
    vg_slot_claim(&spaces[1]);
    CHECK(spaces[1].slot == 1);
}

static _Atomic int settled;

static void settle(void) {
    settled++;
}

static void admission_settles_before_it_refuses(void) {
    static struct vg_space spaces[1];
    open_spaces(spaces, 1);
    CHECK(vg_admit(&spaces[0], 0, limit, limit, settle) && settled == 0);
    CHECK(!vg_admit(&spaces[0], 0, 512, limit, settle) && settled == 1);
}

static void hold(struct vg_space *space, uint64_t bytes) {
    CHECK(vg_admit(space, 0, bytes, limit, NULL));
    vg_slot_add(space, 0, VG_KIND_DATA, bytes);
}

static void give(struct vg_space *space, uint64_t bytes) {
    vg_slot_subtract(space, 0, VG_KIND_DATA, bytes);
    vg_unreserve(space, 0, bytes);
}

static void *churn(void *argument) {
    struct vg_space *const *here = argument;
    for (int i = 0; i < 20000; i++) {
        struct vg_space *space = here[i % 2 == 0 ? 0 : 1]; /* a call may begin in one and end in the other */
        vg_reserve(space, 0, 4096);
        vg_slot_add(space, 0, VG_KIND_DATA, 4096);
        give(here[i % 3 == 0 ? 1 : 0], 4096);
    }
    return NULL;
}

/* Numbers go from one slot to another while threads still count in both: nothing is lost or counted twice. */
static void moved_numbers(void) {
    static struct vg_space spaces[2];
    struct vg_space *both[] = {&spaces[0], &spaces[1]};
    pthread_t threads[4];
    open_spaces(spaces, 2);
    hold(&spaces[0], 8192);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, both) == 0);
    for (int i = 0; i < 1000; i++)
        vg_slot_move(&spaces[0], &spaces[1]);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    vg_slot_move(&spaces[0], &spaces[1]);
    CHECK(vg_own_bytes(&spaces[0], 0) == 0 && vg_own_bytes(&spaces[1], 0) == 8192);
    CHECK(spaces[0].own_totals[0] == 0 && spaces[1].own_totals[0] == 8192);
    CHECK(vg_slot_own_usage(&spaces[0], 0) == 0 && vg_slot_own_usage(&spaces[1], 0) == 8192);
    CHECK(spaces[0].own->status == VG_SLOT_FREE && spaces[1].own->status == VG_SLOT_RUNNING);
}

/* What somebody else wrote over the own numbers takes nothing from admission, and is mended after two looks.
 */
static void numbers_written_over(void) {
    static struct vg_space spaces[2];
    open_spaces(spaces, 2);
    hold(&spaces[1], limit / 2);
    atomic_store(&spaces[1].own_totals[0], 0);
    atomic_store(&spaces[1].own->used[0].data, 7);
    atomic_store(&spaces[1].own->used[0].total, 0);
    atomic_store(&spaces[1].own->status, VG_SLOT_FREE);
    atomic_store(&spaces[1].extension->claimed[0], 0);
    atomic_store(&spaces[0].region->proc_num, 0);
    CHECK(!vg_admit(&spaces[1], 0, limit / 2 + 512, limit, NULL));
    vg_slot_mend(&spaces[1]);
    vg_slot_mend(&spaces[1]);
    CHECK(spaces[1].own_totals[0] == limit / 2 && vg_slot_own_usage(&spaces[1], 0) == limit / 2);
    CHECK(spaces[1].own->used[0].data == limit / 2 && spaces[1].own->status == VG_SLOT_RUNNING);
    CHECK(vg_region_slots(spaces[0].region) == 2 && spaces[1].extension->claimed[0] == 2);
    CHECK(!vg_admit(&spaces[0], 0, limit / 2 + 512, limit, NULL));
    vg_slot_mend(&spaces[1]);
    CHECK(spaces[1].own_totals[0] == limit / 2);
    give(&spaces[1], limit / 2);
    CHECK(vg_reserved_total(&spaces[0], 0) == 0);
}

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"sizes", sizes},
    {"configuration", configuration},
    {"records", records},
    {"reused_address", reused_address},
    {"ranges", ranges},
    {"bucket", bucket},
    {"bucket_of_sleepers", bucket_of_sleepers},
    {"costs", costs},
    {"factor", factor},
    {"admission_race", admission_race},
    {"admission_exact", admission_exact},
    {"admission_undecided", admission_undecided},
    {"without_ofd_locks", without_ofd_locks},
    {"admission_settles_before_it_refuses", admission_settles_before_it_refuses},
    {"moved_numbers", moved_numbers},
    {"numbers_written_over", numbers_written_over},
};

_Thread_local struct vg_thread_state vg_thread;

int main(int argc, char **argv) {
    path = argc > 2 ? argv[2] : "";
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        if (argc < 2)
            puts(tests[i].name);
        else if (strcmp(argv[1], tests[i].name) == 0) {
            tests[i].run();
            return 0;
        }
    }
    return argc < 2 ? 0 : 2;
}
