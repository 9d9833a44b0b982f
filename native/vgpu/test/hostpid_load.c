/* Clients of a host PID broker, without the checks of the library.
 *   vgpu_hostpid_load SOCKET CLIENTS ROUNDS   that many processes ask at once, round by round. A line per
 * round with what each waited, ns from its own connect; -1: no answer, or a wrong PID vgpu_hostpid_load
 * SOCKET flood COUNT      keeps COUNT connections that say nothing, anew as soon as they are closed, until it
 * is killed */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct sockaddr_un address = {.sun_family = AF_UNIX};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t ask(void) {
    static const unsigned char request[8] = {'H', 'P', 'I', 'D', 0, 1, 0, 1};
    static const unsigned char good[8] = {'H', 'P', 'I', 'D', 0, 1, 0, 0};
    unsigned char answer[12] = {0};
    int64_t start = now_ns();
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int answered = connect(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
                   send(fd, request, sizeof request, MSG_NOSIGNAL) == sizeof request &&
                   recv(fd, answer, sizeof answer, MSG_WAITALL) == sizeof answer &&
                   memcmp(answer, good, sizeof good) == 0;
    close(fd);
    int64_t took = now_ns() - start;
    uint32_t pid =
        (uint32_t)answer[8] << 24 | (uint32_t)answer[9] << 16 | (uint32_t)answer[10] << 8 | answer[11];
    return answered && pid == (uint32_t)getpid() ? took : -1;
}

struct shared {
    pthread_barrier_t start, end;
    int64_t took[];
};

static int ask_at_once(int clients, int rounds) {
    size_t length = sizeof(struct shared) + (size_t)clients * sizeof(int64_t);
    struct shared *shared = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->start, &attributes, (unsigned)clients + 1);
    pthread_barrier_init(&shared->end, &attributes, (unsigned)clients + 1);
    for (int i = 0; i < clients; i++) {
        if (fork() != 0)
            continue;
        prctl(PR_SET_PDEATHSIG, 9);
        for (int round = 0; round < rounds; round++) {
            pthread_barrier_wait(&shared->start);
            shared->took[i] = ask();
            pthread_barrier_wait(&shared->end);
        }
        _exit(0);
    }
    for (int round = 0; round < rounds; round++) {
        usleep(20000); /* every client is at the start */
        pthread_barrier_wait(&shared->start);
        pthread_barrier_wait(&shared->end);
        for (int i = 0; i < clients; i++)
            printf("%" PRId64 "%c", shared->took[i], i + 1 < clients ? ' ' : '\n');
        fflush(stdout);
    }
    while (wait(NULL) > 0)
        continue;
    return 0;
}

static void connect_again(int epoll) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.fd = fd};
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0) {
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
        return;
    }
    if (fd >= 0)
        close(fd);
    usleep(1000);
}

static void flood(int count) {
    int epoll = epoll_create1(EPOLL_CLOEXEC), open = 0;
    struct rlimit limit = {.rlim_cur = 8192, .rlim_max = 8192};
    struct epoll_event events[64];
    setrlimit(RLIMIT_NOFILE, &limit);
    prctl(PR_SET_PDEATHSIG, 9);
    for (;;) {
        for (; open < count; open++)
            connect_again(epoll);
        int ready = epoll_wait(epoll, events, 64, -1);
        for (int i = 0; i < ready; i++) {
            close(events[i].data.fd);
            open--;
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 4 || strlen(argv[1]) >= sizeof address.sun_path)
        return 2;
    strcpy(address.sun_path, argv[1]);
    if (strcmp(argv[2], "flood") == 0)
        flood(atoi(argv[3]));
    return ask_at_once(atoi(argv[2]), atoi(argv[3]));
}
