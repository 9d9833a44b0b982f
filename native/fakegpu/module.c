#include "module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MODULE_MAGIC = 0x4D4F4431 };

struct fg_module {
    uint32_t magic;
    struct fg_context *context;
    uint64_t bytes;
    struct fg_function *functions;
    struct fg_module *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fg_module *all;

static CUresult load(CUmodule *handle, const void *image) {
    struct fg_context *context;
    CUresult result = fg_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || !image)
        return CUDA_ERROR_INVALID_VALUE;
    int64_t bytes = (int64_t)fg.shared->module_bytes;
    if (fg_account(context->card, FG_MODULE, bytes, bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct fg_module *module = calloc(1, sizeof *module);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *module = (struct fg_module){.magic = MODULE_MAGIC, .context = context, .bytes = (uint64_t)bytes};
    pthread_mutex_lock(&lock);
    module->next = all;
    all = module;
    pthread_mutex_unlock(&lock);
    *handle = module;
    return CUDA_SUCCESS;
}

/* Under the lock: take the module out of the list and give back what it held. */
static void discard(struct fg_module *module) {
    for (struct fg_module **link = &all; *link; link = &(*link)->next)
        if (*link == module) {
            *link = module->next;
            break;
        }
    module->magic = 0;
    fg_account(module->context->card, FG_MODULE, -(int64_t)module->bytes, -(int64_t)module->bytes);
    for (struct fg_function *f = module->functions, *next; f; f = next) {
        next = f->next;
        f->magic = 0;
        free(f);
    }
    free(module);
}

void fg_modules_drop_context(struct fg_context *context) {
    pthread_mutex_lock(&lock);
    for (struct fg_module *module = all, *next; module; module = next) {
        next = module->next;
        if (module->context == context)
            discard(module);
    }
    pthread_mutex_unlock(&lock);
}

void fg_modules_forget(void) {
    pthread_mutex_init(&lock, NULL);
    all = NULL;
}

static CUresult unload(CUmodule module) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!module || module->magic != MODULE_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    fg_engine_wait(module->context->card, fg_engine_mark(module->context->card));
    pthread_mutex_lock(&lock);
    discard(module);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

FG_FUNCTION(cuModuleLoad, (CUmodule * module, const char *path), {
    if (!path)
        return CUDA_ERROR_INVALID_VALUE;
    return access(path, R_OK) == 0 ? load(module, path) : CUDA_ERROR_FILE_NOT_FOUND;
})
FG_FUNCTION(cuModuleLoadData, (CUmodule * module, const void *image), { return load(module, image); })
FG_FUNCTION(cuModuleLoadDataEx,
            (CUmodule * module, const void *image, unsigned count, int *options, void **values), {
                (void)count, (void)options, (void)values;
                return load(module, image);
            })
FG_FUNCTION(cuModuleLoadFatBinary, (CUmodule * module, const void *image), { return load(module, image); })
FG_FUNCTION(cuModuleUnload, (CUmodule module), { return unload(module); })
FG_FUNCTION(cuModuleGetLoadingMode, (int *mode), {
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = 1; /* eager */
    return CUDA_SUCCESS;
})

static void read_cost(struct fg_function *function) {
    static const struct {
        const char *prefix;
        uint64_t unit;
        enum fg_cost_rule rule;
    } forms[] = {
        {"spin_ns_", 1, FG_COST_FIXED},
        {"spin_us_", 1000, FG_COST_FIXED},
        {"spin_ms_", 1000000, FG_COST_FIXED},
        {"spin_block_ns_", 1, FG_COST_PER_BLOCK},
    };
    function->cost_ns = fg.shared->kernel_ns;
    if (strncmp(function->name, "spin_argument", 13) == 0)
        function->rule = FG_COST_ARGUMENT;
    if (strncmp(function->name, "wait_for_next", 13) == 0)
        function->cost_ns = FG_UNTIL_NEXT;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        size_t n = strlen(forms[i].prefix);
        if (strncmp(function->name, forms[i].prefix, n) != 0)
            continue;
        function->rule = forms[i].rule;
        function->cost_ns = strtoull(function->name + n, NULL, 10) % 100000000000ull * forms[i].unit;
    }
}

static CUresult get_function(CUfunction *handle, CUmodule module, const char *name) {
    if (!fg_driver.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!handle || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!module || module->magic != MODULE_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!*name || strncmp(name, "missing", 7) == 0)
        return CUDA_ERROR_NOT_FOUND;
    pthread_mutex_lock(&lock);
    struct fg_function *function = module->functions;
    while (function && strcmp(function->name, name) != 0)
        function = function->next;
    if (!function && (function = calloc(1, sizeof *function + strlen(name) + 1)) != NULL) {
        strcpy(function->name, name);
        function->magic = FG_FUNCTION_MAGIC;
        function->block_threads = 1;
        function->module = module;
        function->next = module->functions;
        read_cost(function);
        module->functions = function;
    }
    pthread_mutex_unlock(&lock);
    *handle = function;
    return function ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

FG_FUNCTION(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name),
            { return get_function(function, module, name); })
FG_FUNCTION(cuModuleGetGlobal_v2, (CUdeviceptr * pointer, size_t *size, CUmodule module, const char *name), {
    (void)pointer, (void)size, (void)module, (void)name;
    return CUDA_ERROR_NOT_FOUND;
})

/* Libraries are modules that any context may use; here one that was loaded in the current context. */
FG_FUNCTION(cuLibraryLoadData,
            (CUlibrary * library, const void *image, int *options, void **values, unsigned count,
             int *library_options, void **library_values, unsigned library_count),
            {
                (void)options, (void)values, (void)count, (void)library_options, (void)library_values,
                    (void)library_count;
                return load((CUmodule *)library, image);
            })
FG_FUNCTION(cuLibraryUnload, (CUlibrary library), { return unload(library); })
FG_FUNCTION(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name),
            { return get_function((CUfunction *)kernel, library, name); })
FG_FUNCTION(cuLibraryGetModule, (CUmodule * module, CUlibrary library), {
    if (!module)
        return CUDA_ERROR_INVALID_VALUE;
    *module = library;
    return library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
})
FG_FUNCTION(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), {
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    *function = kernel;
    return kernel ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
})

FG_FUNCTION(cuFuncGetModule, (CUmodule * module, CUfunction function), {
    if (!module || !function || function->magic != FG_FUNCTION_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    *module = function->module;
    return CUDA_SUCCESS;
})
FG_FUNCTION(cuFuncGetName, (const char **name, CUfunction function), {
    if (!name || !function || function->magic != FG_FUNCTION_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    *name = function->name;
    return CUDA_SUCCESS;
})
FG_FUNCTION(cuFuncGetAttribute, (int *value, int number, CUfunction function), {
    if (!function || function->magic != FG_FUNCTION_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!value || number < 0 || number > 15)
        return CUDA_ERROR_INVALID_VALUE;
    *value = number == 0 ? 1024 : number == 4 ? 16 : 0; /* threads a block, registers a thread */
    return CUDA_SUCCESS;
})
FG_FUNCTION(cuFuncSetAttribute, (CUfunction function, int number, int value), {
    (void)number, (void)value;
    return function && function->magic == FG_FUNCTION_MAGIC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
})
FG_FUNCTION(cuFuncSetCacheConfig, (CUfunction function, int value), {
    (void)value;
    return function && function->magic == FG_FUNCTION_MAGIC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
})
