/*
 * gpuprog: a small CUDA program for tests and the demo. It reaches the driver as ordinary programs do, by
 * --via: `symbol` (the dynamic linker's global scope; in gpuprog-linked references that the linker bound),
 * `dlsym` (dlopen + dlsym) or `procaddr` (cuGetProcAddress, as the CUDA runtime does). One line of JSON a
 * result; exit status 0 if the last one was CUDA_SUCCESS, 1 if not, 2 for wrong usage, 3 if there is no
 * driver.
 */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct api {
    CUresult (*Init)(unsigned);
    CUresult (*DriverGetVersion)(int *);
    CUresult (*GetErrorName)(CUresult, const char **);
    CUresult (*DeviceGetCount)(int *);
    CUresult (*DeviceGetName)(char *, int, CUdevice);
    CUresult (*DeviceGetUuid)(CUuuid *, CUdevice);
    CUresult (*DeviceTotalMem)(size_t *, CUdevice);
    CUresult (*DeviceGetPCIBusId)(char *, int, CUdevice);
    CUresult (*DevicePrimaryCtxRetain)(CUcontext *, CUdevice);
    CUresult (*CtxSetCurrent)(CUcontext);
    CUresult (*CtxSynchronize)(void);
    CUresult (*MemGetInfo)(size_t *, size_t *);
    CUresult (*MemAlloc)(CUdeviceptr *, size_t);
    CUresult (*MemFree)(CUdeviceptr);
    CUresult (*MemsetD8)(CUdeviceptr, unsigned char, size_t);
    CUresult (*MemcpyDtoH)(void *, CUdeviceptr, size_t);
    CUresult (*ModuleLoadData)(CUmodule *, const void *);
    CUresult (*ModuleGetFunction)(CUfunction *, CUmodule, const char *);
    CUresult (*LaunchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             CUstream, void **, void **);
};

#ifdef GPUPROG_LINKED
#define LINKED(symbol) extern void linked_##symbol(void) __asm__(#symbol);
LINKED(cuInit)
LINKED(cuDriverGetVersion)
LINKED(cuGetErrorName)
LINKED(cuDeviceGetCount)
LINKED(cuDeviceGetName)
LINKED(cuDeviceGetUuid_v2)
LINKED(cuDeviceTotalMem_v2)
LINKED(cuDeviceGetPCIBusId)
LINKED(cuDevicePrimaryCtxRetain)
LINKED(cuCtxSetCurrent)
LINKED(cuCtxSynchronize)
LINKED(cuMemGetInfo_v2)
LINKED(cuMemAlloc_v2)
LINKED(cuMemFree_v2)
LINKED(cuMemsetD8_v2)
LINKED(cuMemcpyDtoH_v2)
LINKED(cuModuleLoadData)
LINKED(cuModuleGetFunction)
LINKED(cuLaunchKernel)
#define AT_LINK_TIME(symbol) linked_##symbol
#else
#define AT_LINK_TIME(symbol) NULL
#endif

/* Name for cuGetProcAddress with the version it is asked for, and the exported symbol that this means. */
static const struct {
    const char *base, *symbol;
    int version;
    size_t offset;
    void (*linked)(void); /* gpuprog-linked only */
} names[] = {
#define NAME(member, suffix, version)                                                                        \
    {"cu" #member, "cu" #member #suffix, version, offsetof(struct api, member),                              \
     AT_LINK_TIME(cu##member##suffix)}
    NAME(Init, , 2000),
    NAME(DriverGetVersion, , 2020),
    NAME(GetErrorName, , 6000),
    NAME(DeviceGetCount, , 2000),
    NAME(DeviceGetName, , 2000),
    NAME(DeviceGetUuid, _v2, 11040),
    NAME(DeviceTotalMem, _v2, 3020),
    NAME(DeviceGetPCIBusId, , 4010),
    NAME(DevicePrimaryCtxRetain, , 7000),
    NAME(CtxSetCurrent, , 4000),
    NAME(CtxSynchronize, , 2000),
    NAME(MemGetInfo, _v2, 3020),
    NAME(MemAlloc, _v2, 3020),
    NAME(MemFree, _v2, 3020),
    NAME(MemsetD8, _v2, 3020),
    NAME(MemcpyDtoH, _v2, 3020),
    NAME(ModuleLoadData, , 2000),
    NAME(ModuleGetFunction, , 2000),
    NAME(LaunchKernel, , 4000),
#undef NAME
};

static struct api cu;
static volatile sig_atomic_t stopping;

static const char help[] =
    "usage: gpuprog [--via symbol|dlsym|procaddr] [--device N] COMMAND\n"
    "  info                                    driver version and devices\n"
    "  meminfo                                 cuMemGetInfo and cuDeviceTotalMem\n"
    "  alloc MIB [--hold SECONDS] [--touch]    allocate, optionally write all of it, keep it for a while\n"
    "  launch --kernel-us N --count M          launch M kernels of N microseconds, wait, report the time\n"
    "  worker --mib MIB [--kernel-us N] [--heartbeat SECONDS]\n"
    "                                          allocate, then launch kernels until SIGTERM, a line a "
    "heartbeat\n";

static int usage(const char *problem) {
    fprintf(stderr, "gpuprog: %s\n%s", problem, help);
    return 2;
}

static void no_driver(const char *what, const char *why) {
    fprintf(stderr,
            "gpuprog: %s: %s\nIs the directory of libcuda.so.1 (the simulated one: build/native/fakegpu) in "
            "LD_LIBRARY_PATH?\n",
            what, why ? why : "not found");
    exit(3);
}

static void resolve(const char *via) {
    CUresult (*get)(const char *, void **, int, uint64_t, int *) = NULL;
    int global = strcmp(via, "symbol") == 0;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (!driver)
        no_driver("cannot load libcuda.so.1", dlerror());
    if (strcmp(via, "procaddr") == 0) {
        *(void **)&get = dlsym(driver, "cuGetProcAddress_v2");
        if (!get)
            no_driver("cuGetProcAddress_v2", dlerror());
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void *function = NULL;
        int status = 0;
        if (get && get(names[i].base, &function, names[i].version, 0, &status) != CUDA_SUCCESS)
            function = NULL;
        if (global && names[i].linked)
            memcpy(&function, &names[i].linked, sizeof function);
        else if (!get)
            function = dlsym(global ? RTLD_DEFAULT : driver, names[i].symbol);
        if (!function)
            no_driver(get ? names[i].base : names[i].symbol, "the driver has no such function");
        memcpy((char *)&cu + names[i].offset, &function, sizeof function);
    }
}

/* Print the members after "call" and "result"; `more` is printf format of further members, each with a
 * leading comma. */
static void report(const char *call, CUresult result, const char *more) {
    const char *name = NULL;
    if (cu.GetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "unknown";
    printf("{\"call\": \"%s\", \"result\": %d, \"error\": \"%s\", \"pid\": %d%s}\n", call, result, name,
           (int)getpid(), more);
    fflush(stdout);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* cuInit and a primary context on the device; reports and exits at the first failure. */
static void start(int device) {
    CUcontext context;
    CUresult result = cu.Init(0);
    const char *call = "cuInit";
    if (result == CUDA_SUCCESS) {
        result = cu.DevicePrimaryCtxRetain(&context, device);
        call = "cuDevicePrimaryCtxRetain";
    }
    if (result == CUDA_SUCCESS) {
        result = cu.CtxSetCurrent(context);
        call = "cuCtxSetCurrent";
    }
    if (result == CUDA_SUCCESS)
        return;
    report(call, result, "");
    exit(1);
}

static void handle_stop(int signal_number) {
    (void)signal_number;
    stopping = 1;
}

static void rest(double duration) {
    double end = seconds() + duration;
    while (!stopping && seconds() < end) {
        struct timespec t = {.tv_nsec = 20000000};
        nanosleep(&t, NULL);
    }
}

static int info(void) {
    char more[256];
    int version = 0, count = 0;
    CUresult result = cu.Init(0);
    if (result == CUDA_SUCCESS)
        result = cu.DriverGetVersion(&version);
    if (result == CUDA_SUCCESS)
        result = cu.DeviceGetCount(&count);
    snprintf(more, sizeof more, ", \"cuda_version\": %d, \"devices\": %d", version, count);
    report("cuInit", result, more);
    for (int i = 0; i < count && result == CUDA_SUCCESS; i++) {
        char name[128] = "", bus[32] = "", uuid[64] = "GPU-";
        CUuuid id = {{0}};
        size_t total = 0;
        result = cu.DeviceGetName(name, sizeof name, i);
        cu.DeviceGetUuid(&id, i);
        cu.DeviceTotalMem(&total, i);
        cu.DeviceGetPCIBusId(bus, sizeof bus, i);
        for (int b = 0; b < 16; b++)
            snprintf(uuid + strlen(uuid), 6, "%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "",
                     id.bytes[b]);
        snprintf(
            more, sizeof more,
            ", \"device\": %d, \"name\": \"%s\", \"uuid\": \"%s\", \"pci\": \"%s\", \"total_bytes\": %zu", i,
            name, uuid, bus, total);
        report("cuDeviceGetName", result, more);
    }
    return result != CUDA_SUCCESS;
}

static int meminfo(int device) {
    char more[128];
    size_t available = 0, total = 0, device_total = 0;
    start(device);
    CUresult result = cu.MemGetInfo(&available, &total);
    if (result == CUDA_SUCCESS)
        result = cu.DeviceTotalMem(&device_total, device);
    snprintf(more, sizeof more, ", \"free_bytes\": %zu, \"total_bytes\": %zu, \"device_total_bytes\": %zu",
             available, total, device_total);
    report("cuMemGetInfo", result, more);
    return result != CUDA_SUCCESS;
}

static CUresult allocate(unsigned long long mib, int touch, CUdeviceptr *pointer) {
    char more[64];
    CUresult result = cu.MemAlloc(pointer, (size_t)(mib << 20));
    snprintf(more, sizeof more, ", \"bytes\": %llu", mib << 20);
    report("cuMemAlloc", result, more);
    if (result != CUDA_SUCCESS)
        fprintf(stderr, "gpuprog: the driver refused %llu MiB with error %d%s\n", mib, result,
                result == CUDA_ERROR_OUT_OF_MEMORY
                    ? " (out of memory): over this container's limit, or the card is full"
                    : "");
    if (result == CUDA_SUCCESS && touch) {
        result = cu.MemsetD8(*pointer, 0x5A, (size_t)(mib << 20));
        report("cuMemsetD8", result, "");
    }
    return result;
}

static CUfunction kernel(unsigned long long us) {
    static const char image[] = "fakegpu module";
    char name[64];
    CUmodule module;
    CUfunction function = NULL;
    CUresult result = cu.ModuleLoadData(&module, image);
    snprintf(name, sizeof name, "spin_us_%llu", us);
    if (result == CUDA_SUCCESS)
        result = cu.ModuleGetFunction(&function, module, name);
    if (result == CUDA_SUCCESS)
        return function;
    report("cuModuleGetFunction", result, "");
    exit(1);
}

static int launch(int device, unsigned long long us, unsigned long long count) {
    char more[160];
    start(device);
    CUfunction function = kernel(us);
    CUresult result = CUDA_SUCCESS;
    double begin = seconds();
    unsigned long long done = 0;
    while (done < count && !stopping &&
           (result = cu.LaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL)) == CUDA_SUCCESS)
        done++;
    if (result == CUDA_SUCCESS)
        result = cu.CtxSynchronize();
    double took = seconds() - begin;
    snprintf(more, sizeof more,
             ", \"launches\": %llu, \"kernel_us\": %llu, \"seconds\": %.6f, \"share_percent\": %.1f", done,
             us, took, took > 0 ? (double)done * (double)us / took / 1e4 : 0.0);
    report("cuLaunchKernel", result, more);
    return result != CUDA_SUCCESS;
}

static int worker(int device, unsigned long long mib, unsigned long long us, double heartbeat) {
    char more[200];
    CUdeviceptr pointer = 0;
    CUresult result = CUDA_SUCCESS;
    start(device);
    if (mib > 0 && (result = allocate(mib, 0, &pointer)) != CUDA_SUCCESS)
        return 1;
    CUfunction function = kernel(us);
    unsigned long long total = 0, since = 0;
    double last = seconds();
    while (!stopping && result == CUDA_SUCCESS) {
        result = cu.LaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
        if (result == CUDA_SUCCESS)
            result = cu.CtxSynchronize();
        total++;
        since++;
        double now = seconds();
        if (now - last < heartbeat)
            continue;
        size_t available = 0, all = 0;
        cu.MemGetInfo(&available, &all);
        snprintf(more, sizeof more,
                 ", \"launches\": %llu, \"share_percent\": %.1f, \"free_bytes\": %zu, \"total_bytes\": %zu",
                 total, (double)since * (double)us / (now - last) / 1e4, available, all);
        report("heartbeat", result, more);
        last = now;
        since = 0;
    }
    if (pointer)
        cu.MemFree(pointer);
    snprintf(more, sizeof more, ", \"launches\": %llu", total);
    report("worker", result, more);
    return result != CUDA_SUCCESS;
}

/* A decimal number of an option in [0, 2^40], or exit 2. */
static unsigned long long number(const char *text, const char *what) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = text ? strtoull(text, &end, 10) : 0;
    if (text && *text && !*end && !errno && *text != '-' && value <= 1ull << 40)
        return value;
    char problem[128];
    snprintf(problem, sizeof problem, "%s needs a number from 0 to 2^40, not %.40s", what,
             text ? text : "nothing");
    exit(usage(problem));
}

int main(int argc, char **argv) {
    const char *via = "dlsym", *command = NULL, *operand = NULL;
    unsigned long long hold = 0, us = 1000, count = 1, mib = 0, heartbeat = 1, device = 0;
    int touch = 0;
    for (int i = 1; i < argc; i++) {
        const char *next = i + 1 < argc ? argv[i + 1] : NULL;
        const struct {
            const char *name;
            unsigned long long *value;
        } numbers[] = {{"--hold", &hold}, {"--kernel-us", &us},        {"--count", &count},
                       {"--mib", &mib},   {"--heartbeat", &heartbeat}, {"--device", &device}};
        int used = 0;
        for (size_t n = 0; n < sizeof numbers / sizeof numbers[0] && !used; n++)
            if (strcmp(argv[i], numbers[n].name) == 0) {
                *numbers[n].value = number(next, numbers[n].name);
                used = 1;
            }
        if (used || (strcmp(argv[i], "--via") == 0 && next)) {
            via = used ? via : next;
            i++;
        } else if (strcmp(argv[i], "--touch") == 0) {
            touch = 1;
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(help, stdout);
            return 0;
        } else if (argv[i][0] == '-') {
            return usage("unknown option");
        } else if (!command) {
            command = argv[i];
        } else if (!operand) {
            operand = argv[i];
        } else {
            return usage("too many words");
        }
    }
    if (!command)
        return usage("no command");
    if (strcmp(via, "symbol") != 0 && strcmp(via, "dlsym") != 0 && strcmp(via, "procaddr") != 0)
        return usage("--via takes symbol, dlsym or procaddr");
    signal(SIGTERM, handle_stop);
    signal(SIGINT, handle_stop);
    resolve(via);
    if (strcmp(command, "info") == 0)
        return info();
    if (strcmp(command, "meminfo") == 0)
        return meminfo((int)device);
    if (strcmp(command, "launch") == 0)
        return launch((int)device, us, count);
    if (strcmp(command, "worker") == 0)
        return worker((int)device, mib, us, (double)heartbeat);
    if (strcmp(command, "alloc") != 0)
        return usage("unknown command");
    CUdeviceptr pointer = 0;
    mib = number(operand, "alloc");
    start((int)device);
    if (allocate(mib, touch, &pointer) != CUDA_SUCCESS)
        return 1;
    rest((double)hold);
    CUresult result = cu.MemFree(pointer);
    report("cuMemFree", result, "");
    return result != CUDA_SUCCESS;
}
