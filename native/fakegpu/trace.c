#include "trace.h"

#include "config.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RULES = 32 };

struct rule {
    char name[64];
    unsigned long nth, calls; /* nth 0: every call */
    int code;
    unsigned long delay_us;
};

int fg_trace_on = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule rules[RULES];
static int rule_count, log_fd = -1, lookup_fd = -1, settled;

static int parse_fault(const char *text, struct rule *rule) {
    char nth[24] = "";
    if (sscanf(text, "%63[^:]:%23[^=]=%d", rule->name, nth, &rule->code) != 3)
        return 0;
    rule->nth = strcmp(nth, "*") == 0 ? 0 : strtoul(nth, NULL, 10);
    return strcmp(nth, "*") == 0 || rule->nth > 0;
}

static int parse_delay(const char *text, struct rule *rule) {
    return sscanf(text, "%63[^=]=%lu", rule->name, &rule->delay_us) == 2 && rule->delay_us <= 60000000;
}

static void read_rules(const char *state_path, const char *key, int (*parse)(const char *, struct rule *)) {
    char list[2048], *save = NULL;
    if (!fg_config_get(state_path, key, list, sizeof list))
        return;
    for (char *piece = strtok_r(list, ",", &save); piece; piece = strtok_r(NULL, ",", &save)) {
        struct rule rule = {.code = 0};
        if (rule_count == RULES || !parse(piece, &rule))
            fprintf(stderr, "fakegpu: %s: cannot use %s\n", key, piece);
        else
            rules[rule_count++] = rule;
    }
}

static int open_log(const char *state_path, const char *key) {
    char log[4096];
    return fg_config_get(state_path, key, log, sizeof log)
               ? open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)
               : -1;
}

static void settle(void) {
    char path[4096];
    settled = 1;
    if (fg_config_state_path(path, sizeof path) != 0)
        path[0] = 0;
    read_rules(path, "FAKEGPU_FAULTS", parse_fault);
    read_rules(path, "FAKEGPU_DELAY_US", parse_delay);
    log_fd = open_log(path, "FAKEGPU_CALL_LOG");
    lookup_fd = open_log(path, "FAKEGPU_LOOKUP_LOG");
    __atomic_store_n(&fg_trace_on, rule_count > 0 || log_fd >= 0, __ATOMIC_RELAXED);
}

static void write_line(const char *name) {
    char line[160];
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int n = snprintf(line, sizeof line, "%d %ld %lld %s\n", (int)getpid(), (long)syscall(SYS_gettid),
                     (long long)t.tv_sec * 1000000000 + t.tv_nsec, name);
    if (n > 0 && write(log_fd, line, (size_t)n) < 0)
        log_fd = -1;
}

void fg_trace_lookup(const char *base, int version, unsigned long long flags) {
    char line[160];
    pthread_mutex_lock(&lock);
    if (!settled)
        settle();
    int n = snprintf(line, sizeof line, "%s %d %llu\n", base && *base ? base : "-", version, flags);
    if (lookup_fd >= 0 && n > 0 && write(lookup_fd, line, (size_t)n) < 0)
        lookup_fd = -1;
    pthread_mutex_unlock(&lock);
}

void fg_trace_forget(void) {
    pthread_mutex_init(&lock, NULL);
}

int fg_trace(const char *name) {
    int code = 0;
    unsigned long delay = 0;
    pthread_mutex_lock(&lock);
    if (!settled)
        settle();
    if (log_fd >= 0)
        write_line(name);
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->name, name) != 0)
            continue;
        rule->calls++;
        delay += rule->delay_us;
        if (rule->code && (rule->nth == 0 || rule->nth == rule->calls))
            code = rule->code;
    }
    pthread_mutex_unlock(&lock);
    if (delay) {
        struct timespec t = {.tv_sec = (time_t)(delay / 1000000), .tv_nsec = (long)(delay % 1000000) * 1000};
        nanosleep(&t, NULL);
    }
    return code;
}
