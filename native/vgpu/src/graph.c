#include "graph.h"

#include "cost.h"
#include "guard.h"
#include "hooks.h"
#include "mem.h"
#include "process.h"

enum { ENTRIES = 1024, PROBES = 8 };

/* Written under the guard, read without: nobody launches a graph that is being destroyed. */
static struct {
    _Atomic uintptr_t executable; /* 0: never used */
    _Atomic uint64_t nodes;       /* 0: free */
} graphs[ENTRIES];
static _Atomic uint32_t guard;

static unsigned slot(uintptr_t executable, unsigned probe) {
    return (unsigned)(((uint64_t)executable * 0x9e3779b97f4a7c15u >> 54) + probe) % ENTRIES;
}

uint64_t vg_graph_known_nodes(uintptr_t handle) {
    for (unsigned i = 0; i < PROBES; i++) {
        unsigned at = slot(handle, i);
        if (atomic_load_explicit(&graphs[at].executable, memory_order_relaxed) == handle)
            return atomic_load_explicit(&graphs[at].nodes, memory_order_relaxed);
    }
    return 0;
}

uint64_t vg_graph_nodes(const void *executable) {
    uint64_t nodes = vg_graph_known_nodes((uintptr_t)executable);
    return nodes == 0 ? 1 : nodes;
}

/* 0 nodes: the executable is gone. Where all eight places are taken it counts as a graph of one node. */
static void remember(uintptr_t executable, uint64_t nodes) {
    vg_guard_take(&guard);
    int place = -1;
    for (unsigned i = 0; i < PROBES; i++) {
        unsigned at = slot(executable, i);
        if (atomic_load(&graphs[at].executable) == executable) {
            place = (int)at;
            break;
        }
        if (place < 0 && atomic_load(&graphs[at].nodes) == 0)
            place = (int)at;
    }
    if (place >= 0 && (nodes != 0 || atomic_load(&graphs[place].executable) == executable)) {
        atomic_store(&graphs[place].executable, executable);
        atomic_store(&graphs[place].nodes, nodes);
    }
    vg_guard_leave(&guard);
}

/* What was learned of the executable before is worth nothing now. */
static void observe(void *executable, void *graph) {
    size_t nodes = 0;
    if (vg_ready() != VG_MODE_COUNT)
        return;
    if (vg_call_cuGraphGetNodes(graph, NULL, &nodes) != VG_CUDA_SUCCESS || nodes == 0)
        nodes = 1;
    vg_cost_forget((uintptr_t)executable, vg_graph_nodes(executable));
    vg_cost_forget((uintptr_t)executable, nodes);
    remember((uintptr_t)executable, nodes);
}

int vg_graph_instantiate(vg_fn_graph_instantiate driver, void **executable, void *graph, uint64_t third,
                         uint64_t fourth, uint64_t fifth, uint64_t sixth) {
    int result = driver(executable, graph, third, fourth, fifth, sixth);
    if (result == VG_CUDA_SUCCESS) {
        observe(*executable, graph);
        vg_pools_of_graphs();
    }
    return result;
}

int vg_graph_update_v1(vg_fn_graph_update_v1 driver, void *executable, void *graph, void **node,
                       int *outcome) {
    int result = driver(executable, graph, node, outcome);
    if (result == VG_CUDA_SUCCESS)
        observe(executable, graph);
    return result;
}

int vg_graph_update(vg_fn_graph_update driver, void *executable, void *graph, void *outcome) {
    int result = driver(executable, graph, outcome);
    if (result == VG_CUDA_SUCCESS)
        observe(executable, graph);
    return result;
}

int vg_graph_destroy(vg_fn_graph_destroy driver, void *executable) {
    uint64_t nodes = vg_graph_nodes(executable);
    int result = driver(executable);
    if (result == VG_CUDA_SUCCESS && vg_ready() == VG_MODE_COUNT) {
        vg_cost_forget((uintptr_t)executable, nodes);
        remember((uintptr_t)executable, 0);
    }
    return result;
}
