/* Settings: the environment (FAKEGPU_*), then the file `config` of the state path with lines KEY=VALUE, then
 * a default. */
#ifndef FAKEGPU_CONFIG_H
#define FAKEGPU_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#define FG_MAX_DEVICES 32

/* Directory of the state: FAKEGPU_STATE, else /dev/fakegpu if it is one (in containers, where programs
 * started later do not inherit the runtime's environment), else /tmp/fakegpu-<uid>. Writes it to `path`; 0,
 * or -1 if it is too long. */
int fg_config_state_path(char *path, size_t size);

/*
 * Value of `key` from environment or the file `config` in `state_path`, copied to `value`. Returns 1 if set,
 * 0 if not. A value longer than `size` counts as not set and is reported on stderr.
 */
int fg_config_get(const char *state_path, const char *key, char *value, size_t size);

/* The same as a decimal number in [low, high]; anything else is reported on stderr and gives `fallback`. */
uint64_t fg_config_number(const char *state_path, const char *key, uint64_t low, uint64_t high,
                          uint64_t fallback);

/* The index-th piece of a comma list, the last one repeated behind the end; 0 if the list is empty. */
int fg_config_piece(const char *list, unsigned index, char *value, size_t size);

#endif
