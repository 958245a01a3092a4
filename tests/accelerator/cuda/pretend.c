/* A CUDA device that computes nothing, for torch's CUDA build on a machine without a GPU.

Preloaded, this library answers in place of the CUDA runtime and of cuBLAS; as libcuda.so.1 it answers in place of the
driver. Kernels do nothing, so numbers computed there are garbage. Memory is real: copies and fills between host and
device hold. Everything that the host does is counted: launches, copies, waits, graphs. What a capture forbids fails as
on a device. scripts/pretend_cuda.sh adds stubs, which return 0, for all functions that torch knows and this file does
not. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Read by tests/accelerator/cuda/device.py, by the same order. */
enum { LAUNCH, H2D_PINNED, H2D_PAGEABLE, D2H, D2D, SYNC, CAPTURE, GRAPH_LAUNCH, VIOLATION, CAPTURED_LAUNCH, GRAPHS, NUM };
static long counts[NUM];
void pretend_counts(long *out) { memcpy(out, counts, sizeof counts); }
static void count(int what) { __atomic_add_fetch(&counts[what], 1, __ATOMIC_RELAXED); }
static void *handle(void) { static long last = 4096; return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED); }

/* -- memory: which address belongs to the device, which is pinned; pages take memory when they are written ---------- */
enum { PAGEABLE, PINNED, DEVICE };
static struct { char *start; size_t size; int kind; } spans[1 << 16];
static int num_spans;
static size_t used;
static const size_t TOTAL = 80ull << 30;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void hold(void *start, size_t size, int kind) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < num_spans && spans[i].start) i++;
  if (i == num_spans) num_spans++;
  spans[i].start = start, spans[i].size = size, spans[i].kind = kind;
  if (kind == DEVICE) used += size;
  pthread_mutex_unlock(&lock);
}

static int find(const void *address, int *kind) {
  for (int i = 0; i < num_spans; i++)
    if (spans[i].start && (char *)address >= spans[i].start && (char *)address < spans[i].start + spans[i].size)
      return *kind = spans[i].kind, i;
  return *kind = PAGEABLE, -1;
}

static int kind_of(const void *address) {
  int kind;
  pthread_mutex_lock(&lock);
  find(address, &kind);
  pthread_mutex_unlock(&lock);
  return kind;
}

static size_t let_go(void *start) {
  int kind;
  pthread_mutex_lock(&lock);
  int i = find(start, &kind);
  size_t size = i < 0 ? 0 : spans[i].size;
  if (i >= 0) spans[i].start = 0;
  if (i >= 0 && kind == DEVICE) used -= size;
  pthread_mutex_unlock(&lock);
  return size;
}

cudaError_t cudaMalloc(void **out, size_t size) {
  if (used + size > TOTAL) return cudaErrorMemoryAllocation;
  *out = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  hold(*out, size, DEVICE);
  return 0;
}
cudaError_t cudaFree(void *start) {
  size_t size = start ? let_go(start) : 0;
  if (size) munmap(start, size);
  return 0;
}
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
  if (posix_memalign(out, 4096, size)) return cudaErrorMemoryAllocation;
  hold(*out, size, PINNED);
  return 0;
}
cudaError_t cudaFreeHost(void *start) { let_go(start), free(start); return 0; }
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) { hold(start, size, PINNED); return 0; }
cudaError_t cudaHostUnregister(void *start) { let_go(start); return 0; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) { *total = TOTAL, *left = TOTAL - used; return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
  static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice};
  int kind = kind_of(address);
  memset(out, 0, sizeof *out);
  out->type = types[kind];
  *(kind == DEVICE ? &out->devicePointer : &out->hostPointer) = kind == PAGEABLE ? 0 : (void *)address;
  return 0;
}

/* -- captures ------------------------------------------------------------------------------------------------------ */
static __thread cudaStream_t captured; /* stream that this thread captures */
static volatile int num_global;        /* captures that forbid unsafe calls in all threads */
static __thread int is_global;

static cudaError_t unsafe(const char *what) {
  if (!captured && !num_global) return 0;
  count(VIOLATION);
  fprintf(stderr, "pretend: %s while a stream is captured\n", what);
  return cudaErrorStreamCaptureUnsupported;
}
static cudaError_t begin(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  count(CAPTURE);
  captured = stream, is_global = mode == cudaStreamCaptureModeGlobal, num_global += is_global;
  return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) { return begin(stream, mode); }
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *nodes,
                                          const cudaGraphEdgeData *edges, size_t number, enum cudaStreamCaptureMode mode) {
  return begin(stream, mode);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  num_global -= is_global, captured = 0, *graph = handle();
  return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  *out = captured && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *number) {
  if (id) *id = counts[CAPTURE];
  if (graph) *graph = (cudaGraph_t)16;
  if (number) *number = 0;
  return cudaStreamIsCapturing(stream, out);
}
cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags) { *graph = handle(); return 0; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) { *number = 1; return 0; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  count(GRAPHS), *out = handle();
  return 0;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  __atomic_sub_fetch(&counts[GRAPHS], 1, __ATOMIC_RELAXED);
  return 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { count(GRAPH_LAUNCH); return 0; }

/* -- waits and copies ---------------------------------------------------------------------------------------------- */
cudaError_t cudaDeviceSynchronize(void) { count(SYNC); return unsafe("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count(SYNC);
  return stream == captured ? unsafe("cudaStreamSynchronize") : 0; /* torch waits for a stream of its own */
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { count(SYNC); return unsafe("cudaEventSynchronize"); }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  int source = kind_of(from), destination = kind_of(to);
  if (source == DEVICE && destination == DEVICE) count(D2D);
  else count(destination == DEVICE ? source == PINNED ? H2D_PINNED : H2D_PAGEABLE : D2H);
  if (captured && (source == PAGEABLE || destination == PAGEABLE)) return unsafe("copy of pageable memory");
  memcpy(to, from, size);
  return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  count(SYNC);
  return cudaMemcpyAsync(to, from, size, kind, 0);
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  size_t first = -(size_t)start & 4095, whole = size > first ? (size - first) & ~4095ull : 0;
  count(LAUNCH);
  if (captured) count(CAPTURED_LAUNCH);
  if (value || whole < 1 << 20) return memset(start, value, size), 0;
  memset(start, 0, first), memset((char *)start + first + whole, 0, size - first - whole);
  madvise((char *)start + first, whole, MADV_DONTNEED); /* such pages read as zeros and take no memory */
  return 0;
}
cudaError_t cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, 0); }

/* -- launches ------------------------------------------------------------------------------------------------------ */
static int launch(void) {
  count(LAUNCH);
  if (captured) count(CAPTURED_LAUNCH);
  return 0;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s) { return launch(); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s) {
  return launch();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **arguments) { return launch(); }
#define LAUNCHES(name) int name(void) { return launch(); }
LAUNCHES(cuLaunchKernel) LAUNCHES(cuLaunchKernelEx) LAUNCHES(cuLaunchCooperativeKernel) LAUNCHES(__cudaLaunchKernel)
LAUNCHES(cublasGemmEx) LAUNCHES(cublasSgemm_v2) LAUNCHES(cublasDgemm_v2) LAUNCHES(cublasGemmStridedBatchedEx)
LAUNCHES(cublasSgemmStridedBatched) LAUNCHES(cublasDgemmStridedBatched) LAUNCHES(cublasLtMatmul)
LAUNCHES(cublasSgemmEx) LAUNCHES(cublasSgemv_v2)
int __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return 0; }

/* -- what the device is: an H100 ----------------------------------------------------------------------------------- */
cudaError_t cudaGetDeviceCount(int *out) { *out = 1; return 0; }
cudaError_t cudaGetDevice(int *out) { *out = 0; return 0; }
cudaError_t cudaDriverGetVersion(int *out) { *out = 13000; return 0; }
cudaError_t cudaRuntimeGetVersion(int *out) { *out = 13000; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) { strncpy(out, "0000:00:00.0", size); return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *out, int a, int b) { *out = 0; return 0; }
const char *cudaGetErrorName(cudaError_t error) { return error == 900 ? "cudaErrorStreamCaptureUnsupported" : "pretend"; }
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory"
         : error == 900                     ? "operation not permitted when stream is capturing"
                                            : "pretend error";
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  *out = (struct cudaDeviceProp){
      .name = "NVIDIA H100 80GB HBM3 (pretend)", .totalGlobalMem = TOTAL, .major = 9, .minor = 0,
      .multiProcessorCount = 132, .warpSize = 32, .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
      .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
      .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535}, .maxBlocksPerMultiProcessor = 32, .l2CacheSize = 50 << 20,
      .memoryBusWidth = 5120, .totalConstMem = 65536, .textureAlignment = 512, .canMapHostMemory = 1,
      .unifiedAddressing = 1, .concurrentKernels = 1};
  return 0;
}
static int attribute(int which) { /* the runtime and the driver use the same numbers */
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    default: return 1;
  }
}
cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) { *out = attribute(which); return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
  *out = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90,
                                     .maxDynamicSharedSizeBytes = 232448};
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *f, int block, size_t n) { *out = 2; return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f, int block, size_t n, unsigned g) {
  *out = 2;
  return 0;
}
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) { static char room[65536]; *out = room; return 0; }
cudaError_t cudaStreamCreate(cudaStream_t *out) { *out = handle(); return 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { *out = handle(); return 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) { *out = handle(); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *out) { *out = handle(); return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { *out = handle(); return 0; }
cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t from, cudaEvent_t to) { *out = 1; return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? 0 : cudaErrorInvalidValue;
}

/* -- cuBLAS and the driver: handles and answers, whose types nobody checks here -------------------------------------- */
int cublasCreate_v2(void **out) { *out = handle(); return 0; }
int cublasGetMathMode(void *h, int *out) { *out = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *out) { *out = 0; return 0; }
int cublasLtMatmulDescCreate(void **out, int a, int b) { *out = handle(); return 0; }
int cublasLtMatmulPreferenceCreate(void **out) { *out = handle(); return 0; }
int cublasLtMatrixLayoutCreate(void **out, int t, long rows, long columns, long lead) { *out = handle(); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, char *out, int *found) {
  memset(out, 0, 128), *found = 1;
  return 0;
}
unsigned long cublasLtGetVersion(void) { return 130000; }
int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
int cuGetErrorString(int error, const char **out) { *out = "pretend error"; return 0; }
int cuGetErrorName(int error, const char **out) { *out = "pretend"; return 0; }
int cuCtxGetCurrent(void **out) { *out = (void *)16; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { *flags = 0, *is_active = 1; return 0; }
int cuDeviceGet(int *out, int number) { *out = 0; return 0; }
int cuDeviceGetCount(int *out) { *out = 1; return 0; }
int cuDeviceGetAttribute(int *out, int which, int device) { *out = attribute(which); return 0; }
int cuModuleLoadData(void **out, const void *image) { *out = handle(); return 0; }
int cuModuleGetFunction(void **out, void *module, const char *name) { *out = handle(); return 0; }
int cuFuncGetAttribute(int *out, int which, void *f) { *out = which == 0 ? 1024 : which == 3 ? 0 : 32; return 0; }
int cuOccupancyMaxActiveClusters(int *out, void *f, void *config) { *out = 1; return 0; }
int cuPointerGetAttribute(void *out, int which, unsigned long long address) { *(unsigned long long *)out = address; return 0; }
