/* Contexts: what green contexts and primary contexts need of each other. */
#ifndef VGPU_CTX_H
#define VGPU_CTX_H

#include "ctx_size.h"

#include <stdbool.h>

/* The activation of a context: what is looked at before the driver makes it and after. */
struct vg_activation {
    int device; /* region index; -1: nothing to do */
    int saved_errno;
    int cancel_state;
    bool searching; /* this thread has the list of processes for the host PID */
    struct vg_ctx_size size;
};

struct vg_activation vg_activation_begin(int cuda_device);
void vg_activation_end(const struct vg_activation *activation, int result);

/* In a forked child: it has no contexts, and no thread of it makes one. */
void vg_ctx_after_fork_child(void);

/* A primary context may be gone: of every device without one the records and the charge are given back. */
void vg_primary_look(void);

/* The device's primary context is gone: gives back what was allocated in its green contexts. */
void vg_green_drop_device(int device);

#endif
