/* Modules and functions. */
#ifndef FAKEGPU_MODULE_H
#define FAKEGPU_MODULE_H

#include "driver.h"

#define FG_FUNCTION_MAGIC 0x464E4331u
enum fg_cost_rule { FG_COST_FIXED, FG_COST_PER_BLOCK, FG_COST_ARGUMENT };

struct fg_function {
    uint32_t magic;
    enum fg_cost_rule rule;
    uint64_t cost_ns, block_threads;
    struct fg_module *module;
    struct fg_function *next;
    char name[];
};

#endif
