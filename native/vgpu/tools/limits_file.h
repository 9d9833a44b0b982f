/* The limits file of a region's container, for a tool that runs on the node. */
#ifndef VGPU_LIMITS_FILE_H
#define VGPU_LIMITS_FILE_H

#include "config.h"

/* Reads the limits file beside the folder of the region's cache directory (X/limits/NAME for
 * X/containers/NAME/file) into `config`; without one `config` stays. False, with a complaint: something else
 * lies there. */
bool tool_limits_on_node(struct vg_config *config, const char *region);

#endif
