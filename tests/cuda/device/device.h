// A stand-in for an NVIDIA GPU, in one process: its memory, the threads of its kernels, and what went wrong.
//
// Shared by the stand-ins of CUDA's driver and runtime, and by the kernels that `compiler.py` makes for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace standin {

constexpr int kMaxThreads = 1024;  // of a block
constexpr int kWarp = 32;
constexpr size_t kStaticShared = 48 << 10;   // bytes of a block, without asking for more
constexpr size_t kDynamicShared = 227 << 10;  // that may be asked for

// CUDA's own numbers; the names of the driver and of the runtime differ, the numbers do not.
enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInitialization = 3,
  kInvalidConfiguration = 9,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchFailure = 719,
  kNotSupported = 801,
  kUnknownError = 999,
};

struct Dim3 {
  unsigned x, y, z;
  size_t count() const { return size_t(x) * y * z; }
};

// Errors: one that a kernel made stays, as in a CUDA context, until the process ends.

int fail(Error error, const std::string& why);  // remembers why; returns the error
int fail_for_good(Error error, const std::string& why);
int broken();  // the error that stays, or that the device is gone, or that this is a fork; or success
const char* name_of(int error);  // as the runtime calls it
const char* driver_name_of(int error);  // with the reason: TVM tells no more of a kernel that failed
const char* describe(int error);  // what CUDA says of it, with the reason

// Devices: those that CUDA_VISIBLE_DEVICES lets this process see, of those that are there.

int device_count();
int current_device();
int set_device(int device);
const char* device_name(int device);
int compute_capability();  // e.g. 80
bool is_there(int device);  // and works; it may go away at any time
bool is_broken(int device);

// Memory. Neither the host nor a kernel on another device may touch it; guard pages lie around each allocation.

int allocate(void** out, size_t bytes);
int release(void* pointer);
int copy(void* to, const void* from, size_t bytes);  // whichever of them is device memory
void open_memory(int device);                         // while its kernels run
void close_memory(int device);
std::string explain(const void* address, bool is_write);  // what lies there, for messages
void damaged(std::string* what);  // appended if somebody wrote between an allocation and its guard

// Memory that the threads of a block share, with guard pages around each array.

void begin_shared(size_t dynamic_bytes);  // of a block: whatever was there is gone
bool explain_shared(const void* address, std::string* what);
void damaged_shared(std::string* what);
void* dynamic_shared();
void* static_shared(int number, size_t bytes);
size_t shared_bytes();  // that the running block has taken

// Threads. A kernel's entry calls it once, for the thread whose turn it is.

struct Kernel {
  std::string name;
  void (*entry)(void** arguments);
  size_t dynamic_limit = kStaticShared;  // raised by cuFuncSetAttribute
};

int launch(const Kernel& kernel, Dim3 grid, Dim3 block, size_t dynamic_bytes, void** arguments);

Dim3& thread_index();
Dim3& block_index();
Dim3& block_size();
Dim3& grid_size();
void sync_block();
void sync_warp(unsigned lanes);
unsigned active_lanes();
int lane();
void** exchange(void* mine, unsigned lanes);  // by lane, what each handed in; null for lanes that did not
[[noreturn]] void trap(const char* why);

}  // namespace standin
