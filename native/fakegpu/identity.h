/* Who a process is: its PIDs, its PID namespace, its container's label. */
#ifndef FAKEGPU_IDENTITY_H
#define FAKEGPU_IDENTITY_H

#include "state.h"

#define FG_INITIAL_PID_NAMESPACE 4026531836ull
#define FG_DAEMON_SOCKET         "daemon.sock"

/* The daemon's answer: "FGPU", the PID of the peer as SO_PEERCRED names it. The client sends "FGPU", its
 * slot. */
struct fg_daemon_message {
    char magic[4];
    uint32_t number;
};

/* FAKEGPU_PID_NAMESPACE (a number), else the inode of /proc/self/ns/pid, else the initial namespace. */
uint64_t fg_pid_namespace(const char *state_path);
/* Fill PID, host PID (getpid() + FAKEGPU_PID_OFFSET until the daemon
 * answers), namespace, command; the container's name goes to `container`. */
void fg_identify(const char *state_path, struct fg_slot *slot, char *container, size_t length);
/* The number of the container with this name, a new one if need be. Under slots_lock. */
uint32_t fg_container_index(struct fg_shared *shared, const char *name);
/* Ask the daemon of the state path, if one runs, for the host PID; keeps the
 * connection in *fd. At most 2 s. */
void fg_ask_daemon(const char *state_path, struct fg_slot *slot, int *fd);

#endif
