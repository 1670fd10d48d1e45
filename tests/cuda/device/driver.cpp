// What TVM's runtime calls of CUDA's driver. A module's image is a shared library that `compiler.py` made.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "device.h"

using namespace standin;

namespace {

constexpr int kMaxDynamicSharedSize = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// What stands before the library in an image; see `compiler.py`.
struct Header {
  char magic[8];
  uint64_t bytes;
};

struct Module {
  void* library;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

// The beginning of CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], dynamic_bytes;
};

// Each from a file of another name: a name that is loaded already would give the library that it was.
void* loaded(const char* image, size_t bytes) {
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder ? folder : "/tmp") + "/kernels-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return nullptr;
  const bool is_written = write(file, image, bytes) == ssize_t(bytes);
  close(file);
  void* library = is_written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path.c_str());
  return library;
}

}  // namespace

extern "C" {

int cuDeviceGetName(char* name, int bytes, int device) {
  snprintf(name, bytes, "%s", device_name(device));
  return kSuccess;
}

int cuGetErrorName(int error, const char** name) {
  *name = driver_name_of(error);
  return kSuccess;
}

int cuGetErrorString(int error, const char** text) {
  *text = describe(error);
  return kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
  if (int error = broken()) return error;
  const Header* header = static_cast<const Header*>(image);
  if (memcmp(header->magic, "STAND-IN", sizeof header->magic))
    return fail(kInvalidImage, "this was compiled for a real GPU: the stand-in's nvcc was not the one on PATH");
  void* library = loaded(reinterpret_cast<const char*>(header + 1), header->bytes);
  if (!library) {
    const char* why = dlerror();
    return fail(kInvalidImage, why ? why : "its file cannot be written");
  }
  *module = new Module{library, {}};
  return kSuccess;
}

int cuModuleUnload(void* module) {
  dlclose(static_cast<Module*>(module)->library);
  delete static_cast<Module*>(module);
  return kSuccess;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (int error = broken()) return error;
  Module* in = static_cast<Module*>(module);
  void* entry = dlsym(in->library, (std::string(name) + "__entry").c_str());
  if (!entry) return fail(kNotFound, "the module has no kernel " + std::string(name));
  auto& kernel = in->kernels[name];
  if (!kernel) kernel.reset(new Kernel{name, reinterpret_cast<void (*)(void**)>(entry)});
  *function = kernel.get();
  return kSuccess;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != kMaxDynamicSharedSize) return kSuccess;
  if (value < 0 || size_t(value) > kDynamicShared)
    return fail(kInvalidValue, std::to_string(value) + " bytes of dynamic shared memory");
  static_cast<Kernel*>(function)->dynamic_limit = std::max(size_t(value), kStaticShared);
  return kSuccess;
}

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void**) {
  const auto dim = [](const unsigned* of) { return Dim3{of[0], of[1], of[2]}; };
  return launch(*static_cast<Kernel*>(function), dim(config->grid), dim(config->block), config->dynamic_bytes, arguments);
}

int cuTensorMapEncodeTiled(...) { return fail(kNotSupported, "the stand-in has no tensor maps"); }

}  // extern "C"
