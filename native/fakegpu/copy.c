/* Copies and fills. Device memory is host memory here; work of one process runs in order and kernels touch no
 * data, so a copy may happen at the call. Synchronous ones wait for the stream as a driver does. */
#include "stream.h"

#include "graph.h"

#include <string.h>

static CUresult start_copy(CUstream handle, int per_thread, int wait, int node, int *captured) {
    struct fg_context *context;
    struct fg_stream *stream;
    struct fg_graph *graph;
    CUresult result = fg_stream_enter(handle, per_thread, &context, &stream, &graph);
    *captured = 0;
    if (result != CUDA_SUCCESS)
        return result;
    if (graph) {
        *captured = 1;
        return wait ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : fg_graph_append(graph, node, 0);
    }
    return wait ? fg_stream_wait(stream) : CUDA_SUCCESS;
}

/* Device addresses must lie in known memory; host addresses are the caller's. */
enum side { HOST = 0, DEVICE = 1, EITHER = 2 };

static CUresult copy(uintptr_t to, enum side to_side, uintptr_t from, enum side from_side, size_t size,
                     CUstream stream, int per_thread, int wait) {
    int captured;
    CUresult result = start_copy(stream, per_thread, wait, FG_NODE_MEMCPY, &captured);
    if (result != CUDA_SUCCESS || captured || size == 0)
        return result;
    if ((to_side == DEVICE && !fg_heap_covers(to, size)) ||
        (from_side == DEVICE && !fg_heap_covers(from, size)) || !to || !from)
        return CUDA_ERROR_INVALID_VALUE;
    memmove((void *)to, (const void *)from, size);
    return CUDA_SUCCESS;
}

FG_TWIN(cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, (CUdeviceptr to, const void *from, size_t size),
        { return copy(to, DEVICE, (uintptr_t)from, HOST, size, NULL, per_thread, 1); })
FG_TWIN(cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t size),
        { return copy((uintptr_t)to, HOST, from, DEVICE, size, NULL, per_thread, 1); })
FG_TWIN(cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds, (CUdeviceptr to, CUdeviceptr from, size_t size),
        { return copy(to, DEVICE, from, DEVICE, size, NULL, per_thread, 1); })
FG_TWIN(cuMemcpy, cuMemcpy_ptds, (CUdeviceptr to, CUdeviceptr from, size_t size),
        { return copy(to, EITHER, from, EITHER, size, NULL, per_thread, 1); })
FG_TWIN(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz,
        (CUdeviceptr to, const void *from, size_t size, CUstream stream),
        { return copy(to, DEVICE, (uintptr_t)from, HOST, size, stream, per_thread, 0); })
FG_TWIN(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz,
        (void *to, CUdeviceptr from, size_t size, CUstream stream),
        { return copy((uintptr_t)to, HOST, from, DEVICE, size, stream, per_thread, 0); })
FG_TWIN(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz,
        (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
        { return copy(to, DEVICE, from, DEVICE, size, stream, per_thread, 0); })
FG_TWIN(cuMemcpyAsync, cuMemcpyAsync_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
        { return copy(to, EITHER, from, EITHER, size, stream, per_thread, 0); })
FG_TWIN(cuMemcpyPeer, cuMemcpyPeer_ptds,
        (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size), {
            return fg_context_known(to_context) && fg_context_known(from_context)
                       ? copy(to, DEVICE, from, DEVICE, size, NULL, per_thread, 1)
                       : CUDA_ERROR_INVALID_CONTEXT;
        })
FG_TWIN(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz,
        (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size,
         CUstream stream),
        {
            return fg_context_known(to_context) && fg_context_known(from_context)
                       ? copy(to, DEVICE, from, DEVICE, size, stream, per_thread, 0)
                       : CUDA_ERROR_INVALID_CONTEXT;
        })

/* Memory types: 1 host, 2 device, 4 unified. Arrays (3) have no layout here. */
static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, int per_thread, int wait) {
    int captured;
    CUresult result = start_copy(stream, per_thread, wait, FG_NODE_MEMCPY, &captured);
    if (result != CUDA_SUCCESS || captured)
        return result;
    if (!c || c->src_type == 3 || c->dst_type == 3 || c->src_type < 1 || c->src_type > 4 || c->dst_type < 1 ||
        c->dst_type > 4)
        return c && (c->src_type == 3 || c->dst_type == 3) ? CUDA_ERROR_NOT_SUPPORTED
                                                           : CUDA_ERROR_INVALID_VALUE;
    uintptr_t from = c->src_type == 1 ? (uintptr_t)c->src_host : (uintptr_t)c->src_device;
    uintptr_t to = c->dst_type == 1 ? (uintptr_t)c->dst_host : (uintptr_t)c->dst_device;
    size_t from_pitch = c->src_pitch ? c->src_pitch : c->width,
           to_pitch = c->dst_pitch ? c->dst_pitch : c->width;
    if (c->width > from_pitch || c->width > to_pitch)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < c->height; row++) {
        uintptr_t source = from + (c->src_y + row) * from_pitch + c->src_x,
                  target = to + (c->dst_y + row) * to_pitch + c->dst_x;
        if ((c->src_type == 2 && !fg_heap_covers(source, c->width)) ||
            (c->dst_type == 2 && !fg_heap_covers(target, c->width)))
            return CUDA_ERROR_INVALID_VALUE;
        memmove((void *)target, (const void *)source, c->width);
    }
    return CUDA_SUCCESS;
}

FG_TWIN(cuMemcpy2D_v2, cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *c),
        { return copy_2d(c, NULL, per_thread, 1); })
FG_TWIN(cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *c),
        { return copy_2d(c, NULL, per_thread, 1); })
FG_TWIN(cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *c, CUstream stream),
        { return copy_2d(c, stream, per_thread, 0); })

/* Fill `height` rows of `width` elements of 1, 2 or 4 bytes. */
static CUresult fill(CUdeviceptr to, size_t pitch, uint32_t value, size_t element, size_t width,
                     size_t height, CUstream stream, int per_thread) {
    int captured;
    CUresult result = start_copy(stream, per_thread, 0, FG_NODE_MEMSET, &captured);
    if (result != CUDA_SUCCESS || captured || width == 0 || height == 0)
        return result;
    if (to % element || width > SIZE_MAX / element ||
        (height > 1 && (pitch < width * element || pitch % element)))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < height; row++) {
        uintptr_t start = (uintptr_t)to + row * pitch;
        if (!fg_heap_covers(start, width * element))
            return CUDA_ERROR_INVALID_VALUE;
        if (element == 1)
            memset((void *)start, (int)value, width);
        for (size_t i = 0; element > 1 && i < width; i++)
            memcpy((void *)(start + i * element), &value, element); /* little endian: the low bytes */
    }
    return CUDA_SUCCESS;
}

#define FG_FILL(bits, type, bytes)                                                                           \
    FG_TWIN(cuMemsetD##bits##_v2, cuMemsetD##bits##_v2_ptds, (CUdeviceptr to, type value, size_t count),     \
            { return fill(to, 0, value, bytes, count, 1, NULL, per_thread); })                               \
    FG_TWIN(cuMemsetD##bits##Async, cuMemsetD##bits##Async_ptsz,                                             \
            (CUdeviceptr to, type value, size_t count, CUstream stream),                                     \
            { return fill(to, 0, value, bytes, count, 1, stream, per_thread); })                             \
    FG_TWIN(cuMemsetD2D##bits##_v2, cuMemsetD2D##bits##_v2_ptds,                                             \
            (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height),                         \
            { return fill(to, pitch, value, bytes, width, height, NULL, per_thread); })                      \
    FG_TWIN(cuMemsetD2D##bits##Async, cuMemsetD2D##bits##Async_ptsz,                                         \
            (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream),        \
            { return fill(to, pitch, value, bytes, width, height, stream, per_thread); })
FG_FILL(8, unsigned char, 1)
FG_FILL(16, unsigned short, 2)
FG_FILL(32, unsigned, 4)

/* Hints. Version 1 names the device by number, version 2 by location; both
 * are accepted and have no effect. */
FG_FUNCTION(cuMemAdvise, (CUdeviceptr pointer, size_t size, int advice, CUdevice device), {
    (void)device;
    return advice >= 1 && advice <= 6 && fg_heap_covers((uintptr_t)pointer, size) ? CUDA_SUCCESS
                                                                                  : CUDA_ERROR_INVALID_VALUE;
})
FG_FUNCTION(cuMemAdvise_v2, (CUdeviceptr pointer, size_t size, int advice, CUmemLocation location), {
    (void)location;
    return advice >= 1 && advice <= 6 && fg_heap_covers((uintptr_t)pointer, size) ? CUDA_SUCCESS
                                                                                  : CUDA_ERROR_INVALID_VALUE;
})
FG_TWIN(cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz,
        (CUdeviceptr pointer, size_t size, CUdevice device, CUstream stream), {
            (void)device, (void)stream;
            return fg_heap_covers((uintptr_t)pointer, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        })
FG_TWIN(cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz,
        (CUdeviceptr pointer, size_t size, CUmemLocation location, unsigned flags, CUstream stream), {
            (void)location, (void)flags, (void)stream;
            return fg_heap_covers((uintptr_t)pointer, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        })
