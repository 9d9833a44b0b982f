/* Arrays and mipmapped arrays: charged by their texels, rounded up to 64 KiB. */
#include "charge.h"
#include "hooks.h"
#include "process.h"

static const uint64_t array_granule = 65536;

/* Bytes of one texel; the normalised formats include their channels. Unknown formats count as 32 bit. */
static uint64_t texel_bytes(unsigned format, unsigned channels) {
    static const uint8_t normalised[] = {1, 2, 4, 2, 4, 8, 1, 2, 4, 2, 4, 8};
    if (format >= 0xc0 && format <= 0xcb)
        return normalised[format - 0xc0];
    switch (format) {
    case 0x01: /* unsigned and signed 8 bit */
    case 0x08:
        return channels;
    case 0x02: /* unsigned, signed 16 bit, half */
    case 0x09:
    case 0x10:
        return (uint64_t)2 * channels;
    default:
        return (uint64_t)4 * (channels != 0 ? channels : 1);
    }
}

static uint64_t at_least_one(uint64_t n) {
    return n != 0 ? n : 1;
}

/* a * b, UINT64_MAX where it overflows. */
static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t rounded(uint64_t bytes) {
    return bytes > UINT64_MAX - array_granule ? bytes : (bytes + array_granule - 1) & ~(array_granule - 1);
}

static uint64_t level_bytes(const struct vg_array3d_desc *desc, unsigned level) {
    uint64_t depth = at_least_one(desc->depth);
    if ((desc->flags & VG_ARRAY_LAYERED) == 0)
        depth = at_least_one(depth >> level);
    uint64_t area = times(at_least_one(desc->width >> level), at_least_one(desc->height >> level));
    return times(times(area, depth), texel_bytes(desc->format, desc->channels));
}

static uint64_t mipmap_bytes(const struct vg_array3d_desc *desc, unsigned levels) {
    uint64_t sum = 0;
    if (desc == NULL || (desc->flags & (VG_ARRAY_SPARSE | VG_ARRAY_DEFERRED)) != 0)
        return 0;
    for (unsigned level = 0; level < levels && level < 64; level++)
        if (__builtin_add_overflow(sum, level_bytes(desc, level), &sum))
            return UINT64_MAX;
    return rounded(sum);
}

static int keep(struct vg_charge *charge, int result, void *const *array) {
    uint64_t key = result == VG_CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0;
    return vg_charge_end(charge, VG_RECORD_ARRAY, result, key);
}

static uint64_t flat_bytes(uint64_t width, uint64_t height, unsigned format, unsigned channels) {
    return mipmap_bytes(&(struct vg_array3d_desc){width, height, 1, format, channels, 0}, 1);
}

int vg_array_create(vg_fn_array_create driver, void **array, const struct vg_array_desc *desc) {
    struct vg_charge charge;
    uint64_t bytes = desc != NULL ? flat_bytes(desc->width, desc->height, desc->format, desc->channels) : 0;
    int result = vg_charge_current(&charge, bytes);
    return result != VG_CUDA_SUCCESS ? result : keep(&charge, driver(array, desc), array);
}

int vg_array_create_v1(vg_fn_array_create_v1 driver, void **array, const struct vg_array_desc_v1 *desc) {
    struct vg_charge charge;
    uint64_t bytes = desc != NULL ? flat_bytes(desc->width, desc->height, desc->format, desc->channels) : 0;
    int result = vg_charge_current(&charge, bytes);
    return result != VG_CUDA_SUCCESS ? result : keep(&charge, driver(array, desc), array);
}

int vg_array3d_create(vg_fn_array3d_create driver, void **array, const struct vg_array3d_desc *desc) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, mipmap_bytes(desc, 1));
    return result != VG_CUDA_SUCCESS ? result : keep(&charge, driver(array, desc), array);
}

int vg_array3d_create_v1(vg_fn_array3d_create_v1 driver, void **array,
                         const struct vg_array3d_desc_v1 *desc) {
    struct vg_charge charge;
    struct vg_array3d_desc wide = {0};
    if (desc != NULL)
        wide = (struct vg_array3d_desc){desc->width,  desc->height,   desc->depth,
                                        desc->format, desc->channels, desc->flags};
    int result = vg_charge_current(&charge, desc != NULL ? mipmap_bytes(&wide, 1) : 0);
    return result != VG_CUDA_SUCCESS ? result : keep(&charge, driver(array, desc), array);
}

int vg_mipmap_create(vg_fn_mipmap_create driver, void **array, const struct vg_array3d_desc *desc,
                     unsigned levels) {
    struct vg_charge charge;
    int result = vg_charge_current(&charge, mipmap_bytes(desc, levels));
    return result != VG_CUDA_SUCCESS ? result : keep(&charge, driver(array, desc, levels), array);
}

int vg_array_destroy(vg_fn_array_destroy driver, void *array) {
    struct vg_record record;
    uint64_t key = (uint64_t)(uintptr_t)array;
    bool tracked = vg_charge_freeing(VG_RECORD_ARRAY, key, &record);
    int result = driver(array);
    if (tracked)
        vg_charge_freed(VG_RECORD_ARRAY, key, &record, result);
    return result;
}
