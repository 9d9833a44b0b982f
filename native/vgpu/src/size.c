#include "size.h"

static const char *skip_blanks(const char *p) {
    while (*p == ' ' || *p == '\t')
        p++;
    return p;
}

static bool digit(char c) {
    return c >= '0' && c <= '9';
}

/* After the digit of a unit: nothing, i, b, ib; then blanks up to the end. */
static bool unit_ends(const char *p) {
    if (*p == 'i')
        p++;
    if (*p == 'b' || *p == 'B')
        p++;
    return *skip_blanks(p) == '\0';
}

static int unit_shift(char c) {
    switch (c) {
    case 'k':
    case 'K':
        return 10;
    case 'm':
    case 'M':
        return 20;
    case 'g':
    case 'G':
        return 30;
    default:
        return 0;
    }
}

enum vg_parsed vg_parse_size(const char *text, uint64_t *bytes) {
    const char *p = skip_blanks(text);
    if (*p == '\0')
        return VG_PARSED_EMPTY;
    if (!digit(*p))
        return VG_PARSED_REJECTED;
    uint64_t whole = 0;
    for (; digit(*p); p++)
        if (__builtin_mul_overflow(whole, 10, &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*p - '0'), &whole))
            return VG_PARSED_REJECTED;
    /* The fraction as numerator / denominator; digits behind the ninth are below a byte of a GiB. */
    uint64_t numerator = 0, denominator = 1;
    if (*p == '.') {
        if (!digit(*++p))
            return VG_PARSED_REJECTED;
        for (; digit(*p); p++)
            if (denominator < 10000000000u) {
                numerator = numerator * 10 + (uint64_t)(*p - '0');
                denominator *= 10;
            }
    }
    int shift = unit_shift(*p);
    if (shift != 0) {
        if (!unit_ends(p + 1))
            return VG_PARSED_REJECTED;
    } else if (*skip_blanks(p) != '\0') {
        return VG_PARSED_REJECTED;
    }
    if (whole > UINT64_MAX >> shift)
        return VG_PARSED_REJECTED;
    uint64_t fraction = (uint64_t)((((unsigned __int128)numerator) << shift) / denominator);
    if (__builtin_add_overflow(whole << shift, fraction, bytes))
        return VG_PARSED_REJECTED;
    return VG_PARSED_VALUE;
}

enum vg_parsed vg_parse_integer(const char *text, long low, long high, long *value) {
    const char *p = skip_blanks(text);
    if (*p == '\0')
        return VG_PARSED_EMPTY;
    bool negative = *p == '-';
    if (negative)
        p++;
    if (!digit(*p))
        return VG_PARSED_REJECTED;
    long number = 0;
    for (; digit(*p); p++)
        if (__builtin_mul_overflow(number, 10, &number) || __builtin_add_overflow(number, *p - '0', &number))
            return VG_PARSED_REJECTED;
    if (negative)
        number = -number;
    if (*skip_blanks(p) != '\0' || number < low || number > high)
        return VG_PARSED_REJECTED;
    *value = number;
    return VG_PARSED_VALUE;
}
