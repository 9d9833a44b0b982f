/*
 * fakegpud: the host side of a state path.
 *   serve                 tell clients their host PID (SO_PEERCRED), give back at once what dead ones held
 *   stat                  one JSON object: cards, processes, containers with their engine time
 *   xid CARD CODE [GI CI] raise an XID event, of a MIG instance
 *   set CARD KEY VALUE    temperature_c, lost (0/1), extra_util (percent), mig_needs_reset (0/1), mig_pending
 * (0/1)
 */
#include "engine.h"
#include "identity.h"
#include "setup.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CLIENTS = FG_MAX_SLOTS };

static volatile sig_atomic_t stopping;

static void handle_stop(int signal_number) {
    (void)signal_number;
    stopping = 1;
}

static int usage(void) {
    fprintf(stderr, "usage: fakegpud serve | stat | xid CARD CODE [GI CI] | set CARD KEY VALUE\n"
                    "KEY: temperature_c, lost, extra_util, mig_needs_reset, mig_pending\n"
                    "The state path is FAKEGPU_STATE (default /dev/fakegpu, else /tmp/fakegpu-<uid>).\n");
    return 2;
}

/* --- serve --- */

static int listen_here(void) {
    int directory = open(fg.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/" FG_DAEMON_SOCKET, directory);
    if (directory < 0 || fd < 0)
        return -1;
    unlink(address.sun_path);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 1024) != 0)
        return -1;
    chmod(address.sun_path, 0666);
    close(directory);
    return fd;
}

/* Answer one client's question; 0 if it is to be dropped. */
static int answer(int fd) {
    struct fg_daemon_message message;
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    if (recv(fd, &message, sizeof message, MSG_DONTWAIT) != sizeof message ||
        memcmp(message.magic, "FGPU", 4) != 0)
        return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return 0;
    message.number = (uint32_t)peer.pid;
    return send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof message;
}

static int serve(void) {
    static struct pollfd watched[MAX_CLIENTS + 1];
    int count = 1, listener = listen_here();
    if (listener < 0) {
        fprintf(stderr, "fakegpud: cannot listen in %s: %s\n", fg.path, strerror(errno));
        return 1;
    }
    watched[0] = (struct pollfd){.fd = listener, .events = POLLIN};
    printf("{\"state\": \"%s\", \"pid\": %d, \"ready\": true}\n", fg.path, (int)getpid());
    fflush(stdout);
    while (!stopping) {
        if (poll(watched, (nfds_t)count, 1000) < 0 && errno != EINTR)
            return 1;
        int gone = 0;
        for (int i = count - 1; i > 0; i--)
            if (watched[i].revents &&
                ((watched[i].revents & (POLLHUP | POLLERR)) || !answer(watched[i].fd))) {
                close(watched[i].fd);
                watched[i] = watched[--count];
                gone = 1;
            }
        if (gone)
            fg_sweep();
        int client = watched[0].revents & POLLIN ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (client >= 0 && count <= MAX_CLIENTS)
            watched[count++] = (struct pollfd){.fd = client, .events = POLLIN};
        else if (client >= 0)
            close(client);
    }
    char path[4200];
    snprintf(path, sizeof path, "%s/" FG_DAEMON_SOCKET, fg.path);
    unlink(path);
    return 0;
}

/* --- stat --- */

static void print_text(const char *text) {
    putchar('"');
    for (; *text; text++)
        if (*text == '"' || *text == '\\' || (unsigned char)*text < 0x20)
            printf("\\u%04x", (unsigned char)*text);
        else
            putchar(*text);
    putchar('"');
}

static uint64_t sum(const uint64_t *values) {
    return values[FG_DATA] + values[FG_POOL] + values[FG_CONTEXT] + values[FG_MODULE];
}

static void print_card(uint32_t index) {
    struct fg_device *card = &fg.shared->devices[index];
    fg_lock_device(card);
    fg_engine_advance(card, fg_now());
    printf("%s{\"card\": %u, \"uuid\": \"%s\", \"name\": ", index ? ", " : "", index, card->uuid);
    print_text(card->name);
    printf(", \"total_bytes\": %llu, \"reserved_bytes\": %llu, \"used_bytes\": %llu, \"busy_ns\": %llu, "
           "\"now_ns\": %llu}",
           (unsigned long long)card->total_bytes, (unsigned long long)card->reserved_bytes,
           (unsigned long long)card->used_bytes, (unsigned long long)card->busy_ns,
           (unsigned long long)card->now_ns);
    fg_unlock_device(card);
}

static void print_account(const struct fg_account *account, uint32_t card, int first) {
    const struct fg_channel *channel =
        account->channel ? &fg.shared->channels[account->channel - 1] : &(const struct fg_channel){0};
    printf("%s{\"card\": %u, \"contexts\": %u, \"physical_bytes\": %llu, \"unit_bytes\": %llu, "
           "\"data_bytes\": %llu, \"pool_bytes\": %llu, "
           "\"context_bytes\": %llu, \"module_bytes\": %llu, \"engine_ns\": %llu, \"queued\": %llu, "
           "\"most_queued\": %llu}",
           first ? "" : ", ", card, account->contexts, (unsigned long long)sum(account->physical),
           (unsigned long long)sum(account->units), (unsigned long long)account->units[FG_DATA],
           (unsigned long long)account->units[FG_POOL], (unsigned long long)account->units[FG_CONTEXT],
           (unsigned long long)account->units[FG_MODULE], (unsigned long long)account->engine_ns,
           (unsigned long long)(channel->tail - channel->head), (unsigned long long)channel->most_queued);
}

static void print_process(const struct fg_slot *slot, int first) {
    printf("%s{\"pid\": %d, \"host_pid\": %d, \"pid_namespace\": %llu, \"from_daemon\": %s, \"container\": ",
           first ? "" : ", ", slot->pid, slot->host_pid, (unsigned long long)slot->pid_namespace,
           slot->has_daemon ? "true" : "false");
    print_text(fg.shared->containers[slot->container].name);
    printf(", \"command\": ");
    print_text(slot->command);
    printf(", \"on\": [");
    int none = 1;
    for (uint32_t d = 0; d < fg.shared->device_count; d++) {
        const struct fg_account *account = &slot->on[d];
        if (account->contexts == 0 && sum(account->physical) == 0 && sum(account->units) == 0 &&
            account->engine_ns == 0)
            continue;
        print_account(account, d, none);
        none = 0;
    }
    printf("]}");
}

static int print_state(void) {
    fg_sweep();
    printf("{\"cuda_version\": %u, \"pid_convention\": \"%s\", \"cards\": [", fg.shared->driver_version,
           fg.shared->pid_convention == FG_PIDS_HOST ? "host" : "namespace");
    for (uint32_t d = 0; d < fg.shared->device_count; d++)
        print_card(d);
    printf("], \"processes\": [");
    int first = 1;
    fg_lock_slots();
    for (uint32_t i = 0; i < fg.shared->slot_high; i++)
        if (fg.shared->slot_used[i]) {
            print_process(&fg.shared->slots[i], first);
            first = 0;
        }
    printf("], \"containers\": [");
    for (uint32_t c = 0; c < fg.shared->container_count; c++) {
        printf("%s{\"name\": ", c ? ", " : "");
        print_text(fg.shared->containers[c].name);
        printf(", \"engine_ns\": [");
        for (uint32_t d = 0; d < fg.shared->device_count; d++)
            printf("%s%llu", d ? ", " : "", (unsigned long long)fg.shared->containers[c].engine_ns[d]);
        printf("]}");
    }
    fg_unlock_slots();
    printf("]}\n");
    return 0;
}

/* --- xid, set --- */

/* The card of an argument; NULL after saying what is wrong. */
static struct fg_device *card_argument(const char *text) {
    char *end;
    unsigned long index = strtoul(text, &end, 10);
    if (*text && !*end && index < fg.shared->device_count)
        return &fg.shared->devices[index];
    fprintf(stderr, "fakegpud: there is no card %s; this state has %u, counted from 0\n", text,
            fg.shared->device_count);
    return NULL;
}

static uint32_t instance(const char *text) {
    return text ? (uint32_t)strtoul(text, NULL, 10) : ~0u;
}

static int raise_xid(struct fg_device *card, const char *code, const char *gpu, const char *compute) {
    fg_lock_device(card);
    card->xids[card->xid_count % FG_XIDS] = (struct fg_xid){.type = 8,
                                                            .data = strtoull(code, NULL, 10),
                                                            .gpu_instance = instance(gpu),
                                                            .compute_instance = instance(compute)};
    __atomic_fetch_add(&card->xid_count, 1, __ATOMIC_RELEASE);
    fg_unlock_device(card);
    return 0;
}

static int set(struct fg_device *card, const char *key, const char *value) {
    uint32_t number = (uint32_t)strtoul(value, NULL, 10);
    if (strcmp(key, "temperature_c") == 0)
        card->temperature_c = number;
    else if (strcmp(key, "lost") == 0)
        card->lost = number != 0;
    else if (strcmp(key, "extra_util") == 0)
        card->extra_util = number > 100 ? 100 : number;
    else if (strcmp(key, "mig_needs_reset") == 0)
        card->mig_needs_reset = number != 0;
    else if (strcmp(key, "mig_pending") == 0)
        card->mig_pending = number != 0;
    else
        return usage();
    return 0;
}

int main(int argc, char **argv) {
    const char *command = argc > 1 ? argv[1] : "serve";
    struct sigaction stop = {.sa_handler = handle_stop};
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGINT, &stop, NULL);
    if (fg_open() != 0)
        return 1;
    if (strcmp(command, "serve") == 0 && argc <= 2)
        return serve();
    if (strcmp(command, "stat") == 0 && argc == 2)
        return print_state();
    int xid = strcmp(command, "xid") == 0 && (argc == 4 || argc == 6);
    if (!xid && !(strcmp(command, "set") == 0 && argc == 5))
        return usage();
    struct fg_device *card = card_argument(argv[2]);
    if (!card)
        return 2;
    return xid ? raise_xid(card, argv[3], argc == 6 ? argv[4] : NULL, argc == 6 ? argv[5] : NULL)
               : set(card, argv[3], argv[4]);
}
