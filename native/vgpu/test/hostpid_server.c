/* The protocol of the host PID broker, answered by a loop in C: what bench/hostpid.py compares the broker
 * with. It has neither deadlines nor limits. Argument: path of the socket. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BATCH = 64, BACKLOG = 4096 };

static const unsigned char request[8] = {'H', 'P', 'I', 'D', 0, 1, 0, 1};

/* False: there is no request yet. */
static int serve(int fd) {
    unsigned char bytes[8], answer[12] = {'H', 'P', 'I', 'D', 0, 1, 0, 0};
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    ssize_t got = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return 0;
    if (got == sizeof bytes && memcmp(bytes, request, sizeof bytes) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.pid > 0) {
        for (int i = 0; i < 4; i++)
            answer[8 + i] = (unsigned char)((uint32_t)peer.pid >> (24 - 8 * i));
        send(fd, answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    close(fd);
    return 1;
}

static void take_waiting(int epoll, int listener) {
    for (int i = 0; i < BATCH; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        if (!serve(fd))
            epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (argc < 2 || strlen(argv[1]) >= sizeof address.sun_path)
        return 2;
    strcpy(address.sun_path, argv[1]);
    prctl(PR_SET_PDEATHSIG, 9);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[BATCH];
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, BACKLOG) != 0 ||
        epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) != 0) {
        perror(argv[1]);
        return 1;
    }
    for (;;) {
        int count = epoll_wait(epoll, events, BATCH, -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.fd == listener)
                take_waiting(epoll, listener);
            else
                serve(events[i].data.fd);
        }
    }
}
