/* Events: a position in the queue and the time at which it was passed. */
#include "stream.h"

#include "graph.h"

#include <stdlib.h>

enum { EVENT_MAGIC = 0x45564E31 };

struct fg_event {
    uint32_t magic, flags, card;
    int recorded, done;
    struct fg_graph *captured; /* recorded last in this capture */
    uint64_t mark, record_ns, end_ns;
    struct fg_event *previous, *next; /* list of those recorded and not yet known to be done */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fg_event *pending;

static void unlink_event(struct fg_event *event) {
    if (event->previous)
        event->previous->next = event->next;
    else if (pending == event)
        pending = event->next;
    if (event->next)
        event->next->previous = event->previous;
    event->previous = event->next = NULL;
}

/* Under the lock. */
static void settle(struct fg_event *event) {
    uint64_t when;
    if (event->done || !fg_engine_reached(event->card, event->mark, &when))
        return;
    event->end_ns = when > event->record_ns ? when : event->record_ns;
    event->done = 1;
    unlink_event(event);
}

static void settle_all(void) {
    pthread_mutex_lock(&lock);
    for (struct fg_event *event = pending, *next; event; event = next) {
        next = event->next;
        settle(event);
    }
    pthread_mutex_unlock(&lock);
}

void fg_events_forget(void) {
    pthread_mutex_init(&lock, NULL);
    pending = NULL;
}

static int known(const struct fg_event *event) {
    return event && event->magic == EVENT_MAGIC;
}

FG_FUNCTION(cuEventCreate, (CUevent * event, unsigned flags), {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!event || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    *event = calloc(1, sizeof **event);
    if (!*event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*event)->magic = EVENT_MAGIC;
    (*event)->flags = flags;
    (*event)->card = context->card;
    __atomic_store_n(&fg_engine_before_reuse, settle_all, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
})

static CUresult destroy(CUevent event) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!known(event))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    unlink_event(event);
    event->magic = 0;
    pthread_mutex_unlock(&lock);
    free(event);
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuEventDestroy, (CUevent event), { return destroy(event); })
FG_FUNCTION(cuEventDestroy_v2, (CUevent event), { return destroy(event); })

static CUresult record(CUevent event, CUstream handle, int per_thread) {
    struct fg_context *context;
    struct fg_stream *stream;
    struct fg_graph *graph;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS && !known(event))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS)
        result = fg_stream_resolve(context, handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = fg_stream_capture(stream, &graph);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->context->card != event->card)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t mark = fg_driver.zero_cost ? 0
                    : stream->legacy    ? fg_engine_mark(event->card)
                                        : __atomic_load_n(&stream->mark, __ATOMIC_ACQUIRE);
    pthread_mutex_lock(&lock);
    unlink_event(event);
    event->captured = graph;
    event->recorded = 1;
    event->record_ns = event->end_ns = fg_now();
    event->mark = mark;
    uint64_t when;
    /* What is over now keeps no entry of the queue waiting for this event. */
    event->done = graph || mark == 0 || fg_engine_reached(event->card, mark, &when);
    if (!event->done) {
        event->next = pending;
        if (pending)
            pending->previous = event;
        pending = event;
    }
    pthread_mutex_unlock(&lock);
    return graph ? fg_graph_append(graph, FG_NODE_EVENT_RECORD, 0) : CUDA_SUCCESS;
}

FG_TWIN(cuEventRecord, cuEventRecord_ptsz, (CUevent event, CUstream stream),
        { return record(event, stream, per_thread); })
FG_TWIN(cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz, (CUevent event, CUstream stream, unsigned flags),
        { return flags > 1 ? CUDA_ERROR_INVALID_VALUE : record(event, stream, per_thread); })

/* Handle check and the rules of capture; *captured events have no state to ask for. */
static CUresult askable(CUevent event) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!known(event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured)
        return CUDA_ERROR_CAPTURED_EVENT;
    return fg_forbidden_in_capture();
}

FG_FUNCTION(cuEventQuery, (CUevent event), {
    CUresult result = askable(event);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    if (event->recorded)
        settle(event);
    int done = !event->recorded || event->done;
    pthread_mutex_unlock(&lock);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
})

FG_FUNCTION(cuEventSynchronize, (CUevent event), {
    CUresult result = askable(event);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    uint64_t mark = event->recorded && !event->done ? event->mark : 0;
    pthread_mutex_unlock(&lock);
    if (mark)
        fg_engine_wait(event->card, mark);
    fg_pools_settle(event->card);
    return CUDA_SUCCESS;
})

static CUresult elapsed(float *milliseconds, CUevent start, CUevent stop) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!known(start) || !known(stop) || ((start->flags | stop->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->captured || stop->captured)
        return CUDA_ERROR_CAPTURED_EVENT;
    pthread_mutex_lock(&lock);
    settle(start);
    settle(stop);
    CUresult result = !start->recorded || !stop->recorded ? CUDA_ERROR_INVALID_HANDLE
                      : !start->done || !stop->done       ? CUDA_ERROR_NOT_READY
                                                          : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        int64_t ns = (int64_t)(stop->end_ns - start->end_ns);
        *milliseconds =
            (float)((ns + (ns < 0 ? -250 : 250)) / 500 * 500) / 1e6f; /* resolution of half a microsecond */
    }
    pthread_mutex_unlock(&lock);
    return result;
}

FG_FUNCTION(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent stop),
            { return elapsed(milliseconds, start, stop); })
FG_FUNCTION(cuEventElapsedTime_v2, (float *milliseconds, CUevent start, CUevent stop),
            { return elapsed(milliseconds, start, stop); })

/* One queue in one order: every earlier record is earlier work already. Only a capture is joined. */
FG_TWIN(cuStreamWaitEvent, cuStreamWaitEvent_ptsz, (CUstream handle, CUevent event, unsigned flags), {
    struct fg_context *context;
    struct fg_stream *stream;
    CUresult result = fg_need_context(&context);
    (void)flags;
    if (result == CUDA_SUCCESS && !known(event))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS)
        result = fg_stream_resolve(context, handle, per_thread, &stream);
    if (result == CUDA_SUCCESS && event->captured && fg_capture_owns(event->captured))
        fg_capture_join(stream, event->captured);
    return result;
})
