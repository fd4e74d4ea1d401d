/* A stand-in for an NVIDIA driver and its runtime, for machines without either: memory is the host's, kernels compute
 * nothing, everything succeeds at once.
 *
 * Loaded before PyTorch (LD_PRELOAD), it has PyTorch build models on "cuda", run whole training steps and count their
 * memory with its own allocator. Copies between host and device are real, so what is copied there comes back; what a
 * kernel would have written is what was there before. Memory is taken lazily: a model of 80 GB costs nothing until
 * something is copied to it. NO_GPU_CAPABILITY and NO_GPU_MIB name the device: 90 and 81920 by default.
 */
#define _GNU_SOURCE
#include <cublasLt.h>
#include "device.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OK return 0

static int capability(void) {
    const char *text = getenv("NO_GPU_CAPABILITY");
    return text ? atoi(text) : 90;
}

static size_t device_bytes(void) {
    const char *text = getenv("NO_GPU_MIB");
    return (size_t)(text ? atoi(text) : 81920) << 20;
}

/* --- memory: blocks of the device, and pinned blocks of the host --------------------------------------------------- */

enum { BLOCKS = 1 << 16 };
static struct block { char *begin; size_t size; int pinned; } blocks[BLOCKS];
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int take(void **out, size_t size, int pinned) {
    size = size ? size : 1;
    *out = NULL;
    pthread_mutex_lock(&lock);
    if (!pinned && used + size > device_bytes()) {
        pthread_mutex_unlock(&lock);
        return cudaErrorMemoryAllocation;
    }
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; memory != MAP_FAILED && i < BLOCKS; i++) {
        if (blocks[i].begin == NULL) {
            blocks[i] = (struct block){memory, size, pinned};
            used += pinned ? 0 : size;
            *out = memory;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return *out ? 0 : cudaErrorMemoryAllocation;
}

static int give(void *memory) {
    pthread_mutex_lock(&lock);
    for (int i = 0; memory != NULL && i < BLOCKS; i++) {
        if (blocks[i].begin == memory) {
            munmap(memory, blocks[i].size);
            used -= blocks[i].pinned ? 0 : blocks[i].size;
            blocks[i].begin = NULL;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    OK;
}

/* The block that an address is in, or NULL. */
static struct block *block_of(const void *address) {
    for (int i = 0; i < BLOCKS; i++) {
        const char *begin = blocks[i].begin;
        if (begin != NULL && begin <= (const char *)address && (const char *)address < begin + blocks[i].size) return &blocks[i];
    }
    return NULL;
}

cudaError_t cudaMalloc(void **out, size_t size) { return take(out, size, 0); }
cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) { return take(out, size, 0); }
cudaError_t cudaFree(void *memory) { return give(memory); }
cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) { return give(memory); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned int flags) { return take(out, size, 1); }
cudaError_t cudaMallocHost(void **out, size_t size) { return take(out, size, 1); }
cudaError_t cudaFreeHost(void *memory) { return give(memory); }
cudaError_t cudaHostGetDevicePointer(void **out, void *memory, unsigned int flags) { *out = memory; OK; }

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *total = device_bytes();
    *unused = *total - used;
    OK;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    struct block *block = block_of(address);
    out->type = block == NULL ? cudaMemoryTypeUnregistered : block->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    pthread_mutex_unlock(&lock);
    if (block != NULL) out->devicePointer = (void *)address;
    if (block != NULL && block->pinned) out->hostPointer = (void *)address;
    OK;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { memmove(to, from, size); OK; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    /* Between two places of the device, what a kernel should have written is copied: nothing. */
    if (kind != cudaMemcpyDeviceToDevice) memmove(to, from, size);
    OK;
}
cudaError_t cudaMemset(void *to, int value, size_t size) { OK; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { OK; }

/* --- the device ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; OK; }
cudaError_t cudaGetDevice(int *device) { *device = 0; OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; OK; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) { *can = 0; OK; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) { strncpy(text, "0000:00:00.0", (size_t)size); OK; }

int device_attribute(int which) {
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { *value = device_attribute(which); OK; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof *out);
    strcpy(out->name, "no GPU: a stand-in");
    out->major = capability() / 10;
    out->minor = capability() % 10;
    out->totalGlobalMem = device_bytes();
    out->multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount);
    out->maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock);
    out->maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    out->sharedMemPerBlock = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    out->sharedMemPerBlockOptin = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    out->sharedMemPerMultiprocessor = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    out->regsPerBlock = out->regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerBlock);
    out->warpSize = 32;
    out->l2CacheSize = device_attribute(cudaDevAttrL2CacheSize);
    out->memoryBusWidth = device_attribute(cudaDevAttrGlobalMemoryBusWidth);
    out->unifiedAddressing = 1;
    for (int i = 0; i < 3; i++) {
        out->maxGridSize[i] = device_attribute(cudaDevAttrMaxGridDimX + i);
        out->maxThreadsDim[i] = device_attribute(cudaDevAttrMaxBlockDimX + i);
    }
    memset(out->uuid.bytes, 7, sizeof out->uuid.bytes);
    OK;
}

/* --- streams, events and kernels ------------------------------------------------------------------------------------- */

/* A stream or an event is an address that nothing is read from. */
static int name(void **out) {
    static char names[1 << 20];
    static int next = 0;
    *out = &names[1 + __sync_fetch_and_add(&next, 1) % ((1 << 20) - 1)];
    OK;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return name((void **)out); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags) { return name((void **)out); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned int flags, int priority) { return name((void **)out); }
cudaError_t cudaEventCreate(cudaEvent_t *out) { return name((void **)out); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags) { return name((void **)out); }
cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t start, cudaEvent_t end) { *out = 1; OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) { *out = cudaStreamCaptureStatusNone; OK; }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) { *out = cudaStreamCaptureStatusNone; OK; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = capability();
    OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int size, size_t shared) { *out = 2; OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *function, int size, size_t shared, unsigned int flags) { *out = 2; OK; }

static __thread struct { struct dim3 grid, block; size_t shared; void *stream; } call;
unsigned int __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
    call.grid = grid; call.block = block; call.shared = shared; call.stream = stream;
    OK;
}
cudaError_t __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void **stream) {
    *grid = call.grid; *block = call.block; *shared = call.shared; *stream = call.stream;
    OK;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; OK; }

/* --- cuBLAS ---------------------------------------------------------------------------------------------------------- */

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int asked,
    cublasLtMatmulHeuristicResult_t found[], int *count) {
    memset(found, 0, sizeof found[0]);
    *count = 1;
    OK;
}
