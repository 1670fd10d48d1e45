// What TVM's runtime calls of CUDA's runtime: devices, memory, streams that do everything at once, and events.
//
// Events tell the time that emulation takes, which says nothing of a GPU.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace standin;

namespace {

using Clock = std::chrono::steady_clock;

// Of cudaDeviceAttr, those that TVM asks for.
int attribute(int which) {
  switch (which) {
    case 1: case 2: case 3: return kMaxThreads;  // threads of a block; its x and y
    case 4: return 64;                           // its z
    case 5: return 0x7FFFFFFF;                   // the grid's x, y and z
    case 6: case 7: return 65535;
    case 8: return kStaticShared;
    case 10: return kWarp;
    case 12: return 65536;    // registers of a block
    case 13: return 1000000;  // kHz
    case 16: return 8;        // multiprocessors
    case 38: return 4 << 20;  // bytes of the last-level cache
    case 75: return compute_capability() / 10;
    case 76: return compute_capability() % 10;
    case 97: return kDynamicShared;
    default: return 0;
  }
}

int unsupported(const char* what) { return fail(kNotSupported, std::string("the stand-in has no ") + what); }

}  // namespace

extern "C" {

int cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? int(kSuccess) : fail(kNoDevice, "CUDA_VISIBLE_DEVICES names none of those that are there");
}

int cudaGetDevice(int* device) {
  *device = current_device();
  return kSuccess;
}

int cudaSetDevice(int device) { return set_device(device); }

int cudaDeviceGetAttribute(int* value, int which, int device) {
  if (device < 0 || device >= device_count()) return fail(kInvalidDevice, "");
  *value = attribute(which);
  return kSuccess;
}

int cudaGetDeviceProperties(void* properties, int device) {
  snprintf(static_cast<char*>(properties), 256, "%s", device_name(device));  // the name comes first; TVM reads no more
  return kSuccess;
}

int cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t(8) << 30;
  return kSuccess;
}

int cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
int cudaFree(void* pointer) { return release(pointer); }

int cudaMallocHost(void** pointer, size_t bytes) {
  *pointer = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *pointer ? int(kSuccess) : fail(kOutOfMemory, "");
}

int cudaFreeHost(void* pointer) {
  free(pointer);
  return kSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) { return copy(to, from, bytes); }
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void*) { return copy(to, from, bytes); }

int cudaStreamCreate(void** stream) {
  *stream = nullptr;
  return broken();
}

int cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
int cudaStreamDestroy(void*) { return kSuccess; }
int cudaStreamSynchronize(void*) { return broken(); }
int cudaStreamWaitEvent(void*, void*, unsigned) { return broken(); }
int cudaStreamBeginCapture(...) { return unsupported("graphs"); }
int cudaStreamEndCapture(...) { return unsupported("graphs"); }
int cudaGraphInstantiate(...) { return unsupported("graphs"); }
int cudaGraphLaunch(...) { return unsupported("graphs"); }
int cudaGraphDestroy(...) { return kSuccess; }
int cudaGraphExecDestroy(...) { return kSuccess; }

int cudaEventCreate(void** event) {
  *event = new Clock::time_point;
  return broken();
}

int cudaEventDestroy(void* event) {
  delete static_cast<Clock::time_point*>(event);
  return kSuccess;
}

int cudaEventRecord(void* event, void*) {
  *static_cast<Clock::time_point*>(event) = Clock::now();
  return broken();
}

int cudaEventSynchronize(void*) { return broken(); }

int cudaEventElapsedTime(float* ms, void* begin, void* end) {
  const auto passed = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
  *ms = std::max(1e-6f, std::chrono::duration<float, std::milli>(passed).count());
  return broken();
}

int cudaGetLastError() { return kSuccess; }
int cudaPeekAtLastError() { return kSuccess; }
const char* cudaGetErrorName(int error) { return name_of(error); }
const char* cudaGetErrorString(int error) { return describe(error); }

}  // extern "C"
