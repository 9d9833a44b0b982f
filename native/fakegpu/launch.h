/* What a launch costs. */
#ifndef FAKEGPU_LAUNCH_H
#define FAKEGPU_LAUNCH_H

#include "driver.h"

struct fg_launch {
    struct fg_function *function;
    uint64_t blocks, threads; /* threads of one block */
    void **params;
};

/* Nanoseconds of the card, by the function's name (README, "Kernels") and FAKEGPU_TIME_SCALE_MILLI. */
uint64_t fg_launch_cost(const struct fg_launch *launch);
/* Put `cost_ns` on a stream, or into its capture. */
CUresult fg_launch_work(CUstream stream, int per_thread, uint64_t cost_ns);

#endif
