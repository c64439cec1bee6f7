/* NVIDIA's management library, as far as it is asked for here, for machines without a GPU.
 *
 * NVML_STUB_GPUS   how many GPUs there are
 * NVML_STUB_LOST   the number of one that has fallen off the bus
 * NVML_STUB_DENIED the number of one that another container has
 * NVML_STUB_PARTS  in how many MIG instances number 0 is cut; of one more that is possible there is none
 * NVML_STUB_INIT   what nvmlInit_v2 returns
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int of(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

/* A GPU's handle is its number + 1, that of a part of it 1000 more for each. */
static int gpu(void *device) { return (int)(((intptr_t)device - 1) % 1000); }
static int part(void *device) { return (int)(((intptr_t)device - 1) / 1000); }

int nvmlInit_v2(void) { return of("NVML_STUB_INIT", 0); }
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
