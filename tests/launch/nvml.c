/* A stand-in for libnvidia-ml.so.1: layouts and numbers are those of NVIDIA's nvml.h. */
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
typedef unsigned long long u64;
typedef struct { const char *uuid; int answers; u64 energy; unsigned asked, clock; } Device;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;

static Device devices[] = {
    {"GPU-aaaaaaaa-0000-0000-0000-000000000000", 1, 7000000, 0, 1395},
    {"GPU-bbbbbbbb-0000-0000-0000-000000000000", 0},
    {"MIG-dddddddd-0000-0000-0000-000000000000", 0},
};

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    for (int i = 0; i < 3; i++)
        if (!strcmp(devices[i].uuid, uuid)) { *device = &devices[i]; return SUCCESS; }
    return NOT_FOUND;
}
int nvmlDeviceGetTotalEnergyConsumption(Device *device, u64 *millijoules) {
    if (!device->answers) return NOT_SUPPORTED;
    *millijoules = device->energy += 250000;
    return SUCCESS;
}
static int reasons(Device *device, u64 *mask) {
    static const u64 answers[] = {0x1, 0x4 | 0x2, 0x10 | 0x100, 0x4 | 0x8 | 0x40};
    if (!device->answers) return NOT_SUPPORTED;
    *mask = answers[device->asked++ % 4];
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, u64 *mask) { return reasons(device, mask); }
int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *mhz) {
    if (!device->answers) return INVALID_ARGUMENT;
    *mhz = type == 1 ? device->clock += 15 : 0;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    if (!device->answers) return NOT_SUPPORTED;
    if (*count < 2) { *count = 2; return INSUFFICIENT_SIZE; }
    *count = 2;
    processes[0] = (Process){100, 1ull << 30, -1, -1};
    processes[1] = (Process){200, 2ull << 30, -1, -1};
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    if (!device->answers) return NOT_SUPPORTED;
    *memory = (Memory){80ull << 30, 76ull << 30, 4ull << 30};
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory) {
    if (!device->answers) return NOT_SUPPORTED;
    if (memory->version != (sizeof(MemoryV2) | 2 << 24)) return INVALID_ARGUMENT;
    *memory = (MemoryV2){memory->version, 80ull << 30, 1ull << 30, 76ull << 30, 3ull << 30};
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 8; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index > 7) return INVALID_ARGUMENT;
    *device = &devices[0];
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
    strncpy(name, "NVIDIA H200", length);
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Device *device, unsigned rates[2]) {
    if (!device->answers) return NOT_SUPPORTED;
    rates[0] = 90, rates[1] = 40;
    return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    strncpy(version, "580.00", length);
    return SUCCESS;
}
