/* A program that keeps a card busy in one way until its input ends. Arguments: KIND KERNEL_NS.
 *   sync    kernels in batches of about 1 ms, waited for
 *   never   kernels without end, never waited for
 *   burst   300 ms of kernels at once, waited for, then 100 ms of pause
 *   graph   a graph of 20 kernels, waited for after about 1 ms
 *   graphs  the same graph without end, never waited for
 * Prints "ready" after the first batch. */
#define _GNU_SOURCE
#include "driver_calls.h"

#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NODES = 20, PAUSE_MS = 100 };
static const uint64_t batch_ns = 1000000, burst_ns = 300000000;

static void *kernel, *stream, *graph;

static void check(int result, const char *what) {
    if (result != 0) {
        fprintf(stderr, "limiter_load: %s: CUDA result %d\n", what, result);
        exit(1);
    }
}

static void launch(void) {
    check(cuLaunchKernel(kernel, 8, 1, 1, 128, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
}

static void launch_graph(void) {
    check(cuGraphLaunch(graph, stream), "cuGraphLaunch");
}

static void make_graph(void) {
    void *captured;
    check(cuStreamCreate(&stream, 0), "cuStreamCreate");
    check(cuStreamBeginCapture_v2(stream, 0), "cuStreamBeginCapture");
    for (int i = 0; i < NODES; i++)
        launch();
    check(cuStreamEndCapture(stream, &captured), "cuStreamEndCapture");
    check(cuGraphInstantiateWithFlags(&graph, captured, 0), "cuGraphInstantiate");
}

static int input_ended(void) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return poll(&input, 1, 0) > 0;
}

int main(int argc, char **argv) {
    const char *kind = argc == 3 ? argv[1] : "";
    uint64_t cost = argc == 3 ? strtoull(argv[2], NULL, 10) : 0, length = batch_ns;
    void (*piece)(void) = launch;
    char name[64];
    void *context, *module;
    if (cost == 0 || (strcmp(kind, "sync") != 0 && strcmp(kind, "never") != 0 && strcmp(kind, "burst") != 0 &&
                      strncmp(kind, "graph", 5) != 0)) {
        fprintf(stderr, "usage: limiter_load sync|never|burst|graph|graphs KERNEL_NS\n");
        return 2;
    }
    snprintf(name, sizeof name, "spin_ns_%llu", (unsigned long long)cost);
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuModuleLoadData(&module, "limiter_load"), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, name), "cuModuleGetFunction");
    if (strncmp(kind, "graph", 5) == 0) {
        make_graph();
        piece = launch_graph;
        cost *= NODES;
    }
    if (strcmp(kind, "burst") == 0)
        length = burst_ns;
    uint64_t count = length / cost > 0 ? length / cost : 1;
    for (int first = 1; !input_ended(); first = 0) {
        for (uint64_t i = 0; i < count; i++)
            piece();
        if (strcmp(kind, "never") != 0 && strcmp(kind, "graphs") != 0)
            check(cuCtxSynchronize(), "cuCtxSynchronize");
        if (strcmp(kind, "burst") == 0)
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_MS * 1000000L}, NULL);
        if (first) {
            printf("ready\n");
            fflush(stdout);
        }
    }
    return 0;
}
