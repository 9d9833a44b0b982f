#include "factor.h"

static const double smallest = 1.0 / 64, largest = 4.0, resumed_window = 4.0;

static double clamp(double x, double low, double high) {
    return x < low ? low : x > high ? high : x;
}

/* exp(-x) for small x >= 0, without libm; never negative. */
static double decay(double x) {
    return 1.0 / (1.0 + x + x * x / 2 + x * x * x / 6);
}

void vg_factor_resume(struct vg_factor *factor, double g, unsigned limit) {
    *factor = (struct vg_factor){0, 0, 0};
    if (g <= 0)
        return;
    factor->window = resumed_window;
    factor->used = resumed_window * limit / 100;
    factor->charged = factor->used / g;
}

double vg_factor_learn(struct vg_factor *factor, double seconds, double used, double charged, unsigned live) {
    double share = factor->window > 0 ? factor->used / factor->window : 0;
    double memory = share > 0 ? clamp(1.0 / share, 1.0, 8.0) : 8.0;
    double keep = decay(seconds / memory);
    factor->used = factor->used * keep + used;
    factor->charged = factor->charged * keep + charged;
    factor->window = factor->window * keep + seconds;
    if (factor->charged <= 0)
        return 1.0;
    double resolution = clamp(0.005 * live, 0, 0.01) * factor->window;
    double low = (factor->used - resolution) / factor->charged;
    double high = (factor->used + resolution) / factor->charged;
    return clamp(clamp(1.0, low, high), smallest, largest);
}
