#define _GNU_SOURCE
#include "broker.h"

#include "lock.h"
#include "util.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <unistd.h>

/* The one place: nothing in the process or its environment moves it. */
static const char directory[] = "/tmp/vgpulock/hostpid";
static const struct sockaddr_un address = {.sun_family = AF_UNIX,
                                           .sun_path = "/tmp/vgpulock/hostpid/broker.sock"};
static const uint64_t limit_ns = 500000000u, first_pause_ns = 1000000u, longest_pause_ns = 10000000u;

const unsigned char vg_broker_request[VG_BROKER_REQUEST_LENGTH] = {'H', 'P', 'I', 'D', 0, 1, 0, 1};

static _Atomic int open_socket; /* descriptor + 1 */

int vg_broker_read_answer(const unsigned char answer[VG_BROKER_ANSWER_LENGTH], int32_t *pid) {
    static const unsigned char good[] = {'H', 'P', 'I', 'D', 0, 1, 0, 0};
    if (memcmp(answer, good, sizeof good) != 0)
        return EPROTO;
    uint32_t number = (uint32_t)answer[8] << 24 | (uint32_t)answer[9] << 16 | (uint32_t)answer[10] << 8 |
                      (uint32_t)answer[11];
    if (number == 0 || number > INT32_MAX)
        return ERANGE;
    *pid = (int32_t)number;
    return 0;
}

/* Why what is at the place is not the node's, 0: it is. Root of a neighbour can make anything in the shared
 * directory above, but no read-only mount in this container. */
static int distrust(void) {
    struct stat place, socket;
    struct statvfs mount;
    if (lstat(directory, &place) != 0)
        return errno == ENOTDIR ? ENOTSOCK : errno;
    if (!S_ISDIR(place.st_mode))
        return ENOTSOCK;
    if (place.st_uid != 0 || (place.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return EPERM;
    if (lstat(address.sun_path, &socket) != 0)
        return errno;
    if (!S_ISSOCK(socket.st_mode))
        return ENOTSOCK;
    if (socket.st_uid != 0)
        return EPERM;
    if (statvfs(directory, &mount) != 0)
        return errno;
    return (mount.f_flag & ST_RDONLY) != 0 ? 0 : EPERM;
}

static int wait_for(int fd, short events, uint64_t deadline) {
    for (;;) {
        uint64_t now = vg_now();
        if (now >= deadline)
            return ETIMEDOUT;
        struct timespec left = {.tv_sec = (time_t)((deadline - now) / 1000000000u),
                                .tv_nsec = (long)((deadline - now) % 1000000000u)};
        struct pollfd polled = {.fd = fd, .events = events};
        int ready = ppoll(&polled, 1, &left, NULL);
        if (ready > 0)
            return 0;
        if (ready < 0 && errno != EINTR)
            return errno;
    }
}

/* With a full accept queue a Unix socket says EAGAIN and is not connecting: there is nothing to wait for. */
static int connect_until(int fd, uint64_t deadline) {
    for (uint64_t pause = first_pause_ns;;) {
        if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0)
            return 0;
        if (errno != EAGAIN && errno != EINTR)
            return errno;
        uint64_t now = vg_now();
        if (now >= deadline)
            return ETIMEDOUT;
        vg_pause_ns(pause < deadline - now ? pause : deadline - now);
        pause = pause * 2 < longest_pause_ns ? pause * 2 : longest_pause_ns;
    }
}

static int peer_is_root(int fd) {
    struct ucred peer = {.uid = (uid_t)-1};
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return errno == ENOPROTOOPT || errno == EOPNOTSUPP ? ENOTSUP : errno;
    return length == sizeof peer && peer.uid == 0 ? 0 : EPERM;
}

static int closed_early(int error) {
    return error == EPIPE ? ECONNRESET : error;
}

static int send_request(int fd, uint64_t deadline) {
    for (size_t sent = 0; sent < sizeof vg_broker_request;) {
        ssize_t done =
            send(fd, vg_broker_request + sent, sizeof vg_broker_request - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (done > 0) {
            sent += (size_t)done;
        } else if (done < 0 && errno == EAGAIN) {
            int error = wait_for(fd, POLLOUT, deadline);
            if (error != 0)
                return error;
        } else if (done == 0 || errno != EINTR) {
            return done == 0 ? ECONNRESET : closed_early(errno);
        } else if (vg_now() >= deadline) {
            return ETIMEDOUT;
        }
    }
    return 0;
}

/* One byte more is asked for than an answer has, so that a longer one is noticed. */
static int receive_answer(int fd, uint64_t deadline, unsigned char answer[VG_BROKER_ANSWER_LENGTH + 1]) {
    size_t got = 0;
    while (got < VG_BROKER_ANSWER_LENGTH) {
        int error = wait_for(fd, POLLIN, deadline);
        if (error != 0)
            return error;
        ssize_t part = recv(fd, answer + got, VG_BROKER_ANSWER_LENGTH + 1 - got, MSG_DONTWAIT);
        if (part == 0)
            return ECONNRESET;
        if (part > 0)
            got += (size_t)part;
        else if (errno != EINTR && errno != EAGAIN)
            return closed_early(errno);
    }
    return got == VG_BROKER_ANSWER_LENGTH ? 0 : EPROTO;
}

/* The trust checks run again after the connection: a neighbour may have taken the mount away meanwhile and
 * put a socket of its own there, but it cannot bring the mount back. */
static int exchange(int fd, uint64_t deadline, int32_t *pid) {
    unsigned char answer[VG_BROKER_ANSWER_LENGTH + 1];
    int error = connect_until(fd, deadline);
    if (error == 0)
        error = peer_is_root(fd);
    if (error == 0)
        error = distrust();
    if (error == 0)
        error = send_request(fd, deadline);
    if (error == 0)
        error = receive_answer(fd, deadline, answer);
    return error != 0 ? error : vg_broker_read_answer(answer, pid);
}

/* A child of a fork in between would keep the connection. */
static int open_tracked(void) {
    vg_forks_hold();
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int error = errno;
    atomic_store(&open_socket, fd + 1);
    vg_forks_allow();
    errno = error;
    return fd;
}

static void close_tracked(int fd) {
    vg_forks_hold();
    atomic_store(&open_socket, 0);
    close(fd);
    vg_forks_allow();
}

int vg_broker_ask(int32_t *pid) {
    if (pid == NULL)
        return EINVAL;
    uint64_t deadline = vg_now() + limit_ns;
    int cancel, error;
    *pid = 0;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    error = distrust();
    if (error == 0) {
        int fd = open_tracked();
        error = fd >= 0 ? exchange(fd, deadline, pid) : errno;
        if (fd >= 0)
            close_tracked(fd);
    }
    pthread_setcancelstate(cancel, NULL);
    return error;
}

const char *vg_broker_reason(int error) {
    switch (error) {
    case ENOENT:
        return "there is no socket";
    case ECONNREFUSED:
        return "nobody listens";
    case ENOTSOCK:
        return "a symbolic link or another kind of file is in its place";
    case EPERM:
        return "owner, mode, mount or peer are not the node's";
    case EPROTO:
        return "the answer is not one of protocol 1";
    case ERANGE:
        return "the answer holds no PID";
    case ECONNRESET:
        return "it closed the connection";
    case ETIMEDOUT:
        return "it did not answer in time";
    case EACCES:
        return "access is denied";
    default:
        return "a system call failed";
    }
}

void vg_broker_after_fork_child(void) {
    int fd = atomic_exchange(&open_socket, 0) - 1;
    if (fd >= 0)
        close(fd);
}
