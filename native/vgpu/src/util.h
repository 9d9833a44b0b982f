/* Clocks and pauses, and errors that pass. */
#ifndef VGPU_UTIL_H
#define VGPU_UTIL_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t vg_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* CLOCK_MONOTONIC, ns. Every deadline is one of these. */
static inline uint64_t vg_now(void) {
    return vg_clock(CLOCK_MONOTONIC);
}

static inline uint64_t vg_unix_seconds(void) {
    return vg_clock(CLOCK_REALTIME_COARSE) / 1000000000u;
}

/* What a process can bring upon itself, and only for a while. */
static inline bool vg_exhausted(int error) {
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == EFBIG;
}

static inline void vg_pause_ns(uint64_t ns) {
    struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&pause, NULL);
}

#endif
