/* One leader per container keeps the once-a-second word, clears the slots of the dead and samples NVML. */
#ifndef VGPU_WATCH_H
#define VGPU_WATCH_H

/* Looks at the coarse clock: if nobody has kept the word for three seconds, tries to become the leader. */
void vg_watch_look(void);

#endif
