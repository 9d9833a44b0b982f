/* Another preload: asks 200 times for the next malloc and says whether the answer is always the same. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

extern void *malloc(unsigned long size);

__attribute__((constructor)) static void ask(void) {
    void *first = dlsym(RTLD_NEXT, "malloc");
    int same = first != NULL;
    for (int i = 0; i < 200; i++)
        same = same && dlsym(RTLD_NEXT, "malloc") == first;
    ssize_t written = same ? write(2, "next ok\n", 8) : write(2, "next differs\n", 13);
    (void)written;
}
