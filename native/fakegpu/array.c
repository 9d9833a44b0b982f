/* Arrays and mipmapped arrays: their memory is counted, their texels are not modelled. */
#include "driver.h"

#include <stdlib.h>

enum { ARRAY_MAGIC = 0x41525231, LAYERED = 1, SPARSE = 0x40, DEFERRED = 0x80 };
#define ARRAY_STEP ((uint64_t)64 << 10)

struct fg_array {
    uint32_t magic, card, levels;
    uint64_t bytes;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    struct fg_context *context;
    struct fg_array *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fg_array *all;

/* Bits of a texel whatever the channels: video, compressed blocks of 4 x 4, normalised integers; 0: none. */
static uint64_t packed_bits(int format) {
    static const uint8_t video[] = {32, 32, 32, 12, 24, 16, 32, 24, 48, 12, 24, 16, 32, 24, 48}; /* 0x50 */
    static const uint8_t blocks[] = {4,  4, 8,  8,  8,  8,  4,  4,  8,  8,  8, 8, 8, 8, /* 0x91: BC1 to BC7 */
                                     24, 0, 24, 16, 32, 32, 16, 32, 32, 32, 32}; /* P010, P016 to Y410 */
    static const uint8_t later[] = {12, 64, 24, 48, 24, 48};                     /* 0xb0: NV12, Y416, ... */
    static const uint8_t normalised[] = {8, 16, 32, 16, 32, 64, 8, 16, 32, 16, 32, 64}; /* 0xc0 */
    static const struct {
        int first, count;
        const uint8_t *bits;
    } ranges[] = {{0x50, sizeof video, video},
                  {0x91, sizeof blocks, blocks},
                  {0xb0, sizeof later, later},
                  {0xc0, sizeof normalised, normalised}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (format >= ranges[i].first && format - ranges[i].first < ranges[i].count)
            return ranges[i].bits[format - ranges[i].first];
    return 0;
}

static uint64_t texel_bytes(int format) {
    switch (format) {
    case 0x01:
    case 0x08:
        return 1;
    case 0x02:
    case 0x09:
    case 0x10:
        return 2;
    case 0x03:
    case 0x0a:
    case 0x20:
        return 4;
    default:
        return 0;
    }
}

static uint64_t halved(uint64_t size, unsigned level) {
    return size >> level ? size >> level : 1;
}

static uint64_t up_to(uint64_t size, uint64_t step) {
    return (size + step - 1) / step * step;
}

static uint64_t slice_bytes(int format, unsigned channels, uint64_t width, uint64_t height) {
    uint64_t bits = packed_bits(format);
    uint64_t step = format >= 0x91 && format <= 0x9e ? 4 : 1;
    return bits ? up_to(width, step) * up_to(height, step) * bits / 8
                : width * height * channels * texel_bytes(format);
}

static int good_format(int format, unsigned channels) {
    return packed_bits(format) ? channels <= 4
                               : texel_bytes(format) && (channels == 1 || channels == 2 || channels == 4);
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !shape || shape->width == 0 || levels == 0 || levels > 32 ||
        !good_format(shape->format, shape->num_channels) ||
        (shape->width | shape->height | shape->depth) > 1u << 20)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = 0;
    for (unsigned level = 0; level < levels; level++) {
        uint64_t depth =
            shape->flags & LAYERED ? (shape->depth ? shape->depth : 1) : halved(shape->depth, level);
        bytes += depth * slice_bytes(shape->format, shape->num_channels, halved(shape->width, level),
                                     halved(shape->height, level));
    }
    bytes = shape->flags & (SPARSE | DEFERRED) ? 0 : fg_round(bytes, ARRAY_STEP);
    struct fg_array *array = calloc(1, sizeof *array);
    if (!array || bytes > INT64_MAX / 2 ||
        fg_account(context->card, FG_DATA, (int64_t)bytes, (int64_t)bytes) != 0) {
        free(array);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *array = (struct fg_array){
        .magic = ARRAY_MAGIC, .card = context->card, .levels = levels, .bytes = bytes, .shape = *shape};
    array->context = context;
    pthread_mutex_lock(&lock);
    array->next = all;
    all = array;
    pthread_mutex_unlock(&lock);
    *out = array;
    return CUDA_SUCCESS;
}

/* Under the lock. */
static void discard(struct fg_array *array) {
    for (struct fg_array **link = &all; *link; link = &(*link)->next)
        if (*link == array) {
            *link = array->next;
            break;
        }
    array->magic = 0;
    fg_account(array->card, FG_DATA, -(int64_t)array->bytes, -(int64_t)array->bytes);
    free(array);
}

void fg_arrays_drop_context(struct fg_context *context) {
    pthread_mutex_lock(&lock);
    for (struct fg_array *array = all, *next; array; array = next) {
        next = array->next;
        if (array->context == context)
            discard(array);
    }
    pthread_mutex_unlock(&lock);
}

void fg_arrays_forget(void) {
    pthread_mutex_init(&lock, NULL);
    all = NULL;
}

static CUresult destroy(CUarray array) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!array || array->magic != ARRAY_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    discard(array);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult create_flat(CUarray *array, size_t width, size_t height, int format, unsigned channels) {
    const CUDA_ARRAY3D_DESCRIPTOR full = {
        .width = width, .height = height, .format = format, .num_channels = channels};
    return create(array, &full, 1);
}

FG_FUNCTION(cuArrayCreate_v2, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR *shape), {
    return shape ? create_flat(array, shape->width, shape->height, shape->format, shape->num_channels)
                 : CUDA_ERROR_INVALID_VALUE;
})
FG_FUNCTION(cuArrayCreate, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR_v1 *shape), {
    return shape ? create_flat(array, shape->width, shape->height, shape->format, shape->num_channels)
                 : CUDA_ERROR_INVALID_VALUE;
})
FG_FUNCTION(cuArray3DCreate, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *shape), {
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    const CUDA_ARRAY3D_DESCRIPTOR full = {.width = shape->width,
                                          .height = shape->height,
                                          .depth = shape->depth,
                                          .format = shape->format,
                                          .num_channels = shape->num_channels,
                                          .flags = shape->flags};
    return create(array, &full, 1);
})
FG_FUNCTION(cuArray3DCreate_v2, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR *shape),
            { return create(array, shape, 1); })
FG_FUNCTION(cuMipmappedArrayCreate,
            (CUmipmappedArray * array, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels),
            { return create(array, shape, levels); })
FG_FUNCTION(cuArrayDestroy, (CUarray array), { return destroy(array); })
FG_FUNCTION(cuMipmappedArrayDestroy, (CUmipmappedArray array), { return destroy(array); })

FG_FUNCTION(cuArray3DGetDescriptor_v2, (CUDA_ARRAY3D_DESCRIPTOR * shape, CUarray array), {
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    if (!array || array->magic != ARRAY_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    *shape = array->shape;
    return CUDA_SUCCESS;
})
