/* Runs a fuzz target without libFuzzer, the same way every time:
 *   NAME runs COUNT SEED   the seeds, then COUNT inputs made from them by random changes
 *   NAME corpus DIRECTORY  writes the seeds as files, for libFuzzer
 *   NAME replay FILE...    single inputs, such as a crash that libFuzzer has found */
#include "fuzz.h"

#include <limits.h>
#include <string.h>

enum { LONGEST = 4096 };

static uint64_t state;

static uint64_t next(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

/* An exact copy on the heap, so that AddressSanitizer sees a read beyond it. */
static void try_input(const void *data, size_t size) {
    uint8_t *copy = malloc(size > 0 ? size : 1);
    FUZZ_CHECK(copy != NULL);
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static size_t insert(uint8_t *data, size_t size, const uint8_t *piece, size_t length) {
    if (size + length > LONGEST)
        return size;
    size_t at = next(size + 1);
    memmove(data + at + length, data + at, size - at);
    memcpy(data + at, piece, length);
    return size + length;
}

static size_t erase(uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    size_t at = next(size), length = next(size - at) + 1;
    memmove(data + at, data + at + length, size - at - length);
    return size - length;
}

/* One change: a bit, a byte, a piece of another seed, a repetition, or a cut. */
static size_t change(uint8_t *data, size_t size) {
    static const uint8_t favourites[] = {0, 1, 0x7f, 0x80, 0xff, '0', '9', '-', '=', ',', '\n', ' ', '.'};
    uint8_t byte = favourites[next(sizeof favourites)];
    const struct fuzz_seed *other = &fuzz_seeds[next(fuzz_seed_count)];
    uint8_t piece[64];
    size_t length = 0;
    switch (next(6)) {
    case 0:
        if (size > 0)
            data[next(size)] ^= (uint8_t)(1u << next(8));
        return size;
    case 1:
        if (size > 0)
            data[next(size)] = byte;
        return size;
    case 2:
        return insert(data, size, &byte, 1);
    case 3:
        length = other->size < sizeof piece ? other->size : sizeof piece;
        memcpy(piece, (const uint8_t *)other->data + next(other->size - length + 1), length);
        return insert(data, size, piece, length);
    case 4:
        length = size < sizeof piece ? size : sizeof piece;
        memcpy(piece, data + next(size - length + 1), length);
        return insert(data, size, piece, length);
    default:
        return erase(data, size);
    }
}

static void runs(unsigned long count) {
    static uint8_t data[LONGEST];
    for (size_t i = 0; i < fuzz_seed_count; i++)
        try_input(fuzz_seeds[i].data, fuzz_seeds[i].size);
    for (unsigned long i = 0; i < count; i++) {
        const struct fuzz_seed *seed = &fuzz_seeds[next(fuzz_seed_count)];
        size_t size = seed->size < LONGEST ? seed->size : LONGEST;
        memcpy(data, seed->data, size);
        for (uint64_t changes = next(8); changes > 0; changes--)
            size = change(data, size);
        try_input(data, size);
    }
}

static int write_corpus(const char *directory) {
    for (size_t i = 0; i < fuzz_seed_count; i++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/seed-%zu", directory, i);
        FILE *file = fopen(path, "wb");
        if (file == NULL || fwrite(fuzz_seeds[i].data, 1, fuzz_seeds[i].size, file) != fuzz_seeds[i].size) {
            perror(path);
            return 1;
        }
        fclose(file);
    }
    return 0;
}

static int replay(const char *path) {
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    try_input(data, size);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "runs") == 0) {
        state = strtoull(argv[3], NULL, 10);
        runs(strtoul(argv[2], NULL, 10));
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "corpus") == 0)
        return write_corpus(argv[2]);
    if (argc >= 3 && strcmp(argv[1], "replay") == 0) {
        int failed = 0;
        for (int i = 2; i < argc; i++)
            failed |= replay(argv[i]);
        return failed;
    }
    fprintf(stderr, "usage: %s runs COUNT SEED | corpus DIRECTORY | replay FILE...\n", argv[0]);
    return 2;
}
