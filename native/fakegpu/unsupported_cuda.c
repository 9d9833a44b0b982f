/* The rest of the driver's exported names: present, so that programs that look everything up at their start
 * run. */
#include "driver.h"

#define FG_UNSUPPORTED(name)                                                                                 \
    FG_FUNCTION(name, (void),                                                                                \
                { return fg_driver.initialized ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_NOT_INITIALIZED; })
#include "unsupported_cuda.inc"
