#include "model.h"

#include <stddef.h>
#include <strings.h>

#define MIB ((uint64_t)1 << 20)

static const struct fg_model models[] = {
    {"A100-SXM4-40GB",
     "NVIDIA A100-SXM4-40GB",
     40960 * MIB,
     512 * MIB,
     108,
     2048,
     8,
     0,
     1410,
     1215,
     5120,
     400000,
     0x20B010DEu,
     0x134F10DEu,
     7,
     14,
     1,
     12,
     40960,
     164},
    {"A100-SXM4-80GB",
     "NVIDIA A100-SXM4-80GB",
     81920 * MIB,
     600 * MIB,
     108,
     2048,
     8,
     0,
     1410,
     1593,
     5120,
     400000,
     0x20B210DEu,
     0x147F10DEu,
     7,
     14,
     1,
     12,
     40960,
     164},
    {"H100-80GB", "NVIDIA H100 80GB HBM3",
     81559 * MIB, 550 * MIB,
     132,         2048,
     9,           0,
     1980,        2619,
     5120,        700000,
     0x233010DEu, 0x16C110DEu,
     9,           14,
     1,           18,
     51200,       228},
    {"H200", "NVIDIA H200", 143771 * MIB, 600 * MIB,   132, 2048, 9, 0,  1980,  3201,
     6144,   700000,        0x233510DEu,  0x18BE10DEu, 9,   14,   1, 18, 61440, 228},
    {"L40S", "NVIDIA L40S", 46068 * MIB, 560 * MIB,   142, 1536, 8, 9, 2520,  9001,
     384,    350000,        0x26B910DEu, 0x185110DEu, 8,   14,   0, 0, 98304, 100},
    {"T4", "Tesla T4", 15360 * MIB, 260 * MIB,   40, 1024, 7, 5, 1590, 5001,
     256,  70000,      0x1EB810DEu, 0x12A210DEu, 6,  2,    0, 0, 4096, 64},
    {"V100-SXM2-16GB",
     "Tesla V100-SXM2-16GB",
     16384 * MIB,
     256 * MIB,
     80,
     2048,
     7,
     0,
     1530,
     877,
     4096,
     300000,
     0x1DB110DEu,
     0x121210DEu,
     5,
     2,
     0,
     6,
     6144,
     96},
    {"V100-SXM2-32GB",
     "Tesla V100-SXM2-32GB",
     32768 * MIB,
     256 * MIB,
     80,
     2048,
     7,
     0,
     1530,
     877,
     4096,
     300000,
     0x1DB510DEu,
     0x124910DEu,
     5,
     2,
     0,
     6,
     6144,
     96},
};

const struct fg_model *fg_model_at(unsigned index) {
    return index < sizeof models / sizeof models[0] ? &models[index] : NULL;
}

const struct fg_model *fg_model_find(const char *key) {
    for (unsigned i = 0; i < sizeof models / sizeof models[0]; i++)
        if (strcasecmp(models[i].key, key) == 0)
            return &models[i];
    if (strcasecmp(key, "V100") == 0)
        return fg_model_find("V100-SXM2-32GB");
    if (strcasecmp(key, "A100") == 0)
        return fg_model_find("A100-SXM4-40GB");
    if (strcasecmp(key, "H100") == 0)
        return fg_model_find("H100-80GB");
    return NULL;
}
