// The driver's library as far as torch opens it: two devices, whose contexts are there already, and no function to look up.
#include <stddef.h>

enum { SUCCESS = 0, NOT_FOUND = 500 };

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 2; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return SUCCESS; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *found) {
  *function = NULL;
  if (found) *found = 1;
  return NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
  *function = NULL;
  return NOT_FOUND;
}

#define MISSING(name) int name(void) { return 801; }
MISSING(cuCtxSetCurrent)
MISSING(cuDeviceGetAttribute)
MISSING(cuDevicePrimaryCtxRetain)
MISSING(cuFuncGetAttribute)
MISSING(cuFuncSetAttribute)
MISSING(cuFuncSetCacheConfig)
MISSING(cuGetErrorString)
MISSING(cuLaunchCooperativeKernel)
MISSING(cuLaunchKernel)
MISSING(cuLinkAddData_v2)
MISSING(cuLinkComplete)
MISSING(cuLinkCreate_v2)
MISSING(cuModuleGetFunction)
MISSING(cuModuleLoad)
MISSING(cuModuleLoadData)
MISSING(cuModuleLoadDataEx)
MISSING(cuModuleUnload)
MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
MISSING(cuPointerGetAttribute)
MISSING(cuTensorMapEncodeTiled)
