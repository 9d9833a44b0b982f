/* Processes of one container that start CUDA at once. Arguments: a directory, the number of the first
 * process, how many. Each waits for the end of the pipe "go1" in the directory and times cuInit, for that of
 * "go2" and times its first primary context, and ends at that of "go3". A step's result goes to the pipe
 * "done" as one line of LINE bytes: "STEP NUMBER PID RESULT NANOSECONDS". */
#define _GNU_SOURCE
#include "driver_calls.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 3, LINE = 64 };

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int open_pipe(const char *directory, const char *name, int flags) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0) {
        perror(path);
        exit(1);
    }
    return fd;
}

static void wait_for_end(int fd) {
    char byte;
    while (read(fd, &byte, 1) > 0)
        continue;
}

static void report(int done, int step, int number, int result, long long took) {
    char line[LINE];
    memset(line, ' ', sizeof line);
    int used = snprintf(line, sizeof line, "%d %d %d %d %lld", step, number, (int)getpid(), result, took);
    line[used] = ' ';
    line[LINE - 1] = '\n';
    if (write(done, line, LINE) != LINE)
        _exit(1);
}

static void run(const int *go, int done, int number) {
    void *context;
    report(done, 0, number, 0, 0);
    wait_for_end(go[0]);
    long long start = now_ns();
    int result = cuInit(0);
    report(done, 1, number, result, now_ns() - start);
    wait_for_end(go[1]);
    start = now_ns();
    result = cuDevicePrimaryCtxRetain(&context, 0);
    report(done, 2, number, result, now_ns() - start);
    wait_for_end(go[2]);
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    int go[STEPS], done = open_pipe(argv[1], "done", O_WRONLY);
    for (int step = 0; step < STEPS; step++) {
        char name[8];
        snprintf(name, sizeof name, "go%d", step + 1);
        go[step] = open_pipe(argv[1], name, O_RDONLY);
    }
    prctl(PR_SET_PDEATHSIG, 9);
    for (int i = 0; i < atoi(argv[3]); i++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, 9);
            run(go, done, atoi(argv[2]) + i);
        }
    while (wait(NULL) > 0)
        continue;
    return 0;
}
