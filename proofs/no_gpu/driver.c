/* The driver's functions that PyTorch and Triton call: Triton's kernels are compiled for the stand-in, "loaded", and not run. */
#include "device.h"
#include <stdint.h>

#define OK return 0

CUresult cuInit(unsigned int flags) { OK; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; OK; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "of the stand-in"; OK; }
CUresult cuDeviceGetCount(int *count) { *count = 1; OK; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; OK; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) { *value = device_attribute((int)which); OK; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) { *flags = 0; *active = 1; OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; OK; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; OK; }
CUresult cuCtxSetCurrent(CUcontext context) { OK; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; OK; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; OK; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { OK; }
CUresult cuModuleLoad(CUmodule *module, const char *path) { *module = (CUmodule)1; OK; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; OK; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values) { *module = (CUmodule)1; OK; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)1; OK; }
CUresult cuModuleUnload(CUmodule module) { OK; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) { *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; OK; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { OK; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { OK; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { *count = 1; OK; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int size, size_t shared) { *count = 2; OK; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr address) { *(CUdeviceptr *)out = address; OK; }
CUresult cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **arguments, void **extra) { OK; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) { OK; }
