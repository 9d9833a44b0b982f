/* How much memory contexts take: measured at the program's own contexts, none is made for it. */
#ifndef VGPU_CTX_SIZE_H
#define VGPU_CTX_SIZE_H

#include <stdbool.h>
#include <stdint.h>

/* What the whole card had in use before a context was made. */
struct vg_ctx_size {
    bool known;
    uint64_t used; /* bytes */
};

void vg_ctx_size_before(struct vg_ctx_size *before, int device);

/* A context has appeared on the device, or is gone: charges, or gives back, the difference to what is
 * charged. `search`: this thread's look for the host PID, NULL: another thread has it. `others`: contexts of
 * this process that are still there, as large as this one was where nobody can tell. */
struct vg_search;
void vg_ctx_size_after(const struct vg_ctx_size *before, int device, const struct vg_search *search);
void vg_ctx_size_gone(int device, unsigned others);

/* In a forked child: nothing is held. */
void vg_ctx_size_after_fork_child(void);

#endif
