// What went wrong, in CUDA's words and with the reason; which devices there are.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "device.h"

namespace standin {
namespace {

struct Words {
  const char *of_runtime, *of_driver, *text;
};

const std::map<int, Words> kWords = {
    {kSuccess, {"cudaSuccess", "CUDA_SUCCESS", "no error"}},
    {kInvalidValue, {"cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {kOutOfMemory, {"cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {kInitialization, {"cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {kInvalidConfiguration,
     {"cudaErrorInvalidConfiguration", "CUDA_ERROR_INVALID_VALUE", "invalid configuration argument"}},
    {kNoDevice, {"cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {kInvalidDevice, {"cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {kInvalidImage, {"cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {kNotFound, {"cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {kIllegalAddress,
     {"cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {kLaunchFailure, {"cudaErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {kNotSupported, {"cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
};
const Words kUnknown = {"cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"};

const Words& words(int error) {
  const auto found = kWords.find(error);
  return found == kWords.end() ? kUnknown : found->second;
}

std::string reason, message;

const char* with_reason(const char* said, int error) {
  message = said;
  if (error && !reason.empty()) message += " (" + reason + ")";
  return message.c_str();
}

int lasting = kSuccess;
int current = 0;

// One line for each device: its UUID. Whoever takes a line away takes the device away. With ` broken` behind it, it is
// still seen, but does nothing.
std::vector<std::string> present() {
  std::vector<std::string> found;
  const char* path = getenv("STANDIN_DEVICES");
  std::ifstream lines(path ? path : "");
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) found.push_back(line);
  return found;
}

std::string uuid(const std::string& line) { return line.substr(0, line.find(' ')); }

// As they were when the process first asked: CUDA's numbers do not change later.
const std::vector<std::string>& visible() {
  static const std::vector<std::string> devices = [] {
    const std::vector<std::string> all = present();
    const char* allowed = getenv("CUDA_VISIBLE_DEVICES");
    std::vector<std::string> chosen;
    if (!allowed)
      for (const std::string& line : all) chosen.push_back(uuid(line));
    std::istringstream names(allowed ? allowed : "");
    for (std::string name; std::getline(names, name, ',');)
      for (size_t n = 0; n < all.size(); n++)
        if (name == uuid(all[n]) || name == std::to_string(n)) chosen.push_back(uuid(all[n]));
    return chosen;
  }();
  return devices;
}

// A fork has no GPU, whether or not CUDA was used before: as it was on a real machine, see lib/measure/launch.py.
const pid_t loaded_by = getpid();

bool is_fork() { return getpid() != loaded_by; }

}  // namespace

int fail(Error error, const std::string& why) {
  reason = why;
  return error;
}

int fail_for_good(Error error, const std::string& why) {
  lasting = error;
  return fail(error, why);
}

int broken() {
  if (is_fork()) return fail(kInitialization, "this process is a fork of one that had loaded CUDA");
  if (lasting) return lasting;
  if (!is_there(current)) return fail_for_good(is_broken(current) ? kUnknownError : kNoDevice, "the device failed");
  return kSuccess;
}

const char* name_of(int error) { return words(error).of_runtime; }
const char* driver_name_of(int error) { return with_reason(words(error).of_driver, error); }
const char* describe(int error) { return with_reason(words(error).text, error); }

int device_count() { return is_fork() ? 0 : static_cast<int>(visible().size()); }
int current_device() { return current; }

int set_device(int device) {
  if (device < 0 || device >= device_count()) return fail(kInvalidDevice, "there is no device " + std::to_string(device));
  current = device;
  return broken();
}

const char* device_name(int) { return "Stand-in GPU"; }

int compute_capability() {
  const char* given = getenv("STANDIN_COMPUTE_CAPABILITY");
  return given ? atoi(given) : 80;
}

bool is_there(int device) {
  if (device >= device_count()) return false;
  for (const std::string& line : present())
    if (line == visible()[device]) return true;
  return false;
}

bool is_broken(int device) {
  for (const std::string& line : present())
    if (device < device_count() && uuid(line) == visible()[device]) return line != visible()[device];
  return false;
}

}  // namespace standin
