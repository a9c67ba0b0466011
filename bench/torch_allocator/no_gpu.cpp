// A CUDA runtime for a machine without a GPU: cudaMalloc hands out addresses that nobody reads, up to FAKE_GPU_BYTES.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace {
size_t read_limit() {
  const char* text = getenv("FAKE_GPU_BYTES");
  return text ? strtoull(text, nullptr, 10) : ~size_t{0};
}
const size_t limit_bytes = read_limit();
size_t used_bytes = 0;
size_t next_address = size_t{1} << 40;
std::map<size_t, size_t> bytes_at;
cudaError_t last_error = cudaSuccess;
}  // namespace

extern "C" {
cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  if (used_bytes + num_bytes > limit_bytes) return last_error = cudaErrorMemoryAllocation;
  *address = reinterpret_cast<void*>(next_address);
  bytes_at[next_address] = num_bytes;
  used_bytes += num_bytes;
  next_address += num_bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  auto entry = bytes_at.find(reinterpret_cast<size_t>(address));
  if (entry != bytes_at.end()) {
    used_bytes -= entry->second;
    bytes_at.erase(entry);
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = limit_bytes - used_bytes;
  *total_bytes = limit_bytes;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  properties->major = 9;
  properties->totalGlobalMem = limit_bytes;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// The driver's functions for expandable segments: addresses are reserved and mapped, with nothing behind them.
static int reserve_addresses(size_t* address, size_t num_bytes, size_t, size_t, unsigned long long) {
  *address = next_address;
  next_address += num_bytes;
  return 0;
}

static int create_handle(unsigned long long* handle, size_t, const void*, unsigned long long) { return *handle = 1, 0; }

static int succeed() { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(succeed);
  if (!strcmp(name, "cuMemAddressReserve")) *function = reinterpret_cast<void*>(reserve_addresses);
  if (!strcmp(name, "cuMemCreate")) *function = reinterpret_cast<void*>(create_handle);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
}
