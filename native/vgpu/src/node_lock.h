/* One process of the node at a time: a lock that the containers of a node share, on the broker's read-only
 * directory. Only where that directory is provably the node's; there is none in the writable one above. */
#ifndef VGPU_NODE_LOCK_H
#define VGPU_NODE_LOCK_H

#include <stdint.h>

/* Waits until the deadline (CLOCK_MONOTONIC ns). A descriptor that holds the lock, or -1: not granted, or
 * there is no directory to trust. */
int vg_node_lock_take(uint64_t deadline);
void vg_node_lock_drop(int fd);

/* In a forked child: its copy of a lock that the parent holds. */
void vg_node_lock_after_fork_child(void);

#endif
