/* What the files of libcuda.so.1 share: entry points, contexts, blocks of memory. */
#ifndef FAKEGPU_DRIVER_H
#define FAKEGPU_DRIVER_H

#include "cuda_abi.h"
#include "engine.h"
#include "state.h"
#include "trace.h"

#include <pthread.h>

#define FG_API __attribute__((visibility("default")))

/*
 * One exported function. The body follows the parameters; call log, delays and injected errors (trace.h) come
 * first and may end the call. FG_TWIN makes two: the plain symbol, with per_thread = 0, and its
 * per-thread-stream twin with 1.
 */
#define FG_FUNCTION(name, parameters, ...)                                                                   \
    FG_API CUresult name parameters;                                                                         \
    FG_API CUresult name parameters {                                                                        \
        CUresult injected_ = fg_enter(#name);                                                                \
        if (injected_ != CUDA_SUCCESS)                                                                       \
            return injected_;                                                                                \
        __VA_ARGS__                                                                                          \
    }
#define FG_TWIN(name, twin, parameters, ...)                                                                 \
    FG_FUNCTION(name, parameters, enum {per_thread = 0}; (void)per_thread; __VA_ARGS__)                      \
    FG_FUNCTION(twin, parameters, enum {per_thread = 1}; (void)per_thread; __VA_ARGS__)

struct fg_context {
    uint32_t magic;
    int ordinal;
    uint32_t card, retained, attached, flags, api_version;
    int primary, alive;
    uint64_t id;
    struct fg_context *next;
    struct fg_stream *legacy;
};

/* Settings and state of this process; ordinals are the CUDA numbering. */
struct fg_driver {
    int initialized, zero_cost;
    uint32_t count, version;
    uint8_t card[FG_MAX_DEVICES];
};
extern struct fg_driver fg_driver;

/* Context of this thread; NULL if none. */
struct fg_context *fg_current(void);
/* CUDA_SUCCESS with *context set, NOT_INITIALIZED, INVALID_CONTEXT or CONTEXT_IS_DESTROYED. */
CUresult fg_need_context(struct fg_context **context);
/* CUDA_SUCCESS, NOT_INITIALIZED or INVALID_DEVICE. */
CUresult fg_need_device(CUdevice device);
int fg_context_known(const struct fg_context *context);

enum fg_block_kind {
    FG_BLOCK_PLAIN,
    FG_BLOCK_MANAGED,
    FG_BLOCK_POOL,
    FG_BLOCK_HOST,
    FG_BLOCK_REGISTERED,
    FG_BLOCK_RANGE
};

/* A block of memory of this process, findable by any address in it. */
struct fg_block {
    uintptr_t start;
    size_t size; /* as asked for, at least 1 */
    enum fg_block_kind kind;
    uint32_t card;
    struct fg_context *context;
    struct fg_pool *pool;
    size_t mapped; /* bytes of an own mapping, 0: inside a chunk or not ours */
    uint64_t units, physical, id;
    struct fg_chunk *chunk;
    struct fg_block *chain;
};

static inline uint64_t fg_round(uint64_t value, uint64_t unit) {
    return value > UINT64_MAX - unit ? UINT64_MAX / unit * unit : (value + unit - 1) / unit * unit;
}

#define FG_GRANULE ((uint64_t)2 << 20)

/* heap.c; all take the heap's own lock. */
CUresult fg_heap_allocate(struct fg_context *context, size_t size, enum fg_block_kind kind,
                          struct fg_pool *pool, uintptr_t *start);
/* Free the block that starts at `start`; INVALID_VALUE if none does or `allowed` (bit mask of kinds) excludes
 * it. */
CUresult fg_heap_free(uintptr_t start, unsigned allowed);
/* Enter memory that is not the heap's (host registrations, address ranges). */
CUresult fg_heap_enter(struct fg_context *context, void *start, size_t size, enum fg_block_kind kind);
/* Copy of the block around `address`; 0 if there is none. */
int fg_heap_find(uintptr_t address, struct fg_block *block);
/* Whether [address, address + size) lies in one known block. */
int fg_heap_covers(uintptr_t address, size_t size);
void fg_heap_drop_context(struct fg_context *context);
void fg_heap_forget(void);

/* What each file does when a context ends, and in a forked child (locks may be held by threads that do not
 * exist there). */
void fg_modules_drop_context(struct fg_context *context);
void fg_arrays_drop_context(struct fg_context *context);
void fg_pools_release(uint32_t card);
void fg_streams_forget(void);
void fg_events_forget(void);
void fg_modules_forget(void);
void fg_arrays_forget(void);
void fg_vmm_forget(void);
/* CUDA version of the driver for this process. 0 if the state cannot be opened. */
uint32_t fg_cuda_version(void);

/* pool.c */
CUresult fg_pool_take(struct fg_pool *pool, uint64_t units);
void fg_pool_give(struct fg_pool *pool, uint64_t units);
void fg_pools_settle(uint32_t card);
void fg_pools_forget(void);

/* stream.c */
struct fg_stream;
/* Resolve a stream argument; NULL means the legacy or the thread's own stream. */
CUresult fg_stream_resolve(struct fg_context *context, CUstream handle, int per_thread,
                           struct fg_stream **stream);
/* The graph that a capture of this stream fills: CUDA_SUCCESS with *graph (NULL: not capturing), or the
 * capture's error. */
CUresult fg_stream_capture(struct fg_stream *stream, struct fg_graph **graph);
/* What a call with work for a stream begins with: the context of the call, the stream, its capture's graph.
 */
CUresult fg_stream_enter(CUstream handle, int per_thread, struct fg_context **context,
                         struct fg_stream **stream, struct fg_graph **graph);
void fg_stream_submitted(struct fg_stream *stream, uint64_t mark);
/* A call that capture forbids (global mode, this thread): invalidates and says 900, else CUDA_SUCCESS. */
CUresult fg_forbidden_in_capture(void);
void fg_streams_drop_context(struct fg_context *context);

/* graph.c */
struct fg_graph *fg_graph_new(void);
void fg_graph_delete(struct fg_graph *graph);
CUresult fg_graph_append(struct fg_graph *graph, int type, uint64_t cost_ns);

#endif
