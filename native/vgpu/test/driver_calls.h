/* The driver's functions that the programs here call; they are linked to the simulated driver. */
#ifndef VGPU_TEST_DRIVER_CALLS_H
#define VGPU_TEST_DRIVER_CALLS_H

#include <stddef.h>
#include <stdint.h>

extern int cuArrayCreate_v2(void **, const void *);
extern int cuArrayDestroy(void *);
extern int cuCtxSetCurrent(void *);
extern int cuCtxSynchronize(void);
extern int cuDevicePrimaryCtxRelease_v2(int);
extern int cuDevicePrimaryCtxReset_v2(int);
extern int cuDevicePrimaryCtxRetain(void **, int);
extern int cuDeviceTotalMem_v2(size_t *, int);
extern int cuGetProcAddress(const char *, void **, int, uint64_t);
extern int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
extern int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
extern int cuGraphLaunch(void *, void *);
extern int cuInit(unsigned);
extern int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          void *, void **, void **);
extern int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, uint64_t);
extern int cuMemAllocAsync(uint64_t *, size_t, void *);
extern int cuMemAllocManaged(uint64_t *, size_t, unsigned);
extern int cuMemAllocPitch_v2(uint64_t *, size_t *, size_t, size_t, unsigned);
extern int cuMemAlloc_v2(uint64_t *, size_t);
extern int cuMemCreate(uint64_t *, size_t, const void *, uint64_t);
extern int cuMemExportToShareableHandle(void *, uint64_t, int, uint64_t);
extern int cuMemFreeAsync(uint64_t, void *);
extern int cuMemFree_v2(uint64_t);
extern int cuMemGetInfo_v2(size_t *, size_t *);
extern int cuMemImportFromShareableHandle(uint64_t *, void *, int);
extern int cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
extern int cuMemRelease(uint64_t);
extern int cuMemUnmap(uint64_t, size_t);
extern int cuModuleGetFunction(void **, void *, const char *);
extern int cuModuleLoadData(void **, const void *);
extern int cuStreamBeginCapture_v2(void *, int);
extern int cuStreamCreate(void **, unsigned);
extern int cuStreamEndCapture(void *, void **);

#endif
