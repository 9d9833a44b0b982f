/* Streams and stream capture. Work of one process runs in submission order, so streams are positions in one
 * queue. */
#include "stream.h"

#include "graph.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STREAM_MAGIC = 0x53545231, OWN_STREAMS = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fg_stream *all;
static int captures; /* running ones of the whole process */
static uint64_t next_id = 1, next_capture = 1;
static _Thread_local int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static _Thread_local struct {
    uint64_t context_id;
    struct fg_stream *stream;
} own[OWN_STREAMS];

static void count_capture(int change) {
    __atomic_fetch_add(&captures, change, __ATOMIC_RELAXED);
}

static pid_t thread_id(void) {
    return (pid_t)syscall(SYS_gettid);
}

static struct fg_stream *new_stream(struct fg_context *context, unsigned flags, int priority, int legacy) {
    struct fg_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    *stream = (struct fg_stream){
        .magic = STREAM_MAGIC, .context = context, .flags = flags, .priority = priority, .legacy = legacy};
    pthread_mutex_lock(&lock);
    stream->id = next_id++;
    stream->next = all;
    all = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

static struct fg_stream *legacy_stream(struct fg_context *context) {
    struct fg_stream *stream = __atomic_load_n(&context->legacy, __ATOMIC_ACQUIRE), *nobody = NULL;
    if (stream || !(stream = new_stream(context, 0, 0, 1)))
        return stream;
    if (__atomic_compare_exchange_n(&context->legacy, &nobody, stream, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return stream;
    stream->magic = 0; /* lost a race; stays in the list, unused */
    return nobody;
}

static struct fg_stream *thread_stream(struct fg_context *context) {
    int place = -1;
    for (int i = 0; i < OWN_STREAMS; i++) {
        if (own[i].stream && own[i].context_id == context->id)
            return own[i].stream;
        if (place < 0 && !own[i].stream)
            place = i;
    }
    if (place < 0)
        place = (int)(context->id % OWN_STREAMS);
    own[place].context_id = context->id;
    return own[place].stream = new_stream(context, 0, 0, 0);
}

CUresult fg_stream_resolve(struct fg_context *context, CUstream handle, int per_thread,
                           struct fg_stream **stream) {
    if (handle == NULL)
        handle = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY)
        *stream = legacy_stream(context);
    else if (handle == CU_STREAM_PER_THREAD)
        *stream = thread_stream(context);
    else if (handle->magic != STREAM_MAGIC || !handle->context->alive)
        return CUDA_ERROR_INVALID_HANDLE;
    else
        *stream = handle;
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Context of the call and stream of the argument; a user's stream brings its own context. */
static CUresult resolve(CUstream handle, int per_thread, struct fg_stream **stream) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    return result == CUDA_SUCCESS ? fg_stream_resolve(context, handle, per_thread, stream) : result;
}

void fg_stream_submitted(struct fg_stream *stream, uint64_t mark) {
    __atomic_store_n(&stream->mark, mark, __ATOMIC_RELEASE);
}

void fg_streams_drop_context(struct fg_context *context) {
    pthread_mutex_lock(&lock);
    for (struct fg_stream *stream = all; stream; stream = stream->next)
        if (stream->context == context) {
            count_capture(
                -(stream->capture_status != CU_STREAM_CAPTURE_STATUS_NONE && stream->capture_origin));
            stream->capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
            stream->magic = 0; /* memory is kept: a stale handle must stay recognisable */
        }
    pthread_mutex_unlock(&lock);
}

void fg_streams_forget(void) {
    pthread_mutex_init(&lock, NULL);
    all = NULL;
    captures = 0;
    memset(own, 0, sizeof own);
}

/* --- Capture --- */

void fg_capture_invalidate(struct fg_stream *stream) {
    pthread_mutex_lock(&lock);
    struct fg_graph *graph = stream->graph;
    for (struct fg_stream *each = all; each; each = each->next)
        if (each->capture_status == CU_STREAM_CAPTURE_STATUS_ACTIVE && each->graph == graph)
            each->capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    pthread_mutex_unlock(&lock);
}

int fg_capture_owns(const struct fg_graph *graph) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct fg_stream *each = all; each && !found; each = each->next)
        found = each->capture_status == CU_STREAM_CAPTURE_STATUS_ACTIVE && each->graph == graph;
    pthread_mutex_unlock(&lock);
    return found;
}

/* A blocking stream in capture makes every use of the legacy stream an error that spoils the capture. */
static CUresult legacy_conflict(struct fg_stream *legacy) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct fg_stream *each = all; each; each = each->next)
        if (each->capture_status != CU_STREAM_CAPTURE_STATUS_NONE &&
            !(each->flags & CU_STREAM_NON_BLOCKING) && each->context == legacy->context) {
            each->capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult fg_stream_capture(struct fg_stream *stream, struct fg_graph **graph) {
    *graph = NULL;
    if (__atomic_load_n(&captures, __ATOMIC_RELAXED) == 0)
        return CUDA_SUCCESS;
    if (stream->legacy)
        return legacy_conflict(stream);
    pthread_mutex_lock(&lock);
    int status = stream->capture_status;
    *graph = status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? stream->graph : NULL;
    pthread_mutex_unlock(&lock);
    return status == CU_STREAM_CAPTURE_STATUS_INVALIDATED ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                                          : CUDA_SUCCESS;
}

CUresult fg_stream_enter(CUstream handle, int per_thread, struct fg_context **context,
                         struct fg_stream **stream, struct fg_graph **graph) {
    CUresult result = fg_need_context(context);
    if (result == CUDA_SUCCESS)
        result = fg_stream_resolve(*context, handle, per_thread, stream);
    return result == CUDA_SUCCESS ? fg_stream_capture(*stream, graph) : result;
}

CUresult fg_forbidden_in_capture(void) {
    if (__atomic_load_n(&captures, __ATOMIC_RELAXED) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pid_t thread = thread_id();
    pthread_mutex_lock(&lock);
    for (struct fg_stream *each = all; each; each = each->next) {
        int active = each->capture_status != CU_STREAM_CAPTURE_STATUS_NONE && each->capture_origin;
        int global = each->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                     thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        int local = each->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && each->capture_thread == thread;
        if (active && (global || local)) {
            each->capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult begin(CUstream handle, int per_thread, struct fg_graph *graph, int mode) {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    if (stream->capture_status != CU_STREAM_CAPTURE_STATUS_NONE) {
        result = 401; /* CUDA_ERROR_ILLEGAL_STATE */
    } else {
        stream->graph = graph ? graph : fg_graph_new();
        stream->capture_status =
            stream->graph ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
        stream->capture_mode = mode;
        stream->capture_origin = 1;
        stream->capture_thread = thread_id();
        stream->capture_id = next_capture++;
        count_capture(stream->graph != NULL);
        result = stream->graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void fg_capture_join(struct fg_stream *stream, struct fg_graph *graph) {
    pthread_mutex_lock(&lock);
    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_NONE) {
        stream->graph = graph;
        stream->capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
        stream->capture_origin = 0;
    }
    pthread_mutex_unlock(&lock);
}

static CUresult end(CUstream handle, int per_thread, CUgraph *graph) {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_NONE)
        return 401; /* CUDA_ERROR_ILLEGAL_STATE */
    if (!stream->capture_origin)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (stream->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && stream->capture_thread != thread_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    pthread_mutex_lock(&lock);
    int valid = stream->capture_status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    struct fg_graph *captured = stream->graph;
    for (struct fg_stream *each = all; each; each = each->next)
        if (each->graph == captured && each->capture_status != CU_STREAM_CAPTURE_STATUS_NONE) {
            each->capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
            each->graph = NULL;
        }
    count_capture(-1);
    pthread_mutex_unlock(&lock);
    *graph = valid ? captured : NULL;
    if (!valid)
        fg_graph_delete(captured);
    return valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

FG_TWIN(cuStreamBeginCapture, cuStreamBeginCapture_ptsz, (CUstream stream),
        { return begin(stream, per_thread, NULL, CU_STREAM_CAPTURE_MODE_GLOBAL); })
FG_TWIN(cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz, (CUstream stream, int mode),
        { return begin(stream, per_thread, NULL, mode); })
FG_TWIN(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz,
        (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *edges, size_t count, int mode),
        {
            (void)nodes, (void)edges, (void)count;
            return fg_graph_known(graph) ? begin(stream, per_thread, graph, mode) : CUDA_ERROR_INVALID_VALUE;
        })
FG_TWIN(cuStreamEndCapture, cuStreamEndCapture_ptsz, (CUstream stream, CUgraph *graph),
        { return end(stream, per_thread, graph); })

FG_TWIN(cuStreamIsCapturing, cuStreamIsCapturing_ptsz, (CUstream handle, int *status), {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS && !status)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && stream->legacy && __atomic_load_n(&captures, __ATOMIC_RELAXED))
        result = legacy_conflict(stream);
    if (result == CUDA_SUCCESS)
        *status = stream->capture_status;
    return result;
})

static CUresult capture_info(CUstream handle, int per_thread, int *status, uint64_t *id, CUgraph *graph) {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    *status = stream->capture_status;
    if (id)
        *id = stream->capture_id;
    if (graph)
        *graph = stream->graph;
    return CUDA_SUCCESS;
}

FG_TWIN(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz, (CUstream stream, int *status, uint64_t *id),
        { return capture_info(stream, per_thread, status, id, NULL); })
FG_TWIN(cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz,
        (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
         size_t *count),
        {
            if (nodes)
                *nodes = NULL;
            if (count)
                *count = 0;
            return capture_info(stream, per_thread, status, id, graph);
        })

FG_FUNCTION(cuThreadExchangeStreamCaptureMode, (int *mode), {
    if (!mode || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
})

/* --- Streams --- */

static CUresult create(CUstream *handle, unsigned flags, int priority) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    struct fg_stream *stream = new_stream(context, flags, priority, 0);
    if (stream)
        *handle = stream;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

FG_FUNCTION(cuStreamCreate, (CUstream * stream, unsigned flags), { return create(stream, flags, 0); })
FG_FUNCTION(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority),
            { return create(stream, flags, priority); })

static CUresult destroy(CUstream stream) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD ||
        stream->magic != STREAM_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    count_capture(-(stream->capture_status != CU_STREAM_CAPTURE_STATUS_NONE && stream->capture_origin));
    stream->capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
    stream->magic = 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuStreamDestroy, (CUstream stream), { return destroy(stream); })
FG_FUNCTION(cuStreamDestroy_v2, (CUstream stream), { return destroy(stream); })

/* Capture forbids to wait for or to ask about a capturing stream. */
static CUresult not_capturing(struct fg_stream *stream) {
    struct fg_graph *graph;
    CUresult result = fg_stream_capture(stream, &graph);
    if (result != CUDA_SUCCESS || !graph)
        return result == CUDA_SUCCESS ? fg_forbidden_in_capture() : result;
    fg_capture_invalidate(stream);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult fg_stream_wait(struct fg_stream *stream) {
    CUresult result = not_capturing(stream);
    uint32_t card = stream->context->card;
    if (result != CUDA_SUCCESS || fg_driver.zero_cost)
        return result;
    fg_engine_wait(card,
                   stream->legacy ? fg_engine_mark(card) : __atomic_load_n(&stream->mark, __ATOMIC_ACQUIRE));
    fg_pools_settle(card);
    return CUDA_SUCCESS;
}

FG_TWIN(cuStreamSynchronize, cuStreamSynchronize_ptsz, (CUstream handle), {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    return result == CUDA_SUCCESS ? fg_stream_wait(stream) : result;
})

FG_TWIN(cuStreamQuery, cuStreamQuery_ptsz, (CUstream handle), {
    struct fg_stream *stream;
    uint64_t when;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = not_capturing(stream);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t mark = stream->legacy ? fg_engine_mark(stream->context->card)
                                   : __atomic_load_n(&stream->mark, __ATOMIC_ACQUIRE);
    return fg_engine_reached(stream->context->card, mark, &when) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
})

FG_TWIN(cuStreamGetCtx, cuStreamGetCtx_ptsz, (CUstream handle, CUcontext *context), {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS && !context)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *context = stream->context;
    return result;
})

FG_TWIN(cuStreamGetFlags, cuStreamGetFlags_ptsz, (CUstream handle, unsigned *flags), {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS && flags)
        *flags = stream->flags;
    return result == CUDA_SUCCESS && !flags ? CUDA_ERROR_INVALID_VALUE : result;
})

FG_TWIN(cuStreamGetPriority, cuStreamGetPriority_ptsz, (CUstream handle, int *priority), {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS && priority)
        *priority = stream->priority;
    return result == CUDA_SUCCESS && !priority ? CUDA_ERROR_INVALID_VALUE : result;
})

FG_TWIN(cuStreamGetId, cuStreamGetId_ptsz, (CUstream handle, unsigned long long *id), {
    struct fg_stream *stream;
    CUresult result = resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS && id)
        *id = stream->id;
    return result == CUDA_SUCCESS && !id ? CUDA_ERROR_INVALID_VALUE : result;
})
