/* The client of the host PID broker: asks the node for this process's PID in the initial namespace. The
 * kernel tells the broker who asks; the answer is believed only if the socket is provably the node's. */
#ifndef VGPU_BROKER_H
#define VGPU_BROKER_H

#include <stdint.h>

enum { VG_BROKER_REQUEST_LENGTH = 8, VG_BROKER_ANSWER_LENGTH = 12 };

extern const unsigned char vg_broker_request[VG_BROKER_REQUEST_LENGTH];

/* 0 and the PID of a good answer, EPROTO (not one of protocol 1, or refused), ERANGE (no PID). */
int vg_broker_read_answer(const unsigned char answer[VG_BROKER_ANSWER_LENGTH], int32_t *pid);

/* One try at the fixed place, 500 ms at most. 0 and the PID, or why not; `pid` is 0 then:
 *   ENOENT no socket; ECONNREFUSED nobody listens; ENOTSOCK another kind of object; EPERM owner, mode, mount
 * or peer are not the node's; EPROTO, ERANGE as above; ECONNRESET closed too early; ETIMEDOUT; EINVAL no
 * `pid`; another errno of a system call. No cancellation point; safe beside forks in other threads. */
int vg_broker_ask(int32_t *pid);

/* Text for people about an error of the above. */
const char *vg_broker_reason(int error);

/* In a forked child: closes what another thread had open when it was made. */
void vg_broker_after_fork_child(void);

#endif
