/* A driver library that answers like NVML of two cards, one of which spins: for machines without a card. */
#include <string.h>

typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { int index; } Device;

static Device devices[2] = {{0}, {1}};

int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *use) { use->gpu = 100; use->memory = 1; return 0; }
int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) {
    *milliwatts = device->index ? 650000 : 71000;
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned int *milliwatts) { *milliwatts = 700000; return 0; }
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    memset(memory, 0, sizeof *memory);
    memory->used = 3ULL << 30;
    return 0;
}
int nvmlDeviceGetClockInfo(Device *device, int type, unsigned int *mhz) { *mhz = 1980; return 0; }
int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned int *celsius) { return 3; /* not supported */ }
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    *reasons = device->index ? 0x44 : 0x1; /* power cap and heat; idle */
    return 0;
}
int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned int length) {
    strncpy(uuid, device->index ? "GPU-b0000000" : "GPU-a0000000", length);
    return 0;
}
