#include "graph.h"

#include "launch.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>

enum { GRAPH_MAGIC = 0x47525031, EXEC_MAGIC = 0x47455831 };

struct fg_graph_node {
    int type;
    uint64_t cost_ns, bytes;
    struct fg_graph *graph;
    struct fg_graph_node *next;
};

struct fg_graph {
    uint32_t magic;
    size_t count;
    struct fg_graph_node *first, *last;
};

struct fg_graph_exec {
    uint32_t magic;
    size_t count;
    uint64_t cost_ns, flags, bytes;
    uint32_t card;
};

struct fg_graph *fg_graph_new(void) {
    struct fg_graph *graph = calloc(1, sizeof *graph);
    if (graph)
        graph->magic = GRAPH_MAGIC;
    return graph;
}

int fg_graph_known(const struct fg_graph *graph) {
    return graph && graph->magic == GRAPH_MAGIC;
}

void fg_graph_delete(struct fg_graph *graph) {
    graph->magic = 0;
    for (struct fg_graph_node *node = graph->first, *next; node; node = next) {
        next = node->next;
        free(node);
    }
    free(graph);
}

static struct fg_graph_node *append(struct fg_graph *graph, int type, uint64_t cost_ns) {
    struct fg_graph_node *node = calloc(1, sizeof *node);
    if (!node)
        return NULL;
    *node = (struct fg_graph_node){.type = type, .cost_ns = cost_ns, .graph = graph};
    if (graph->last)
        graph->last->next = node;
    else
        graph->first = node;
    graph->last = node;
    graph->count++;
    return node;
}

CUresult fg_graph_append(struct fg_graph *graph, int type, uint64_t cost_ns) {
    return append(graph, type, cost_ns) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

FG_FUNCTION(cuGraphCreate, (CUgraph * graph, unsigned flags), {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!graph || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = fg_graph_new();
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
})

FG_FUNCTION(cuGraphDestroy, (CUgraph graph), {
    if (!fg_graph_known(graph))
        return CUDA_ERROR_INVALID_VALUE;
    fg_graph_delete(graph);
    return CUDA_SUCCESS;
})

static CUresult add_kernel(CUgraphNode *node, CUgraph graph, const CUDA_KERNEL_NODE_PARAMS *parameters) {
    if (!node || !fg_graph_known(graph) || !parameters || !parameters->function)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fg_launch launch = {
        .function = parameters->function,
        .blocks = (uint64_t)parameters->grid_x * parameters->grid_y * parameters->grid_z,
        .threads = (uint64_t)parameters->block_x * parameters->block_y * parameters->block_z,
        .params = parameters->params,
    };
    *node = append(graph, FG_NODE_KERNEL, fg_launch_cost(&launch));
    return *node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

FG_FUNCTION(cuGraphAddKernelNode,
            (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t count,
             const CUDA_KERNEL_NODE_PARAMS *parameters),
            {
                (void)before, (void)count;
                return add_kernel(node, graph, parameters);
            })
FG_FUNCTION(cuGraphAddKernelNode_v2,
            (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t count,
             const CUDA_KERNEL_NODE_PARAMS *parameters),
            {
                (void)before, (void)count;
                return add_kernel(node, graph, parameters);
            })

FG_FUNCTION(cuGraphAddEmptyNode, (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t count),
            {
                (void)before, (void)count;
                if (!node || !fg_graph_known(graph))
                    return CUDA_ERROR_INVALID_VALUE;
                *node = append(graph, FG_NODE_EMPTY, 0);
                return *node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
            })

/* The address is where a launch would put the memory; nothing reads or writes it. */
FG_FUNCTION(cuGraphAddMemAllocNode,
            (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t count,
             CUDA_MEM_ALLOC_NODE_PARAMS *parameters),
            {
                (void)before, (void)count;
                if (!node || !fg_graph_known(graph) || !parameters || !parameters->bytes)
                    return CUDA_ERROR_INVALID_VALUE;
                *node = append(graph, FG_NODE_MEM_ALLOC, 0);
                if (!*node)
                    return CUDA_ERROR_OUT_OF_MEMORY;
                (*node)->bytes = parameters->bytes;
                parameters->pointer = (CUdeviceptr)(uintptr_t)*node;
                return CUDA_SUCCESS;
            })

FG_FUNCTION(cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count), {
    if (!fg_graph_known(graph) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    size_t n = 0;
    for (struct fg_graph_node *node = graph->first; node && nodes && n < *count; node = node->next)
        nodes[n++] = node;
    *count = nodes ? n : graph->count;
    return CUDA_SUCCESS;
})

FG_FUNCTION(cuGraphNodeGetType, (CUgraphNode node, int *type), {
    if (!node || !type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->type;
    return CUDA_SUCCESS;
})

static void fill(struct fg_graph_exec *exec, const struct fg_graph *graph) {
    exec->count = graph->count;
    exec->cost_ns = exec->bytes = 0;
    for (const struct fg_graph_node *node = graph->first; node; node = node->next) {
        exec->cost_ns += node->cost_ns;
        exec->bytes += node->bytes;
    }
}

static CUresult instantiate(CUgraphExec *exec, CUgraph graph, uint64_t flags) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!exec || !fg_graph_known(graph) || fg_capture_owns(graph))
        return CUDA_ERROR_INVALID_VALUE;
    *exec = calloc(1, sizeof **exec);
    if (!*exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*exec)->magic = EXEC_MAGIC;
    (*exec)->flags = flags;
    (*exec)->card = context->card;
    fill(*exec, graph);
    return CUDA_SUCCESS;
}

static CUresult instantiate_old(CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size) {
    if (bad)
        *bad = NULL;
    if (log && size)
        log[0] = 0;
    return instantiate(exec, graph, 0);
}

FG_FUNCTION(cuGraphInstantiate, (CUgraphExec * exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size),
            { return instantiate_old(exec, graph, bad, log, size); })
FG_FUNCTION(cuGraphInstantiate_v2,
            (CUgraphExec * exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size),
            { return instantiate_old(exec, graph, bad, log, size); })
FG_FUNCTION(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags),
            { return instantiate(exec, graph, flags); })
FG_TWIN(cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz,
        (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), {
            if (!parameters)
                return CUDA_ERROR_INVALID_VALUE;
            CUresult result = instantiate(exec, graph, parameters->flags);
            parameters->error_node = NULL;
            parameters->result = result == CUDA_SUCCESS ? 0 : 1;
            return result;
        })

FG_FUNCTION(cuGraphExecDestroy, (CUgraphExec exec), {
    if (!exec || exec->magic != EXEC_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    exec->magic = 0;
    free(exec);
    return CUDA_SUCCESS;
})

/* Version 1 reports (node, result), version 2 one structure {result, node, node}; both begin with what is
 * written here. */
FG_FUNCTION(cuGraphExecUpdate, (CUgraphExec exec, CUgraph graph, CUgraphNode *bad, int *update), {
    if (!exec || exec->magic != EXEC_MAGIC || !fg_graph_known(graph))
        return CUDA_ERROR_INVALID_VALUE;
    if (bad)
        *bad = NULL;
    if (update)
        *update = 0;
    fill(exec, graph);
    return CUDA_SUCCESS;
})
FG_FUNCTION(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, void *update), {
    if (!exec || exec->magic != EXEC_MAGIC || !fg_graph_known(graph))
        return CUDA_ERROR_INVALID_VALUE;
    if (update)
        memset(update, 0, 3 * sizeof(void *));
    fill(exec, graph);
    return CUDA_SUCCESS;
})

FG_TWIN(cuGraphUpload, cuGraphUpload_ptsz, (CUgraphExec exec, CUstream stream), {
    (void)stream;
    return exec && exec->magic == EXEC_MAGIC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
})

FG_TWIN(cuGraphLaunch, cuGraphLaunch_ptsz, (CUgraphExec exec, CUstream stream), {
    if (!exec || exec->magic != EXEC_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = fg_graph_memory(exec->card, exec->bytes);
    return result != CUDA_SUCCESS ? result : fg_launch_work(stream, per_thread, exec->cost_ns);
})
