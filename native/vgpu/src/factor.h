/* The factor g of one device: what the card really spent on the container over what it was charged. Markers
 * measure wall time, which neighbours stretch; NVML's sums correct that, single samples never do. Pure. */
#ifndef VGPU_FACTOR_H
#define VGPU_FACTOR_H

/* Sums with forgetting, in seconds. */
struct vg_factor {
    double used;    /* of the card, by NVML */
    double charged; /* to the container, without g */
    double window;  /* wall time */
};

/* What a new leader starts from: `limit` percent were used; g 0 = never learned. */
void vg_factor_resume(struct vg_factor *factor, double g, unsigned limit);

/* A window of `seconds` in which the card spent `used` and the container was charged `charged` seconds;
 * `live` processes, each known to a percent or so. Returns the new g, 1/64..4. */
double vg_factor_learn(struct vg_factor *factor, double seconds, double used, double charged, unsigned live);

#endif
