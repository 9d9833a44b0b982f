/* Kernel launches of every generation. */
#include "launch.h"

#include "graph.h"
#include "module.h"

#include <string.h>

uint64_t fg_launch_cost(const struct fg_launch *launch) {
    const struct fg_function *function = launch->function;
    uint64_t cost = function->cost_ns;
    if (function->rule == FG_COST_PER_BLOCK)
        cost *= launch->blocks;
    else if (function->rule == FG_COST_ARGUMENT)
        cost =
            launch->params && launch->params[0] ? *(const uint64_t *)launch->params[0] : fg.shared->kernel_ns;
    return fg.shared->time_scale_milli == 1000 || cost == FG_UNTIL_NEXT
               ? cost
               : (uint64_t)((__uint128_t)cost * 1000 / fg.shared->time_scale_milli);
}

CUresult fg_launch_work(CUstream handle, int per_thread, uint64_t cost_ns) {
    struct fg_context *context;
    struct fg_stream *stream;
    struct fg_graph *graph;
    CUresult result = fg_stream_enter(handle, per_thread, &context, &stream, &graph);
    if (result != CUDA_SUCCESS)
        return result;
    if (graph)
        return fg_graph_append(graph, FG_NODE_KERNEL, cost_ns);
    if (!fg_driver.zero_cost)
        fg_stream_submitted(stream, fg_engine_submit(context->card, cost_ns));
    return CUDA_SUCCESS;
}

static CUresult launch(const struct fg_launch *work, unsigned shared_bytes, CUstream stream, int per_thread) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!work->function || work->function->magic != FG_FUNCTION_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    if (work->blocks == 0 || work->threads == 0 || work->threads > 1024 || shared_bytes > 256 * 1024)
        return CUDA_ERROR_INVALID_VALUE;
    return fg_launch_work(stream, per_thread, fg_driver.zero_cost ? 0 : fg_launch_cost(work));
}

static uint64_t volume(unsigned x, unsigned y, unsigned z) {
    return (uint64_t)x * y * z;
}

FG_TWIN(cuLaunchKernel, cuLaunchKernel_ptsz,
        (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
         unsigned shared_bytes, CUstream stream, void **params, void **extra),
        {
            (void)extra;
            const struct fg_launch work = {.function = function,
                                           .blocks = volume(gx, gy, gz),
                                           .threads = volume(bx, by, bz),
                                           .params = params};
            return launch(&work, shared_bytes, stream, per_thread);
        })

FG_TWIN(cuLaunchKernelEx, cuLaunchKernelEx_ptsz,
        (const CUlaunchConfig *c, CUfunction function, void **params, void **extra), {
            (void)extra;
            if (!c)
                return CUDA_ERROR_INVALID_VALUE;
            const struct fg_launch work = {.function = function,
                                           .blocks = volume(c->grid_x, c->grid_y, c->grid_z),
                                           .threads = volume(c->block_x, c->block_y, c->block_z),
                                           .params = params};
            return launch(&work, c->shared_bytes, c->stream, per_thread);
        })

FG_TWIN(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz,
        (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
         unsigned shared_bytes, CUstream stream, void **params),
        {
            const struct fg_launch work = {.function = function,
                                           .blocks = volume(gx, gy, gz),
                                           .threads = volume(bx, by, bz),
                                           .params = params};
            return launch(&work, shared_bytes, stream, per_thread);
        })

FG_FUNCTION(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS * list, unsigned count, unsigned flags),
            {
                if (!list || count == 0 || flags > 3)
                    return CUDA_ERROR_INVALID_VALUE;
                CUresult result = CUDA_SUCCESS;
                for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
                    const struct fg_launch work = {
                        .function = list[i].function,
                        .blocks = volume(list[i].grid_x, list[i].grid_y, list[i].grid_z),
                        .threads = volume(list[i].block_x, list[i].block_y, list[i].block_z),
                        .params = list[i].params};
                    result = launch(&work, list[i].shared_bytes, list[i].stream, 0);
                }
                return result;
            })

static CUresult launch_grid(CUfunction function, int width, int height, CUstream stream) {
    if (!function || function->magic != FG_FUNCTION_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    if (width <= 0 || height <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fg_launch work = {.function = function,
                                   .blocks = (uint64_t)width * (uint64_t)height,
                                   .threads = function->block_threads};
    return launch(&work, 0, stream, 0);
}

FG_FUNCTION(cuLaunch, (CUfunction function), { return launch_grid(function, 1, 1, NULL); })
FG_FUNCTION(cuLaunchGrid, (CUfunction function, int width, int height),
            { return launch_grid(function, width, height, NULL); })
FG_FUNCTION(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream),
            { return launch_grid(function, width, height, stream); })
FG_FUNCTION(cuFuncSetBlockShape, (CUfunction function, int x, int y, int z), {
    if (!function || function->magic != FG_FUNCTION_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    if (x <= 0 || y <= 0 || z <= 0 || (int64_t)x * y * z > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    function->block_threads = (uint64_t)x * (uint64_t)y * (uint64_t)z;
    return CUDA_SUCCESS;
})

/* The engine runs in order, so waiting for the stream and calling here is what a host function node does. */
FG_TWIN(cuLaunchHostFunc, cuLaunchHostFunc_ptsz, (CUstream handle, CUhostFn function, void *user_data), {
    struct fg_context *context;
    struct fg_stream *stream;
    struct fg_graph *graph;
    CUresult result = fg_need_context(&context);
    if (result == CUDA_SUCCESS && !function)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = fg_stream_resolve(context, handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = fg_stream_capture(stream, &graph);
    if (result != CUDA_SUCCESS)
        return result;
    if (graph)
        return fg_graph_append(graph, FG_NODE_HOST, 0);
    fg_engine_wait(context->card, fg_engine_mark(context->card));
    function(user_data);
    return CUDA_SUCCESS;
})
