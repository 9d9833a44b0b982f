#include "engine.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#define LIVE_CHECK_NS 20000000ull

void (*fg_engine_before_reuse)(void);

static struct fg_channel *channel_at(struct fg_device *device, uint32_t position) {
    return &fg.shared->channels[device->channels[position]];
}

static int busy(const struct fg_channel *channel) {
    return channel->tail > channel->head;
}

static uint32_t busy_count(struct fg_device *device) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < device->channel_count; i++)
        n += (uint32_t)busy(channel_at(device, i));
    return n;
}

static void credit(struct fg_device *device, struct fg_channel *channel, uint64_t work) {
    uint32_t d = channel->device;
    channel->busy_ns += work;
    channel->head_left_ns -= work;
    device->busy_ns += work;
    fg.shared->slots[channel->slot].on[d].engine_ns += work;
    /* Containers span cards but each element belongs to one card, so the card's lock covers it. */
    fg.shared->containers[channel->container].engine_ns[d] += work;
}

static void finish_head(struct fg_device *device, struct fg_channel *channel) {
    channel->ring[channel->head % FG_RING].end_ns = device->now_ns;
    channel->head++;
    channel->head_left_ns = busy(channel) ? channel->ring[channel->head % FG_RING].cost_ns : 0;
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* The queue of a dead process does not run on. */
static void drop_dead_work(struct fg_device *device) {
    if (device->now_ns - device->live_checked_ns < LIVE_CHECK_NS)
        return;
    device->live_checked_ns = device->now_ns;
    for (uint32_t i = 0; i < device->channel_count; i++) {
        struct fg_channel *channel = channel_at(device, i);
        if (busy(channel) && !fg_slot_alive(channel->slot)) {
            channel->head = channel->tail;
            channel->head_left_ns = 0;
        }
    }
}

static void next_turn(struct fg_device *device) {
    device->current = device->channel_count ? (device->current + 1) % device->channel_count : 0;
    device->slice_left_ns = fg.shared->slice_ns;
}

static void run_in_turns(struct fg_device *device, uint64_t until) {
    uint32_t idle = 0;
    while (device->now_ns < until && idle < device->channel_count) {
        drop_dead_work(device);
        if (device->current >= device->channel_count)
            next_turn(device);
        struct fg_channel *channel = channel_at(device, device->current);
        if (!busy(channel)) {
            idle++;
            next_turn(device);
            continue;
        }
        idle = 0;
        if (device->slice_left_ns == 0)
            device->slice_left_ns = fg.shared->slice_ns;
        uint64_t step = least(least(channel->head_left_ns, device->slice_left_ns), until - device->now_ns);
        device->now_ns += step;
        device->slice_left_ns -= step;
        credit(device, channel, step);
        if (channel->head_left_ns == 0)
            finish_head(device, channel);
        if (device->slice_left_ns == 0 || !busy(channel))
            next_turn(device);
    }
}

static void run_at_once(struct fg_device *device, uint64_t until) {
    uint64_t active;
    while (device->now_ns < until && (active = busy_count(device)) > 0) {
        drop_dead_work(device);
        uint64_t shortest = UINT64_MAX;
        for (uint32_t i = 0; i < device->channel_count; i++)
            if (busy(channel_at(device, i)))
                shortest = least(shortest, channel_at(device, i)->head_left_ns);
        uint64_t share = (until - device->now_ns + active - 1) / active, step = least(shortest, share);
        device->now_ns += step * active;
        for (uint32_t i = 0; i < device->channel_count; i++) {
            struct fg_channel *channel = channel_at(device, i);
            if (!busy(channel))
                continue;
            credit(device, channel, least(step, channel->head_left_ns));
            if (channel->head_left_ns == 0)
                finish_head(device, channel);
        }
    }
}

static uint8_t percent(uint64_t part, uint64_t whole) {
    uint64_t value = whole ? (part * 100 + whole / 2) / whole : 0;
    return (uint8_t)least(value, 100);
}

static void take_sample(struct fg_device *device) {
    uint64_t length = fg.shared->sample_ns;
    uint32_t place = (uint32_t)(device->sample_index % FG_SAMPLES);
    device->util[place] = percent(device->busy_ns - device->sampled_ns, length);
    device->sampled_ns = device->busy_ns;
    for (uint32_t i = 0; i < device->channel_count; i++) {
        struct fg_channel *channel = channel_at(device, i);
        channel->util[place] = percent(channel->busy_ns - channel->sampled_ns, length);
        channel->sampled_ns = channel->busy_ns;
    }
    device->sample_index++;
}

void fg_engine_advance(struct fg_device *device, uint64_t now) {
    uint64_t length = fg.shared->sample_ns;
    if (device->now_ns == 0) {
        device->now_ns = now;
        device->sample_index = now / length;
    }
    while (device->now_ns < now) {
        uint64_t boundary = (device->sample_index + 1) * length, until = least(now, boundary);
        if (fg.shared->slice_ns)
            run_in_turns(device, until);
        else
            run_at_once(device, until);
        int idle = device->now_ns < until;
        if (idle)
            device->now_ns = until;
        if (device->now_ns < boundary)
            continue;
        take_sample(device);
        uint64_t behind = now / length;
        if (idle && behind > device->sample_index + FG_SAMPLES && busy_count(device) == 0) {
            device->sample_index =
                behind - FG_SAMPLES; /* all samples kept are then rewritten with the idle truth */
            device->now_ns = device->sample_index * length;
        }
    }
}

void fg_engine_drop(struct fg_device *device, uint32_t number) {
    if (number == 0)
        return;
    struct fg_channel *channel = &fg.shared->channels[number - 1];
    for (uint32_t i = 0; i < device->channel_count; i++)
        if (device->channels[i] == number - 1) {
            memmove(&device->channels[i], &device->channels[i + 1],
                    (device->channel_count - i - 1) * sizeof device->channels[0]);
            device->channel_count--;
            break;
        }
    __atomic_store_n(&channel->in_use, 0, __ATOMIC_RELEASE);
}

void fg_engine_repair(struct fg_device *device) {
    uint32_t d = (uint32_t)(device - fg.shared->devices);
    device->channel_count = 0;
    /* Each of the others is a page that nobody has touched yet, and everybody waits meanwhile. */
    uint32_t high = __atomic_load_n(&fg.shared->channel_high, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < high && i < FG_MAX_CHANNELS; i++)
        if (fg.shared->channels[i].in_use && fg.shared->channels[i].device == d)
            device->channels[device->channel_count++] = (uint16_t)i;
}

/* Under the card's lock: the own queue, made at first use; NULL if all 1,024 are taken. */
static struct fg_channel *own_channel(uint32_t d) {
    struct fg_account *own = fg_own(d);
    if (own->channel)
        return &fg.shared->channels[own->channel - 1];
    for (uint32_t i = 0; i < FG_MAX_CHANNELS; i++) {
        struct fg_channel *channel = &fg.shared->channels[i];
        uint32_t nobody = 0;
        if (!__atomic_compare_exchange_n(&channel->in_use, &nobody, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            continue;
        uint32_t high = __atomic_load_n(&fg.shared->channel_high, __ATOMIC_RELAXED);
        while (high <= i && !__atomic_compare_exchange_n(&fg.shared->channel_high, &high, i + 1, 0,
                                                         __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            continue;
        struct fg_device *device = &fg.shared->devices[d];
        channel->device = d;
        channel->slot = fg.slot;
        channel->container = fg.shared->slots[fg.slot].container;
        channel->head = channel->tail = channel->head_left_ns = channel->busy_ns = channel->sampled_ns = 0;
        channel->most_queued = 0;
        memset(channel->util, 0, sizeof channel->util);
        device->channels[device->channel_count++] = (uint16_t)i;
        own->channel = i + 1;
        return channel;
    }
    return NULL;
}

/* Let work that waits for the next launch end. */
static void end_waiting(struct fg_channel *channel) {
    struct fg_entry *last = &channel->ring[(channel->tail - 1) % FG_RING];
    if (!busy(channel) || last->cost_ns != FG_UNTIL_NEXT)
        return;
    last->cost_ns = 1000;
    if (channel->head == channel->tail - 1)
        channel->head_left_ns = last->cost_ns;
}

uint64_t fg_engine_submit(uint32_t d, uint64_t cost_ns) {
    struct fg_device *device = &fg.shared->devices[d];
    for (;;) {
        fg_lock_device(device);
        struct fg_channel *channel = own_channel(d);
        fg_engine_advance(device, fg_now());
        if (!channel || channel->tail - channel->head < FG_QUEUE) {
            uint64_t mark = 0;
            if (channel) {
                end_waiting(channel);
                channel->ring[channel->tail % FG_RING] = (struct fg_entry){.cost_ns = cost_ns};
                if (!busy(channel))
                    channel->head_left_ns = cost_ns;
                mark = ++channel->tail;
                if (mark - channel->head > channel->most_queued)
                    channel->most_queued = mark - channel->head;
            }
            fg_unlock_device(device);
            void (*before_reuse)(void) = __atomic_load_n(&fg_engine_before_reuse, __ATOMIC_ACQUIRE);
            if (mark % 512 == 0 && before_reuse)
                before_reuse();
            return mark;
        }
        uint64_t room = channel->tail - FG_QUEUE + 1;
        fg_unlock_device(device);
        fg_engine_wait(d, room);
    }
}

uint64_t fg_engine_mark(uint32_t d) {
    struct fg_device *device = &fg.shared->devices[d];
    fg_lock_device(device);
    uint32_t number = fg_own(d)->channel;
    uint64_t mark = number ? fg.shared->channels[number - 1].tail : 0;
    fg_unlock_device(device);
    return mark;
}

/* Under the card's lock: ns of own work before `mark`, times the number of busy queues. */
static uint64_t estimate(struct fg_device *device, struct fg_channel *channel, uint64_t mark) {
    uint64_t work = channel->head_left_ns;
    for (uint64_t i = channel->head + 1; i < mark; i++)
        work += channel->ring[i % FG_RING].cost_ns;
    return work * busy_count(device);
}

/* As fg_engine_reached; if not reached, *end_ns is an estimate of the wait in ns. */
static int look(uint32_t d, uint64_t mark, uint64_t *end_ns) {
    struct fg_device *device = &fg.shared->devices[d];
    *end_ns = 0;
    if (mark == 0)
        return 1;
    fg_lock_device(device);
    fg_engine_advance(device, fg_now());
    uint32_t number = fg_own(d)->channel;
    struct fg_channel *channel = number ? &fg.shared->channels[number - 1] : NULL;
    int reached = !channel || channel->head >= mark;
    if (channel && reached)
        *end_ns = channel->ring[(mark - 1) % FG_RING].end_ns;
    else if (channel)
        *end_ns = estimate(device, channel, mark);
    fg_unlock_device(device);
    return reached;
}

int fg_engine_reached(uint32_t device, uint64_t mark, uint64_t *end_ns) {
    return look(device, mark, end_ns);
}

void fg_engine_wait(uint32_t device, uint64_t mark) {
    uint64_t left;
    while (!look(device, mark, &left)) {
        if (left < 60000) {
            sched_yield();
            continue;
        }
        uint64_t pause = least(left - left / 8, 5000000);
        struct timespec t = {.tv_sec = 0, .tv_nsec = (long)pause};
        nanosleep(&t, NULL);
    }
}
