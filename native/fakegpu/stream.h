/* Streams and captures as the files of libcuda.so.1 see them. */
#ifndef FAKEGPU_STREAM_H
#define FAKEGPU_STREAM_H

#include "driver.h"

#include <sys/types.h>

struct fg_stream {
    uint32_t magic, flags;
    int priority, legacy, capture_status, capture_mode, capture_origin;
    pid_t capture_thread;
    struct fg_context *context;
    struct fg_graph *graph;
    uint64_t id, mark, capture_id;
    struct fg_stream *next;
};

/* Put another stream into the capture of `graph` (an event of it was waited for). */
void fg_capture_join(struct fg_stream *stream, struct fg_graph *graph);
void fg_capture_invalidate(struct fg_stream *stream);
/* Whether the graph still belongs to a running capture. */
int fg_capture_owns(const struct fg_graph *graph);
/* Bring the pools back to their thresholds and wait for the stream's work. */
CUresult fg_stream_wait(struct fg_stream *stream);

#endif
