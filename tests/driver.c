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
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) { /* of a slice of the second card */
    *device = &devices[1];
    return strncmp(uuid, "MIG-", 4) ? 6 : 0; /* not found */
}
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *use) { use->gpu = 100; use->memory = 1; return 0; }
int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) {
    *milliwatts = device->index ? 650000 : 71000;
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned int *milliwatts) { *milliwatts = 700000; return 0; }
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    memset(memory, 0, sizeof *memory);
    memory->total = 80ULL << 30;
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
int nvmlDeviceGetName(Device *device, char *name, unsigned int length) {
    strncpy(name, "NVIDIA H100 80GB HBM3", length);
    return 0;
}
int nvmlDeviceGetPowerManagementDefaultLimit(Device *device, unsigned int *milliwatts) {
    *milliwatts = 700000;
    return 0;
}
int nvmlDeviceGetTemperatureThreshold(Device *device, int kind, unsigned int *celsius) {
    *celsius = kind == 1 ? 87 : 92; /* slowdown; shutdown */
    return 0;
}
int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int counter, unsigned long long *count) {
    *count = device->index && kind == 1 && counter == 0 ? 2 : 0; /* uncorrected, since the driver was loaded */
    return 0;
}
int nvmlDeviceGetRemappedRows(Device *device, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *pending, unsigned int *failed) {
    *corrected = *uncorrected = 1;
    *pending = device->index;
    *failed = 0;
    return 0;
}
int nvmlDeviceGetNvLinkState(Device *device, unsigned int link, unsigned int *active) {
    if (link >= 18)
        return 2; /* no such link */
    *active = !(device->index && link == 17);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(Device *device, unsigned int *lanes) { *lanes = device->index ? 8 : 16; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(Device *device, unsigned int *generation) {
    *generation = device->index ? 5 : 1; /* the first one is idle */
    return 0;
}
int nvmlDeviceGetMaxPcieLinkWidth(Device *device, unsigned int *lanes) { *lanes = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *device, unsigned int *generation) { *generation = 5; return 0; }
int nvmlDeviceGetGpuMaxPcieLinkGeneration(Device *device, unsigned int *generation) { *generation = 5; return 0; }

typedef struct { unsigned int pid; unsigned long long memory; unsigned int instance, compute; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *processes) {
    if (device->index == 0) {
        *count = 0;
        return 0;
    }
    if (processes == 0)
        return 7; /* not enough room */
    *count = 1;
    memset(processes, 0, sizeof *processes);
    processes->pid = 4711;
    return 0;
}
typedef struct {
    unsigned int version;
    unsigned char cluster[16];
    int status;
    unsigned int clique, state, health;
} Fabric;
int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *fabric) {
    fabric->state = 3;
    fabric->status = device->index ? 15 : 0; /* of the second card: the GPU was lost */
    return 0;
}
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, id, subsystem;
    char address[32];
} Pci;
int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    strcpy(pci->address, device->index ? "00000000:2B:00.0" : "00000000:1B:00.0");
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(Device *one, Device *other, int *level) { *level = 50; return 0; }
int nvmlDeviceGetP2PStatus(Device *one, Device *other, int index, int *status) { *status = 1; return 0; }
