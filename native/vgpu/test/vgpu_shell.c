/* A CUDA program that does what its standard input says, one command a line, and answers each with one line:
 * "RESULT VALUE...". First argument: how it reaches the driver: link, dlsym, proc1 or proc2
 * (cuGetProcAddress). */
#define _GNU_SOURCE
#include "driver_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* One row per function: its exported symbol, the name and version for cuGetProcAddress, the linked function.
 */
enum function {
    F_INIT,
    F_RETAIN,
    F_RELEASE,
    F_RESET,
    F_CURRENT,
    F_SYNC,
    F_ALLOC,
    F_MANAGED,
    F_PITCH,
    F_FREE,
    F_ASYNC,
    F_FREE_ASYNC,
    F_CREATE,
    F_HRELEASE,
    F_ADDRESS,
    F_MAP,
    F_UNMAP,
    F_EXPORT,
    F_IMPORT,
    F_ARRAY,
    F_ARRAY_DESTROY,
    F_INFO,
    F_TOTAL,
    F_LAUNCH,
    F_MODULE,
    F_FUNCTION,
    F_COUNT
};

static struct {
    const char *symbol, *base;
    int version;
    void *pointer;
} functions[F_COUNT] = {
    [F_INIT] = {"cuInit", "cuInit", 2000, (void *)cuInit},
    [F_RETAIN] = {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000,
                  (void *)cuDevicePrimaryCtxRetain},
    [F_RELEASE] = {"cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", 11000,
                   (void *)cuDevicePrimaryCtxRelease_v2},
    [F_RESET] = {"cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxReset", 11000,
                 (void *)cuDevicePrimaryCtxReset_v2},
    [F_CURRENT] = {"cuCtxSetCurrent", "cuCtxSetCurrent", 4000, (void *)cuCtxSetCurrent},
    [F_SYNC] = {"cuCtxSynchronize", "cuCtxSynchronize", 2000, (void *)cuCtxSynchronize},
    [F_ALLOC] = {"cuMemAlloc_v2", "cuMemAlloc", 3020, (void *)cuMemAlloc_v2},
    [F_MANAGED] = {"cuMemAllocManaged", "cuMemAllocManaged", 6000, (void *)cuMemAllocManaged},
    [F_PITCH] = {"cuMemAllocPitch_v2", "cuMemAllocPitch", 3020, (void *)cuMemAllocPitch_v2},
    [F_FREE] = {"cuMemFree_v2", "cuMemFree", 3020, (void *)cuMemFree_v2},
    [F_ASYNC] = {"cuMemAllocAsync", "cuMemAllocAsync", 11020, (void *)cuMemAllocAsync},
    [F_FREE_ASYNC] = {"cuMemFreeAsync", "cuMemFreeAsync", 11020, (void *)cuMemFreeAsync},
    [F_CREATE] = {"cuMemCreate", "cuMemCreate", 10020, (void *)cuMemCreate},
    [F_HRELEASE] = {"cuMemRelease", "cuMemRelease", 10020, (void *)cuMemRelease},
    [F_ADDRESS] = {"cuMemAddressReserve", "cuMemAddressReserve", 10020, (void *)cuMemAddressReserve},
    [F_MAP] = {"cuMemMap", "cuMemMap", 10020, (void *)cuMemMap},
    [F_UNMAP] = {"cuMemUnmap", "cuMemUnmap", 10020, (void *)cuMemUnmap},
    [F_EXPORT] = {"cuMemExportToShareableHandle", "cuMemExportToShareableHandle", 10020,
                  (void *)cuMemExportToShareableHandle},
    [F_IMPORT] = {"cuMemImportFromShareableHandle", "cuMemImportFromShareableHandle", 10020,
                  (void *)cuMemImportFromShareableHandle},
    [F_ARRAY] = {"cuArrayCreate_v2", "cuArrayCreate", 3020, (void *)cuArrayCreate_v2},
    [F_ARRAY_DESTROY] = {"cuArrayDestroy", "cuArrayDestroy", 2000, (void *)cuArrayDestroy},
    [F_INFO] = {"cuMemGetInfo_v2", "cuMemGetInfo", 3020, (void *)cuMemGetInfo_v2},
    [F_TOTAL] = {"cuDeviceTotalMem_v2", "cuDeviceTotalMem", 3020, (void *)cuDeviceTotalMem_v2},
    [F_LAUNCH] = {"cuLaunchKernel", "cuLaunchKernel", 4000, (void *)cuLaunchKernel},
    [F_MODULE] = {"cuModuleLoadData", "cuModuleLoadData", 2000, (void *)cuModuleLoadData},
    [F_FUNCTION] = {"cuModuleGetFunction", "cuModuleGetFunction", 2000, (void *)cuModuleGetFunction},
};

#define CALL(f, type, ...) (((int(*) type)functions[f].pointer)(__VA_ARGS__))

static void *kernel;

static void reach(const char *how) {
    void *library = strcmp(how, "dlsym") == 0 ? dlopen("libcuda.so.1", RTLD_NOW) : NULL;
    for (int f = 0; f < F_COUNT && strcmp(how, "link") != 0; f++) {
        void *pointer = NULL;
        int status = 0;
        if (library != NULL)
            pointer = dlsym(library, functions[f].symbol);
        else if (strcmp(how, "proc1") == 0)
            cuGetProcAddress(functions[f].base, &pointer, functions[f].version, 0);
        else
            cuGetProcAddress_v2(functions[f].base, &pointer, functions[f].version, 0, &status);
        if (pointer == NULL) {
            fprintf(stderr, "%s is not to be had by %s\n", functions[f].symbol, how);
            exit(3);
        }
        functions[f].pointer = pointer;
    }
}

/* A kernel that takes `ns` on the simulated card. */
static int load_kernel(uint64_t ns) {
    void *module = NULL;
    char name[48];
    snprintf(name, sizeof name, "spin_ns_%" PRIu64, ns);
    int result =
        CALL(F_MODULE, (void **, const void *), &module, ".version 8.0\n.visible .entry work() {}\n");
    if (result == 0)
        result = CALL(F_FUNCTION, (void **, void *, const char *), &kernel, module, name);
    return result;
}

static int launch(uint64_t count, uint64_t blocks, uint64_t threads) {
    int result = 0;
    for (uint64_t i = 0; i < count && result == 0; i++)
        result = CALL(F_LAUNCH,
                      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                       void **, void **),
                      kernel, (unsigned)blocks, 1, 1, (unsigned)threads, 1, 1, 0, NULL, NULL, NULL);
    return result;
}

static int launch_for(uint64_t milliseconds, uint64_t blocks, uint64_t threads, uint64_t *launched) {
    struct timespec start, now;
    int result = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        result = launch(1, blocks, threads);
        ++*launched;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (result == 0 && (uint64_t)((now.tv_sec - start.tv_sec) * 1000 +
                                       (now.tv_nsec - start.tv_nsec) / 1000000) < milliseconds);
    return result;
}

/* Allocates up to 64 blocks of up to `largest` bytes and frees them in random order; at the end all are free.
 */
static int churn(uint64_t milliseconds, uint64_t largest, uint64_t *refused) {
    uint64_t blocks[64] = {0}, random = (uint64_t)getpid() ^ (uint64_t)(uintptr_t)blocks;
    struct timespec start, now;
    int result = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t *block = &blocks[random >> 58];
        if (*block == 0) {
            int answer = CALL(F_ALLOC, (uint64_t *, size_t), block, (random >> 20) % largest + 1);
            if (answer != 0)
                *block = 0;
            *refused += answer == 2;
            result = answer != 0 && answer != 2 ? answer : result;
        } else {
            int answer = CALL(F_FREE, (uint64_t), *block);
            *block = 0;
            result = answer != 0 ? answer : result;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (result == 0 && (uint64_t)((now.tv_sec - start.tv_sec) * 1000 +
                                       (now.tv_nsec - start.tv_nsec) / 1000000) < milliseconds);
    for (int i = 0; i < 64; i++)
        if (blocks[i] != 0)
            CALL(F_FREE, (uint64_t), blocks[i]);
    return result;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* How long this thread was ready to run while others had the cores, ns; 0: the kernel does not say. */
static uint64_t without_core_ns(int schedstat) {
    char text[96];
    ssize_t length = pread(schedstat, text, sizeof text - 1, 0);
    uint64_t waited = 0;
    text[length > 0 ? length : 0] = '\0';
    return sscanf(text, "%*u %" SCNu64, &waited) == 1 ? waited : 0;
}

static uint64_t longest_on_core_ns;

/* Allocates and frees one block until the time is over; the longest that one call took, and how many were
 * refused. `all_or_none`: 1: none may be refused, 2: all have to be; else the result is 1. The longest
 * without the time in which no core was free for the call is kept aside. */
static int slowest(uint64_t milliseconds, uint64_t bytes, uint64_t all_or_none, uint64_t *longest_ns,
                   uint64_t *refused) {
    uint64_t end = now_ns() + milliseconds * 1000000u;
    int schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC), failed = 0;
    longest_on_core_ns = 0;
    for (uint64_t start = now_ns(), before = without_core_ns(schedstat), done; start < end && failed == 0;
         start = done) {
        uint64_t block;
        int result = CALL(F_ALLOC, (uint64_t *, size_t), &block, bytes);
        if (result == 0)
            CALL(F_FREE, (uint64_t), block);
        done = now_ns();
        uint64_t after = without_core_ns(schedstat), took = done - start, off = after - before;
        before = after;
        if (took > *longest_ns)
            *longest_ns = took;
        if (took > off && took - off > longest_on_core_ns)
            longest_on_core_ns = took - off;
        *refused += result == 2;
        failed = result != 0 && result != 2 ? result : all_or_none == (result == 0 ? 2 : 1);
    }
    close(schedstat);
    return failed;
}

static struct {
    uint64_t milliseconds, largest;
    void *context;
} work;

static void *worker(void *index) {
    uint64_t refused = 0;
    intptr_t result = CALL(F_CURRENT, (void *), work.context);
    if (result == 0)
        result = (intptr_t)index % 2 == 0 ? churn(work.milliseconds, work.largest, &refused)
                                          : launch_for(work.milliseconds, 1, 32, &refused);
    return (void *)result;
}

/* Half of the threads allocate and free, the other half launch. */
static int in_threads(uint64_t count, uint64_t milliseconds, uint64_t largest) {
    pthread_t threads[16];
    int result = CALL(F_RETAIN, (void **, int), &work.context, 0);
    work.milliseconds = milliseconds;
    work.largest = largest;
    for (uint64_t i = 0; i < count && i < 16; i++)
        pthread_create(&threads[i], NULL, worker, (void *)i);
    for (uint64_t i = 0; i < count && i < 16; i++) {
        void *answer = NULL;
        pthread_join(threads[i], &answer);
        result = answer != NULL ? (int)(intptr_t)answer : result;
    }
    return result;
}

/* A thread that is cancelled at the first chance while it allocates, or launches. */
static void *cancelled(void *bytes) {
    uint64_t pointer;
    CALL(F_CURRENT, (void *), work.context);
    pthread_cancel(pthread_self());
    if (bytes != NULL)
        CALL(F_ALLOC, (uint64_t *, size_t), &pointer, (size_t)(uintptr_t)bytes);
    else
        launch(1, 10, 128);
    pthread_testcancel();
    return NULL;
}

/* So many, one after the other. */
static int cancel_threads(uint64_t count, uint64_t bytes) {
    int result = CALL(F_RETAIN, (void **, int), &work.context, 0);
    for (uint64_t i = 0; i < count && result == 0; i++) {
        pthread_t thread;
        void *answer = NULL;
        pthread_create(&thread, NULL, cancelled, (void *)(uintptr_t)bytes);
        pthread_join(thread, &answer);
        result = answer == PTHREAD_CANCELED ? 0 : -1;
    }
    return result;
}

/* Forks short-lived children while threads allocate and launch. */
static int fork_storm(uint64_t count) {
    pthread_t threads[4];
    int result = CALL(F_RETAIN, (void **, int), &work.context, 0);
    work.milliseconds = 1000;
    work.largest = 1 << 20;
    for (uint64_t i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, worker, (void *)i);
    for (uint64_t i = 0; i < count; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            uint64_t pointer;
            exit(CALL(F_ALLOC, (uint64_t *, size_t), &pointer, 512) & 0x7f);
        }
        waitpid(child, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 3)
            result = 1000 + status;
    }
    for (uint64_t i = 0; i < 4; i++) {
        void *answer = NULL;
        pthread_join(threads[i], &answer);
        result = answer != NULL ? (int)(intptr_t)answer : result;
    }
    return result;
}

/* The child's first allocation and exit status; the parent waits. */
static int in_child(uint64_t bytes) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        uint64_t pointer;
        int result = bytes != 0 ? CALL(F_ALLOC, (uint64_t *, size_t), &pointer, bytes) : 0;
        exit(result & 0x7f);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* A child that makes a context of its own and stays until the parent has ended. The result of its calls, and
 * its PID. */
static int start_child(uint64_t *pid) {
    int answer[2], result = -1;
    void *context;
    if (pipe(answer) != 0)
        return -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        result = CALL(F_INIT, (unsigned), 0);
        if (result == 0)
            result = CALL(F_RETAIN, (void **, int), &context, 0);
        if (write(answer[1], &result, sizeof result) == sizeof result)
            pause();
        _exit(1);
    }
    close(answer[1]);
    if (read(answer[0], &result, sizeof result) != sizeof result)
        result = -1;
    close(answer[0]);
    *pid = (uint64_t)child;
    return result;
}

static int obey(const char *command, uint64_t a, uint64_t b, uint64_t c, uint64_t *out, uint64_t *more) {
    void *pointer = NULL;
    size_t first = 0, second = 0;
    int result = -1;
    if (strcmp(command, "init") == 0) {
        result = CALL(F_INIT, (unsigned), 0);
    } else if (strcmp(command, "retain") == 0) {
        result = CALL(F_RETAIN, (void **, int), &pointer, (int)a);
        if (result == 0)
            result = CALL(F_CURRENT, (void *), pointer);
    } else if (strcmp(command, "release") == 0) {
        result = CALL(F_RELEASE, (int), (int)a);
    } else if (strcmp(command, "reset") == 0) {
        result = CALL(F_RESET, (int), (int)a);
    } else if (strcmp(command, "alloc") == 0) {
        *out = 77;
        result = CALL(F_ALLOC, (uint64_t *, size_t), out, a);
    } else if (strcmp(command, "managed") == 0) {
        result = CALL(F_MANAGED, (uint64_t *, size_t, unsigned), out, a, 1);
    } else if (strcmp(command, "pitch") == 0) {
        result = CALL(F_PITCH, (uint64_t *, size_t *, size_t, size_t, unsigned), out, &first, a, b, 4);
        *more = first;
    } else if (strcmp(command, "free") == 0) {
        result = CALL(F_FREE, (uint64_t), a);
    } else if (strcmp(command, "async") == 0) {
        result = CALL(F_ASYNC, (uint64_t *, size_t, void *), out, a, NULL);
    } else if (strcmp(command, "freeasync") == 0) {
        result = CALL(F_FREE_ASYNC, (uint64_t, void *), a, NULL);
    } else if (strcmp(command, "create") == 0) {
        int prop[8] = {1, 0, (int)b, (int)c, 0, 0, 0, 0};
        result = CALL(F_CREATE, (uint64_t *, size_t, const void *, uint64_t), out, a, prop, 0);
    } else if (strcmp(command, "hrelease") == 0) {
        result = CALL(F_HRELEASE, (uint64_t), a);
    } else if (strcmp(command, "map") == 0) {
        result = CALL(F_ADDRESS, (uint64_t *, size_t, size_t, uint64_t, uint64_t), out, a, 0, 0, 0);
        if (result == 0)
            result = CALL(F_MAP, (uint64_t, size_t, size_t, uint64_t, uint64_t), *out, a, 0, b, 0);
    } else if (strcmp(command, "unmap") == 0) {
        result = CALL(F_UNMAP, (uint64_t, size_t), a, b);
    } else if (strcmp(command, "export") == 0) {
        int file = -1;
        result = CALL(F_EXPORT, (void *, uint64_t, int, uint64_t), &file, a, 1, 0);
        *out = (uint64_t)file;
    } else if (strcmp(command, "import") == 0) { /* b: under another number, as if it had been sent around */
        int file = b != 0 ? dup((int)a) : (int)a;
        if (b != 0)
            close((int)a);
        result = CALL(F_IMPORT, (uint64_t *, void *, int), out, (void *)(intptr_t)file, 1);
        close(file);
    } else if (strcmp(command, "array") == 0) {
        struct {
            size_t width, height;
            unsigned format, channels;
        } desc = {a, b, 0x20, 1};
        result = CALL(F_ARRAY, (void **, const void *), &pointer, &desc);
        *out = (uint64_t)(uintptr_t)pointer;
    } else if (strcmp(command, "arraydestroy") == 0) {
        result = CALL(F_ARRAY_DESTROY, (void *), (void *)(uintptr_t)a);
    } else if (strcmp(command, "info") == 0) {
        result = CALL(F_INFO, (size_t *, size_t *), &first, &second);
        *out = first;
        *more = second;
    } else if (strcmp(command, "infonull") == 0) {
        result = CALL(F_INFO, (size_t *, size_t *), NULL, &second);
        *more = second;
    } else if (strcmp(command, "total") == 0) {
        result = CALL(F_TOTAL, (size_t *, int), &first, (int)a);
        *out = first;
    } else if (strcmp(command, "kernel") == 0) {
        result = load_kernel(a);
    } else if (strcmp(command, "launch") == 0) {
        result = launch(a, b, c);
    } else if (strcmp(command, "launchfor") == 0) {
        result = launch_for(a, b, c, out);
    } else if (strcmp(command, "sync") == 0) {
        result = CALL(F_SYNC, (void), );
    } else if (strcmp(command, "churn") == 0) {
        result = churn(a, b, out);
    } else if (strcmp(command, "slowest") == 0) {
        result = slowest(a, b, c, out, more);
    } else if (strcmp(command, "slowest-on-core") == 0) {
        *out = longest_on_core_ns;
        result = 0;
    } else if (strcmp(command, "threads") == 0) {
        result = in_threads(a, b, c);
    } else if (strcmp(command, "cancel") == 0) {
        result = cancel_threads(a, b);
    } else if (strcmp(command, "forkstorm") == 0) {
        result = fork_storm(a);
    } else if (strcmp(command, "fork") == 0) {
        result = in_child(a);
    } else if (strcmp(command, "forkinit") == 0) {
        result = start_child(out);
    } else if (strcmp(command, "closeall") == 0) {
        for (int fd = 3; fd < 4096; fd++)
            close(fd);
        result = 0;
    } else if (strcmp(command, "closefile") == 0) {
        result = close((int)a);
    } else if (strcmp(command, "chroot") == 0) {
        result = chroot("/usr");
    }
    return result;
}

int main(int argc, char **argv) {
    char line[256], command[32];
    reach(argc > 1 ? argv[1] : "link");
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin) != NULL) {
        uint64_t a = 0, b = 0, c = 0, out = 0, more = 0;
        if (sscanf(line, "%31s %" SCNu64 " %" SCNu64 " %" SCNu64, command, &a, &b, &c) < 1)
            continue;
        int result = obey(command, a, b, c, &out, &more);
        printf("%d %" PRIu64 " %" PRIu64 "\n", result, out, more);
    }
    return 0;
}
