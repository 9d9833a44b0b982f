/* The text of a limits file: no content may crash, and every number of the configuration stays in its range.
 */
#include "config.h"
#include "fuzz.h"
#include "log.h"

#include <string.h>

#define TEN(text)     text text text text text text text text text text
#define HUNDRED(text) TEN(TEN(text))
#define SEED(text)    {text, sizeof text - 1}

const struct fuzz_seed fuzz_seeds[] = {
    SEED("# a comment\r\n\r\n CUDA_DEVICE_MEMORY_LIMIT = 2g "
         "\nCUDA_DEVICE_MEMORY_LIMIT_1=512m\n=x\nnonsense\n"),
    SEED("CUDA_DEVICE_SM_LIMIT=40\nCUDA_DEVICE_SM_LIMIT_0=0\nCUDA_DEVICE_SM_LIMIT_15=101\n"),
    SEED("HAMI_DEVICE_UUIDS=GPU-00000000-0000-0000-0000-00000000000b,MIG-1\nCUDA_DEVICE_MEMORY_LIMIT_0=1g\n"),
    SEED("NVIDIA_VISIBLE_DEVICES= GPU-00000000-0000-0000-0000-00000000000a , x,\nHAMI_DEVICE_UUIDS=,,\n"),
    SEED("CUDA_TASK_PRIORITY=0\nGPU_CORE_UTILIZATION_POLICY=FORCE\nRECORD_KERNEL_INTERVAL=61\n"),
    SEED("VGPU_FAILURE_POLICY=deny\nVGPU_NVML_PROCESSES=host\nLIBCUDA_LOG_LEVEL=4\nHAMI_LIMITS_FORMAT=2\n"),
    SEED("HAMI_DEVICE_UUIDS=MIG-" HUNDRED("x") ",MIG-" TEN("y") "\n"),
    SEED("HAMI_DEVICE_UUIDS=" TEN("MIG-a,MIG-b,") "\n"),
    SEED("VGPU_LOG_FILE=" HUNDRED("/a") "\n" HUNDRED("A=\n") HUNDRED("B=\n") HUNDRED("C=\n")),
    SEED("CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/a.cache\nVGPU_LOG_FILE=/x\n\n\n=\n==\n"),
};
const size_t fuzz_seed_count = sizeof fuzz_seeds / sizeof fuzz_seeds[0];

static bool terminated(const char *text, size_t length) {
    return memchr(text, '\0', length) != NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct vg_config config; /* too large for a stack */
    struct vg_pairs pairs;
    if (size > VG_LIMITS_FILE_LENGTH)
        return 0;
    char *text = malloc(size + 1);
    FUZZ_CHECK(text != NULL);
    if (size > 0)
        memcpy(text, data, size);
    text[size] = '\0';
    vg_log_configure(VG_LOG_SILENT, NULL);
    vg_pairs_parse(&pairs, text);
    FUZZ_CHECK(pairs.count <= sizeof pairs.pairs / sizeof pairs.pairs[0]);
    for (unsigned i = 0; i < pairs.count; i++) {
        FUZZ_CHECK(pairs.pairs[i].key >= text && pairs.pairs[i].key <= text + size);
        FUZZ_CHECK(pairs.pairs[i].value >= text && pairs.pairs[i].value <= text + size);
    }
    vg_config_build(&config, vg_pairs_get, &pairs);
    FUZZ_CHECK(config.log_level >= 0 && config.log_level <= 4);
    FUZZ_CHECK(config.priority == 0 || config.priority == 1);
    FUZZ_CHECK(config.record_interval >= 1 && config.record_interval <= 60);
    FUZZ_CHECK(config.uuid_count <= VG_CONFIG_DEVICES);
    FUZZ_CHECK(terminated(config.cache_path, sizeof config.cache_path) && config.cache_path[0] != '\0');
    FUZZ_CHECK(terminated(config.log_file, sizeof config.log_file));
    for (unsigned i = 0; i < VG_CONFIG_DEVICES; i++) {
        FUZZ_CHECK(terminated(config.uuids[i], VG_UUID_TEXT));
        FUZZ_CHECK(vg_config_sm(&config, config.uuids[i], (int)i) <= 1000000);
        vg_config_memory(&config, config.uuids[i], (int)i);
    }
    free(text);
    return 0;
}
