/* Graphs: a bag of nodes with costs; edges are accepted and forgotten, since all work of a process runs in
 * one order. */
#ifndef FAKEGPU_GRAPH_H
#define FAKEGPU_GRAPH_H

#include "driver.h"

enum {
    FG_NODE_KERNEL = 0,
    FG_NODE_MEMCPY = 1,
    FG_NODE_MEMSET = 2,
    FG_NODE_HOST = 3,
    FG_NODE_EMPTY = 5,
    FG_NODE_EVENT_RECORD = 7,
    FG_NODE_MEM_ALLOC = 10
};

/* The card holds `bytes` for the memory nodes of one launch, and keeps them. */
CUresult fg_graph_memory(uint32_t card, uint64_t bytes);

int fg_graph_known(const struct fg_graph *graph);

#endif
