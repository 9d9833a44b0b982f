#include "config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONTAINER_STATE "/dev/fakegpu" /* where a container runtime mounts the cards of its node */

int fg_config_state_path(char *path, size_t size) {
    const char *set = getenv("FAKEGPU_STATE");
    struct stat found;
    int n;
    if (set && *set)
        n = snprintf(path, size, "%s", set);
    else if (stat(CONTAINER_STATE, &found) == 0 && S_ISDIR(found.st_mode))
        n = snprintf(path, size, CONTAINER_STATE);
    else
        n = snprintf(path, size, "/tmp/fakegpu-%u", (unsigned)getuid());
    return n > 0 && (size_t)n < size ? 0 : -1;
}

static int from_file(const char *state_path, const char *key, char *value, size_t size) {
    char name[4200], line[4096];
    snprintf(name, sizeof name, "%s/config", state_path);
    FILE *file = fopen(name, "re");
    if (!file)
        return 0;
    size_t n = strlen(key);
    int found = 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = 0;
        if (strncmp(line, key, n) == 0 && line[n] == '=' && strlen(line + n + 1) < size) {
            strcpy(value, line + n + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

int fg_config_get(const char *state_path, const char *key, char *value, size_t size) {
    const char *set = getenv(key);
    if (!set || !*set)
        return from_file(state_path, key, value, size);
    if (strlen(set) >= size) {
        fprintf(stderr, "fakegpu: %s is longer than %zu bytes and is ignored\n", key, size - 1);
        return 0;
    }
    strcpy(value, set);
    return 1;
}

uint64_t fg_config_number(const char *state_path, const char *key, uint64_t low, uint64_t high,
                          uint64_t fallback) {
    char text[64];
    if (!fg_config_get(state_path, key, text, sizeof text))
        return fallback;
    char *end = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (errno || *end || text[0] == '-' || number < low || number > high) {
        fprintf(stderr, "fakegpu: %s=%s is not a number from %llu to %llu; using %llu\n", key, text,
                (unsigned long long)low, (unsigned long long)high, (unsigned long long)fallback);
        return fallback;
    }
    return number;
}

int fg_config_piece(const char *list, unsigned index, char *value, size_t size) {
    const char *start = list;
    while (index > 0) {
        const char *comma = strchr(start, ',');
        if (!comma)
            break;
        start = comma + 1;
        index--;
    }
    size_t n = strcspn(start, ",");
    if (n == 0 || n >= size)
        return 0;
    memcpy(value, start, n);
    value[n] = 0;
    return 1;
}
