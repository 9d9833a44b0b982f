/* cuGetProcAddress: (name, version, flags) -> exported function, from the table in procaddr.inc. */
#include "driver.h"
#include "trace.h"

#include <string.h>

/* The table needs addresses only, never the types: a name of our own for each symbol. */
#define FG_ROW(base, version, symbol) extern void fg_at_##symbol(void) __asm__(#symbol);
#define FG_ROW_TWIN(base, version, symbol, twin_version, twin)                                               \
    extern void fg_at_##symbol(void) __asm__(#symbol);                                                       \
    extern void fg_at_##twin(void) __asm__(#twin);
#include "procaddr.inc"
#undef FG_ROW
#undef FG_ROW_TWIN

struct row {
    const char *base;
    uint32_t version;
    void (*symbol)(void);
    uint32_t twin_version;
    void (*twin)(void);
};

#define FG_ROW(base, version, symbol) {#base, version, fg_at_##symbol, 0, NULL},
#define FG_ROW_TWIN(base, version, symbol, twin_version, twin)                                               \
    {#base, version, fg_at_##symbol, twin_version, fg_at_##twin},
static const struct row rows[] = {
#include "procaddr.inc"
};
#undef FG_ROW
#undef FG_ROW_TWIN

/*
 * The newest function of this name that is not newer than the program's version and the driver's. per_thread
 * picks the per-thread-stream twin where there is one. *known: the name exists at all in this driver.
 */
static void *look_up(const char *base, uint32_t wanted, uint32_t driver, int per_thread, int *known) {
    const struct row *best = NULL;
    *known = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const struct row *row = &rows[i];
        if (strcmp(row->base, base) != 0 || row->version > driver)
            continue;
        *known = 1;
        if (row->version <= wanted && (!best || row->version > best->version))
            best = row;
    }
    if (!best)
        return NULL;
    return per_thread && best->twin && best->twin_version <= wanted ? (void *)best->twin
                                                                    : (void *)best->symbol;
}

static CUresult find(const char *base, void **function, int version, uint64_t flags, int *status) {
    int known = 0;
    fg_trace_lookup(base, version, flags);
    if (!function || !base || !*base || version < 2000 || version > 99999 || flags > 3)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t driver = fg_cuda_version();
    if (driver == 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *function = look_up(base, (uint32_t)version, driver,
                        (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, &known);
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS
              : known   ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                        : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuGetProcAddress, (const char *base, void **function, int version, uint64_t flags), {
    int status = 0;
    CUresult result = find(base, function, version, flags, &status);
    return result == CUDA_SUCCESS && status != CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_ERROR_NOT_FOUND : result;
})

FG_FUNCTION(cuGetProcAddress_v2,
            (const char *base, void **function, int version, uint64_t flags, int *status), {
                int found = 0;
                CUresult result = find(base, function, version, flags, &found);
                if (result != CUDA_SUCCESS)
                    return result;
                if (status)
                    *status = found;
                return !status && found != CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
            })
