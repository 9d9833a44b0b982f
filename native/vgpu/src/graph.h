/* Executable graphs: each is a function of its own to the launch gate, its size is its number of nodes. */
#ifndef VGPU_GRAPH_H
#define VGPU_GRAPH_H

#include <stdint.h>

/* Nodes of the graph that the executable was made of; 1 where that is not known. Never 0. */
uint64_t vg_graph_nodes(const void *executable);

/* The same for a handle that may be no executable graph; 0: it is none that is known. */
uint64_t vg_graph_known_nodes(uintptr_t handle);

#endif
