/* Many processes that take slots of one region: "vgpu_crowd REGION together|replaced N". together: N children
 * claim at the same signal and stay; replaced: one after another claims and is killed. Prints how many
 * different slots there were and how many places the region has in use. */
#define _GNU_SOURCE
#include "region.h"
#include "slots.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *path;
static struct vg_region_seed seed = {.device_count = 1, .uuids = {"GPU-x"}, .limits = {(uint64_t)16 << 20}};

static int claimed_slot(void) {
    static struct vg_space space;
    enum vg_region_result result = vg_region_open(&space, path, &seed);
    if (result != VG_REGION_CREATED && result != VG_REGION_JOINED)
        return -2;
    vg_slot_claim(&space);
    return space.slot;
}

/* The child goes on when the other end of the pipe `go` is closed. */
static pid_t start(const int *go, int answer) {
    pid_t child = fork();
    if (child != 0)
        return child;
    char byte;
    close(go[1]); /* in `replaced` it is closed already */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (read(go[0], &byte, 1) != 0)
        _exit(1);
    int slot = claimed_slot();
    if (write(answer, &slot, sizeof slot) == sizeof slot)
        pause();
    _exit(1);
}

static int end(pid_t child) {
    kill(child, SIGKILL);
    return waitpid(child, NULL, 0) == child;
}

int main(int argc, char **argv) {
    static char seen[VG_MAX_SLOTS];
    static pid_t children[VG_MAX_SLOTS];
    int go[2], answer[2], different = 0, count = argc == 4 ? atoi(argv[3]) : 0;
    int together = argc == 4 && strcmp(argv[2], "together") == 0;
    if (count < 1 || (together && count > VG_MAX_SLOTS) || pipe(go) != 0 || pipe(answer) != 0)
        return 2;
    path = argv[1];
    alarm(100); /* nothing here waits for long; children end with their parent */
    if (!together)
        close(go[1]);
    for (int i = 0, slot; i < count; i++) {
        pid_t child = start(go, answer[1]);
        if (together)
            children[i] = child;
        else if (read(answer[0], &slot, sizeof slot) != sizeof slot || slot < 0 || !end(child))
            return 1;
    }
    if (together)
        close(go[1]);
    for (int i = 0, slot; together && i < count; i++) {
        if (read(answer[0], &slot, sizeof slot) != sizeof slot || slot < 0 || slot >= VG_MAX_SLOTS)
            return 1;
        different += !seen[slot];
        seen[slot] = 1;
    }
    struct vg_space space;
    if (vg_region_open(&space, path, &seed) != VG_REGION_JOINED)
        return 1;
    printf("%d %u\n", different, vg_region_slots(space.region));
    for (int i = 0; together && i < count; i++)
        end(children[i]);
    return 0;
}
