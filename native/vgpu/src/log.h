/* Lines on standard error, for people. Default level 1: errors only; 0 is silent. */
#ifndef VGPU_LOG_H
#define VGPU_LOG_H

#include <stdatomic.h>
#include <stdint.h>

enum vg_log_level { VG_LOG_SILENT, VG_LOG_ERROR, VG_LOG_WARN, VG_LOG_INFO, VG_LOG_DEBUG };

/* At most 10 lines a second leave one call site. */
struct vg_log_site {
    _Atomic uint64_t second;
    _Atomic uint32_t lines;
    _Atomic uint32_t suppressed;
};

/* Takes the level and, unless NULL or empty, the file that lines are appended to. */
void vg_log_configure(int level, const char *file);

int vg_log_enabled(enum vg_log_level level);

__attribute__((format(printf, 3, 4))) void vg_log_line(struct vg_log_site *site, enum vg_log_level level,
                                                       const char *format, ...);

#define VG_LOG(level, ...)                                                                                   \
    do {                                                                                                     \
        static struct vg_log_site site_;                                                                     \
        if (vg_log_enabled(level))                                                                           \
            vg_log_line(&site_, level, __VA_ARGS__);                                                         \
    } while (0)

#define VG_ERROR(...) VG_LOG(VG_LOG_ERROR, __VA_ARGS__)
#define VG_WARN(...)  VG_LOG(VG_LOG_WARN, __VA_ARGS__)
#define VG_INFO(...)  VG_LOG(VG_LOG_INFO, __VA_ARGS__)

#endif
