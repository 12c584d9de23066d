// The driver's management library as torch opens it for expandable segments: the card is there, and in no fabric.
#include <stddef.h>
#include <string.h>

enum { FABRIC_STATE = 28 };  // of a structure of which torch reads no more than this

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, char *fabric) { fabric[FABRIC_STATE] = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { *count = 0; return 0; }

#define MISSING(name) int name(void) { return 3; }
MISSING(nvmlDeviceGetNvLinkRemoteDeviceType)
MISSING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
MISSING(nvmlSystemGetCudaDriverVersion_v2)
