/* The client of the host PID broker without the rest of the library.
 *
 *   vgpu_broker ask [COUNT]   that many times "ERROR PID NANOSECONDS DESCRIPTORS"
 *   vgpu_broker signals       one question under a timer signal each millisecond, then the number of signals
 *   vgpu_broker cancel        a thread that asks is cancelled at once; what it saw, after it ended
 *   vgpu_broker fork          asks, then a child asks; then children are made while a thread asks:
 *                             the number of children with a connection of their parent
 *   vgpu_broker request       the request in hexadecimal digits
 *   vgpu_broker answer HEX    "ERROR PID" of 12 bytes
 *
 * ERROR is an errno, DESCRIPTORS what is open when all is done. */
#define _GNU_SOURCE
#include "broker.h"
#include "lock.h"
#include "util.h"

#include <dirent.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static int descriptors(mode_t kind) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        struct stat st;
        int fd = atoi(entry->d_name);
        if (entry->d_name[0] != '.' && fd > 2 && fd != dirfd(directory) && fstat(fd, &st) == 0)
            count += kind == 0 || (st.st_mode & S_IFMT) == kind;
    }
    if (directory != NULL)
        closedir(directory);
    return count;
}

static int ask(void) {
    int32_t pid = -1;
    uint64_t start = vg_now();
    int error = vg_broker_ask(&pid);
    uint64_t took = vg_now() - start;
    printf("%d %d %" PRIu64 " %d\n", error, (int)pid, took, descriptors(0));
    fflush(stdout);
    return error;
}

static _Atomic unsigned signals;

static void on_signal(int number) {
    (void)number;
    atomic_fetch_add(&signals, 1);
}

static void under_signals(void) {
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART */
    struct itimerval each = {.it_interval = {.tv_usec = 1000}, .it_value = {.tv_usec = 1000}}, never = {0};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &each, NULL);
    ask();
    setitimer(ITIMER_REAL, &never, NULL);
    printf("%u\n", atomic_load(&signals));
}

static _Atomic int started, may_end;
static int thread_error = -1;
static int32_t thread_pid = -1;

static void *asker(void *unused) {
    (void)unused;
    atomic_store(&started, 1);
    thread_error = vg_broker_ask(&thread_pid);
    while (atomic_load(&may_end) == 0)
        sched_yield();
    pthread_testcancel();
    return NULL;
}

/* A thread that asks, and ends when it has an answer and `may_end` is set. */
static pthread_t start_asker(void) {
    pthread_t thread;
    atomic_store(&started, 0);
    pthread_create(&thread, NULL, asker, NULL);
    while (atomic_load(&started) == 0)
        usleep(100);
    return thread;
}

static void cancelled(void) {
    void *result = NULL;
    pthread_t thread = start_asker();
    pthread_cancel(thread);
    atomic_store(&may_end, 1);
    pthread_join(thread, &result);
    printf("%d %d %d %d\n", thread_error, (int)thread_pid, result == PTHREAD_CANCELED, descriptors(0));
}

static void in_child(void) {
    pid_t child = fork();
    if (child == 0)
        exit(ask() == 0 ? 0 : 1);
    waitpid(child, NULL, 0);
}

static void after_fork_child(void) {
    vg_lock_after_fork_child();
    vg_broker_after_fork_child();
}

static void forks(void) {
    int with_connection = 0, status;
    pthread_atfork(vg_lock_before_fork, vg_lock_after_fork_parent, after_fork_child);
    ask();
    in_child();
    atomic_store(&may_end, 1);
    for (int round = 0; round < 20; round++) {
        pthread_t thread = start_asker();
        for (int i = 0; i < 5; i++) {
            pid_t child = fork();
            if (child == 0)
                _exit(descriptors(S_IFSOCK) != 0);
            waitpid(child, &status, 0);
            with_connection += status != 0;
        }
        pthread_join(thread, NULL);
    }
    printf("%d %d\n", with_connection, descriptors(0));
}

static void read_answer(const char *hex) {
    unsigned char bytes[VG_BROKER_ANSWER_LENGTH] = {0};
    int32_t pid = 0;
    for (int i = 0; i < VG_BROKER_ANSWER_LENGTH; i++) {
        unsigned byte = 0;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1)
            exit(2);
        bytes[i] = (unsigned char)byte;
    }
    int error = vg_broker_read_answer(bytes, &pid);
    printf("%d %d\n", error, (int)pid);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "ask";
    if (strcmp(what, "ask") == 0) {
        for (int i = argc > 2 ? atoi(argv[2]) : 1; i > 0; i--)
            ask();
    } else if (strcmp(what, "signals") == 0) {
        under_signals();
    } else if (strcmp(what, "cancel") == 0) {
        cancelled();
    } else if (strcmp(what, "fork") == 0) {
        forks();
    } else if (strcmp(what, "request") == 0) {
        for (int i = 0; i < VG_BROKER_REQUEST_LENGTH; i++)
            printf("%02x", vg_broker_request[i]);
        printf("\n");
    } else if (strcmp(what, "answer") == 0 && argc > 2 && strlen(argv[2]) == 2 * VG_BROKER_ANSWER_LENGTH) {
        read_answer(argv[2]);
    } else {
        return 2;
    }
    return 0;
}
