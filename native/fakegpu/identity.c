#include "identity.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

uint64_t fg_pid_namespace(const char *state_path) {
    struct stat info;
    uint64_t fallback =
        stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : FG_INITIAL_PID_NAMESPACE;
    return fg_config_number(state_path, "FAKEGPU_PID_NAMESPACE", 1, UINT64_MAX, fallback);
}

uint32_t fg_container_index(struct fg_shared *shared, const char *name) {
    for (uint32_t i = 0; i < shared->container_count; i++)
        if (strcmp(shared->containers[i].name, name) == 0)
            return i;
    if (shared->container_count == FG_MAX_CONTAINERS)
        return FG_MAX_CONTAINERS - 1; /* the rest share the last line */
    snprintf(shared->containers[shared->container_count].name, sizeof shared->containers[0].name, "%s", name);
    return shared->container_count++;
}

static void read_command(char *text, size_t size) {
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0; /* the first word: cmdline separates by NUL */
}

void fg_identify(const char *state_path, struct fg_slot *slot, char *container, size_t length) {
    slot->pid = (int32_t)getpid();
    slot->host_pid =
        slot->pid + (int32_t)fg_config_number(state_path, "FAKEGPU_PID_OFFSET", 0, 1000000000, 0);
    slot->pid_namespace = fg_pid_namespace(state_path);
    read_command(slot->command, sizeof slot->command);
    if (!fg_config_get(state_path, "FAKEGPU_CONTAINER", container, length))
        snprintf(container, length, "pid-namespace-%llu", (unsigned long long)slot->pid_namespace);
}

/* A socket address has 108 bytes; through the directory's descriptor a path of any length fits. */
static int connect_to(const char *state_path) {
    int directory = open(state_path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/" FG_DAEMON_SOCKET, directory);
    int failed = directory < 0 || fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0;
    if (directory >= 0)
        close(directory);
    if (failed && fd >= 0)
        close(fd);
    return failed ? -1 : fd;
}

void fg_ask_daemon(const char *state_path, struct fg_slot *slot, int *connection) {
    int fd = connect_to(state_path);
    if (fd < 0)
        return;
    struct fg_daemon_message message = {.magic = "FGPU", .number = fg.slot};
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    if (send(fd, &message, sizeof message, MSG_NOSIGNAL) == sizeof message && poll(&ready, 1, 2000) == 1 &&
        recv(fd, &message, sizeof message, MSG_WAITALL) == sizeof message &&
        memcmp(message.magic, "FGPU", 4) == 0 && message.number > 0) {
        slot->host_pid = (int32_t)message.number;
        slot->has_daemon = 1;
        *connection = fd;
        return;
    }
    close(fd);
}
