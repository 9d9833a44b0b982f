/* The token bucket of the core limit: one shared word per container and device, a monotonic time in ns. */
#ifndef VGPU_BUCKET_H
#define VGPU_BUCKET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Takes `cost` ns of the card at `limit` percent (1..99). Returns 0, or how long it is not due yet, in ns;
 * then nothing was taken. Test and charge are one compare-and-swap. */
uint64_t vg_bucket_take(_Atomic uint64_t *due, uint64_t now, uint64_t cost, unsigned limit,
                        uint64_t *forgiven);

/* Corrects an earlier charge by `difference` ns of the card; never waits. */
void vg_bucket_correct(_Atomic uint64_t *due, uint64_t now, int64_t difference, unsigned limit,
                       uint64_t *forgiven);

/* A new factor: debt that is left is repaid at the factor known last. */
void vg_bucket_rescale(_Atomic uint64_t *due, uint64_t now, uint64_t factor, uint64_t before);

#endif
