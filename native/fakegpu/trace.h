/*
 * What tests can see of and do to calls, per process: FAKEGPU_CALL_LOG=FILE (one line `pid tid ns name` a
 * call), FAKEGPU_FAULTS=name:n=code,... (the n-th call of name, n = * every call, returns code and does
 * nothing) and FAKEGPU_DELAY_US=name=us,... (sleep before the call).
 */
#ifndef FAKEGPU_TRACE_H
#define FAKEGPU_TRACE_H

/* FAKEGPU_LOOKUP_LOG=FILE: one line `name version flags` for each question to cuGetProcAddress. */
void fg_trace_lookup(const char *base, int version, unsigned long long flags);

/* 1 until the settings are read, then whether there is anything to do. */
extern int fg_trace_on;
int fg_trace(const char *name);
void fg_trace_forget(void); /* in a forked child */

static inline int fg_enter(const char *name) {
    return __builtin_expect(__atomic_load_n(&fg_trace_on, __ATOMIC_RELAXED), 0) ? fg_trace(name) : 0;
}

#endif
