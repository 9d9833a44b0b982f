/*
 * The time model. A card runs one kernel at a time; every process has one queue per card, served in
 * submission order; busy queues take turns of FAKEGPU_SLICE_US (0: all run at once at equal shares). Nothing
 * runs in the background: whoever looks at a card first brings it up to the present.
 *
 * A mark is a position in the own queue: "everything submitted before". Times are CLOCK_MONOTONIC in ns.
 */
#ifndef FAKEGPU_ENGINE_H
#define FAKEGPU_ENGINE_H

#include "state.h"

/* Cost of work that runs until this process submits something more. */
#define FG_UNTIL_NEXT ((uint64_t)1 << 50)

/* Append work of this process; waits while FG_QUEUE entries are unfinished. Returns the mark behind it. */
uint64_t fg_engine_submit(uint32_t device, uint64_t cost_ns);
/* The mark behind all work submitted so far. */
uint64_t fg_engine_mark(uint32_t device);
/* Whether everything before `mark` is done; then *end_ns is when (0: nothing was before it). */
int fg_engine_reached(uint32_t device, uint64_t mark, uint64_t *end_ns);
/* Sleep until everything before `mark` is done. */
void fg_engine_wait(uint32_t device, uint64_t mark);
/* Called about every 512 submissions of this process, before finished entries are overwritten. */
extern void (*fg_engine_before_reuse)(void);

/* Under the card's lock: */
void fg_engine_advance(struct fg_device *device, uint64_t now);
void fg_engine_drop(struct fg_device *device, uint32_t channel);
void fg_engine_repair(struct fg_device *device);

#endif
