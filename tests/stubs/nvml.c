/* NVIDIA's management library, as far as it is asked for here, for machines without a GPU.
 *
 * NVML_STUB_GPUS   how many GPUs there are
 * NVML_STUB_LOST   the number of one that has fallen off the bus
 * NVML_STUB_DENIED the number of one that another container has
 * NVML_STUB_PARTS  in how many MIG instances number 0 is cut; of one more that is possible there is none
 * NVML_STUB_INIT   what nvmlInit_v2 returns
 *
 * GPU number n is n + 40 % busy, at 1000 + 100 n MHz, and held back by its power limit if n is 1.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int of(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

/* A GPU's handle is its number + 1, that of a part of it 1000 more for each. */
static int gpu(void *device) { return (int)(((intptr_t)device - 1) % 1000); }
static int part(void *device) { return (int)(((intptr_t)device - 1) / 1000); }

int nvmlInit_v2(void) { return of("NVML_STUB_INIT", 0); }
int nvmlInitWithFlags(unsigned flags) { return flags ? 2 : nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }

const char *nvmlErrorString(int code) {
    return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "Unknown Error";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)of("NVML_STUB_GPUS", 0);
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index == of("NVML_STUB_LOST", -1)) return 15;
    if ((int)index == of("NVML_STUB_DENIED", -1)) return 4;
    *device = (void *)(intptr_t)(index + 1);
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    if (part(device)) snprintf(text, size, "MIG-%d%d", gpu(device), part(device) - 1);
    else snprintf(text, size, "GPU-%d%d%d%d", gpu(device), gpu(device), gpu(device), gpu(device));
    return 0;
}

int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, "NVIDIA Stub %d", gpu(device));
    return 0;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    int parts = of("NVML_STUB_PARTS", -1);
    if (parts < 0) return 3; /* not supported */
    *current = *pending = gpu(device) == 0 && parts > 0;
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    *count = (unsigned)of("NVML_STUB_PARTS", 0) + 1;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    if ((int)index >= of("NVML_STUB_PARTS", 0)) return 6; /* not found */
    *part = (void *)((intptr_t)device + 1000 * ((intptr_t)index + 1));
    return 0;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.1");
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int gpu, count = of("NVML_STUB_GPUS", 0);
    char known[32];
    for (gpu = 0; gpu < count; gpu++) {
        snprintf(known, sizeof known, "GPU-%d%d%d%d", gpu, gpu, gpu, gpu);
        if (!strcmp(known, uuid)) {
            *device = (void *)(intptr_t)(gpu + 1);
            return 0;
        }
    }
    return 6; /* not found */
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    if (of("NVML_STUB_PARTS", -1) > 0) return 3; /* not supported: of a GPU that is cut */
    rates[0] = (unsigned)gpu(device) + 40;
    rates[1] = 5;
    return 0;
}

/* Types 1 and 2: multiprocessors, memory. */
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) {
    *mhz = type == 2 ? 3201 : 1000 + 100 * (unsigned)gpu(device);
    return 0;
}

int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *mhz) {
    (void)device;
    *mhz = type == 2 ? 3201 : 1980;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 350000 + 1000 * (unsigned)gpu(device);
    return 0;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = 700000;
    return 0;
}

/* A driver before 535: it has only the older of the two names. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    *bits = gpu(device) == 1 ? 0x4 : 0x1;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 80ull << 30;
    memory[2] = (unsigned long long)(gpu(device) + 1) << 30;
    memory[1] = memory[0] - memory[2];
    return 0;
}
