/* Sizes and integers as they stand in variables: no text may crash, and what is read must read back. */
#include "fuzz.h"
#include "size.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#define SEED(text) {text, sizeof text - 1}

const struct fuzz_seed fuzz_seeds[] = {
    SEED("3000m"),        SEED("2g"),
    SEED("010m"),         SEED("1.5g"),
    SEED("1GiB"),         SEED(" 64 "),
    SEED("abc"),          SEED("0x10m"),
    SEED("-12"),          SEED("18446744073709551615"),
    SEED("64mm"),         SEED(""),
    SEED("0.3333k"),      SEED("1.b m"),
    SEED("99999999999g"), SEED("1.99999999999999999999999999g"),
};
const size_t fuzz_seed_count = sizeof fuzz_seeds / sizeof fuzz_seeds[0];

/* Whole units of a text that is a size: what stands before the point, and the shift of its letter. */
static bool is_rounded_down(const char *text, uint64_t bytes) {
    char *end = NULL;
    uint64_t whole = strtoull(text, &end, 10);
    while (*end == '.' || (*end >= '0' && *end <= '9'))
        end++;
    int shift = 0;
    for (const char *unit = "kmg"; *unit != '\0'; unit++)
        if ((*end | 0x20) == *unit)
            shift = 10 * (int)(unit - "kmg" + 1);
    return bytes >> shift == whole;
}

static void check_size(const char *text) {
    const uint64_t untouched = 0x5555555555555555u;
    uint64_t bytes = untouched, again = 0;
    char round[32];
    if (vg_parse_size(text, &bytes) != VG_PARSED_VALUE)
        return;
    FUZZ_CHECK(is_rounded_down(text, bytes));
    snprintf(round, sizeof round, "\t %" PRIu64 " ", bytes);
    FUZZ_CHECK(vg_parse_size(round, &again) == VG_PARSED_VALUE && again == bytes);
}

static void check_integer(const char *text, long low, long high) {
    const long untouched = 123456789;
    long value = untouched, again = 0;
    char round[32];
    if (vg_parse_integer(text, low, high, &value) != VG_PARSED_VALUE) {
        FUZZ_CHECK(value == untouched);
        return;
    }
    FUZZ_CHECK(value >= low && value <= high);
    snprintf(round, sizeof round, "%ld", value);
    FUZZ_CHECK(vg_parse_integer(round, low, high, &again) == VG_PARSED_VALUE && again == value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    FUZZ_CHECK(text != NULL);
    if (size > 0)
        memcpy(text, data, size);
    text[size] = '\0';
    check_size(text);
    check_integer(text, 0, 1000000);
    check_integer(text, -20, 20);
    free(text);
    return 0;
}
