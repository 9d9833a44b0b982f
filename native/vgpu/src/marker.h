/* Pairs of events around single launches: how long the card really took. At most eight are unfinished per
 * device. */
#ifndef VGPU_MARKER_H
#define VGPU_MARKER_H

#include "cost.h"

#include <stdbool.h>
#include <stdint.h>

struct vg_marker;

/* False while streams of the process are captured: events wait then. Not for ever: a capture that is left
 * open would end all measuring. */
bool vg_markers_allowed(void);

/* A free marker for a launch of this function, NULL: all are unfinished or may not be used now, or the time
 * for markers is used up.
 * `launches` is what it will stand for. */
struct vg_marker *vg_marker_take(struct vg_cost *cost, int device, uint64_t charged, uint32_t launches);

/* Before and after the launch, on its stream. False, or a failed launch: the marker is free again. */
bool vg_marker_start(struct vg_marker *marker, void *stream);
void vg_marker_stop(struct vg_marker *marker, void *stream, bool launched);

/* True if all markers of the device are unfinished. */
bool vg_markers_busy(int device);

/* Looks at the unfinished markers; for each that is done the function's cost is learned and `finished` gets
 * what the launch took and what it was charged, ns. Returns how many were done. */
unsigned vg_markers_poll(int device, void (*finished)(int device, uint64_t took, uint64_t charged));

void vg_markers_forget(void *context);

#endif
