/* Text to numbers, without any locale. */
#ifndef VGPU_SIZE_H
#define VGPU_SIZE_H

#include <stdbool.h>
#include <stdint.h>

enum vg_parsed { VG_PARSED_EMPTY, VG_PARSED_VALUE, VG_PARSED_REJECTED };

/* A size in bytes: decimal digits, at most one point, unit k, m or g (2^10, 2^20, 2^30; any case, followed by
 * nothing, i, b or ib), blanks around it. A fraction is rounded down to a byte. */
enum vg_parsed vg_parse_size(const char *text, uint64_t *bytes);

/* A decimal integer from `low` to `high`, blanks around it. */
enum vg_parsed vg_parse_integer(const char *text, long low, long high, long *value);

#endif
