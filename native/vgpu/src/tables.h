/* The generated look-up tables. */
#ifndef VGPU_TABLES_H
#define VGPU_TABLES_H

struct vg_export {
    const char *name;
    int target;
    void *hook;
};

struct vg_version {
    const char *base;
    int version;
    int per_thread;
    int target;
    void *hook;
};

extern const char *const vg_target_names[];
extern const struct vg_export vg_exports[];
extern const struct vg_version vg_versions[];
extern const unsigned vg_version_count;

#endif
