/* Arrays and mipmapped arrays: charged by their texels, rounded up to 64 KiB. */
#include "charge.h"
#include "hooks.h"
#include "process.h"

static const uint64_t array_granule = 65536;

/* What texels are kept in: so many by so many of them take so many bytes. */
struct block {
    uint64_t width, height, bytes;
};

/* Of the formats that include their channels; the last ones are the normalised integers. */
static const struct packed {
    uint8_t first, last, width, height, bytes;
} packed[] = {
    {0x50, 0x50, 1, 1, 4},                          /* 10, 10, 10 and 2 bit */
    {0x51, 0x52, 1, 1, 4},                          /* video with 8 bit, packed */
    {0x53, 0x53, 2, 2, 6},  {0x54, 0x54, 2, 2, 12}, /* 4:2:0, 8 and 16 bit */
    {0x55, 0x55, 2, 1, 4},  {0x56, 0x56, 2, 1, 8},  /* 4:2:2 */
    {0x57, 0x57, 1, 1, 3},  {0x58, 0x58, 1, 1, 6},  /* 4:4:4 */
    {0x59, 0x59, 2, 2, 6},  {0x5a, 0x5a, 2, 2, 12}, /* the same, each plane by itself */
    {0x5b, 0x5b, 2, 1, 4},  {0x5c, 0x5c, 2, 1, 8},  {0x5d, 0x5d, 1, 1, 3}, {0x5e, 0x5e, 1, 1, 6},
    {0x91, 0x92, 4, 4, 8},  {0x93, 0x96, 4, 4, 16}, /* BC1; BC2, BC3 */
    {0x97, 0x98, 4, 4, 8},  {0x99, 0x9e, 4, 4, 16}, /* BC4; BC5, BC6H, BC7 */
    {0x9f, 0x9f, 2, 2, 12}, {0xa1, 0xa1, 2, 2, 12}, /* P010, P016 */
    {0xa2, 0xa2, 2, 1, 4},  {0xa3, 0xa4, 2, 1, 8},  /* NV16; P210, P216 */
    {0xa5, 0xa5, 2, 1, 4},  {0xa6, 0xa7, 2, 1, 8},  /* YUY2; Y210, Y216 */
    {0xa8, 0xa9, 1, 1, 4},                          /* AYUV, Y410 */
    {0xb0, 0xb0, 2, 2, 6},  {0xb1, 0xb1, 1, 1, 8},  /* NV12; Y416 */
    {0xb2, 0xb2, 1, 1, 3},  {0xb3, 0xb3, 1, 1, 6},  /* Y444 with 8 and 10 bit, planar */
    {0xb4, 0xb4, 1, 1, 3},  {0xb5, 0xb5, 1, 1, 6},  /* with 8 and 16 bit, semi-planar */
    {0xc0, 0xc0, 1, 1, 1},  {0xc1, 0xc1, 1, 1, 2},  {0xc2, 0xc2, 1, 1, 4}, {0xc3, 0xc3, 1, 1, 2},
    {0xc4, 0xc4, 1, 1, 4},  {0xc5, 0xc5, 1, 1, 8},  {0xc6, 0xc6, 1, 1, 1}, {0xc7, 0xc7, 1, 1, 2},
    {0xc8, 0xc8, 1, 1, 4},  {0xc9, 0xc9, 1, 1, 2},  {0xca, 0xca, 1, 1, 4}, {0xcb, 0xcb, 1, 1, 8},
};

/* Bytes of one texel of the other formats. Unknown ones count as 32 bit. */
static uint64_t texel_bytes(unsigned format, unsigned channels) {
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

static struct block block_of(unsigned format, unsigned channels) {
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        if (format >= packed[i].first && format <= packed[i].last)
            return (struct block){packed[i].width, packed[i].height, packed[i].bytes};
    return (struct block){1, 1, texel_bytes(format, channels)};
}

static uint64_t at_least_one(uint64_t n) {
    return n != 0 ? n : 1;
}

/* a * b, UINT64_MAX where it overflows. */
static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* How many of `size` cover a length, which is not 0. */
static uint64_t blocks(uint64_t length, uint64_t size) {
    return (length - 1) / size + 1;
}

static uint64_t rounded(uint64_t bytes) {
    return bytes > UINT64_MAX - array_granule ? bytes : (bytes + array_granule - 1) & ~(array_granule - 1);
}

static uint64_t level_bytes(const struct vg_array3d_desc *desc, unsigned level) {
    uint64_t depth = at_least_one(desc->depth);
    if ((desc->flags & VG_ARRAY_LAYERED) == 0)
        depth = at_least_one(depth >> level);
    struct block block = block_of(desc->format, desc->channels);
    uint64_t across = blocks(at_least_one(desc->width >> level), block.width);
    uint64_t down = blocks(at_least_one(desc->height >> level), block.height);
    return times(times(times(across, down), depth), block.bytes);
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
