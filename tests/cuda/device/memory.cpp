// Device memory and shared memory, each array with a wide margin around it that nobody may touch.
//
// An array ends where that margin begins, but for less than kAligned bytes. These, and kMargin bytes before the array,
// hold kPoison: whoever reads there gets NaN, whoever writes there is found out later. Fresh memory holds it as well.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.h"

namespace standin {
namespace {

constexpr size_t kAligned = 16;  // the widest vector that a thread reads at once
constexpr size_t kMargin = 64;
constexpr size_t kGuard = 16 << 20;  // of addresses; costs no memory
constexpr unsigned char kPoison = 0xFF;

// Of a device.
size_t memory_bytes() {
  const char* mib = getenv("STANDIN_MEMORY_MIB");
  return (mib ? atol(mib) : 8192) * (size_t(1) << 20);
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t page() {
  static const size_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

class Guarded {
 public:
  explicit Guarded(size_t capacity) : capacity_(rounded(capacity + kAligned + kMargin, page())) {
    void* begin = mmap(nullptr, capacity_ + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    begin_ = begin == MAP_FAILED ? nullptr : static_cast<char*>(begin);
  }

  bool ok() const { return begin_; }
  void open() const { mprotect(begin_ + kGuard, capacity_, PROT_READ | PROT_WRITE); }
  void close() const { mprotect(begin_ + kGuard, capacity_, PROT_NONE); }
  void unmap() const { munmap(begin_, capacity_ + 2 * kGuard); }

  // Must be open. What it held is gone.
  void* take(size_t bytes) {
    bytes_ = bytes;
    memset(data() - kMargin, kPoison, kMargin + rounded(bytes_, kAligned));
    return data();
  }

  char* data() const { return begin_ + kGuard + capacity_ - rounded(bytes_, kAligned); }
  size_t bytes() const { return bytes_; }

  bool holds(const void* address) const {
    return address >= begin_ && address < begin_ + capacity_ + 2 * kGuard;
  }

  bool is_damaged() const {
    const auto is_poison = [](char byte) { return static_cast<unsigned char>(byte) == kPoison; };
    return !std::all_of(data() - kMargin, data(), is_poison) ||
           !std::all_of(data() + bytes_, data() + rounded(bytes_, kAligned), is_poison);
  }

  std::string place(const void* address) const {
    const char* at = static_cast<const char*>(address);
    const std::string of = " of " + std::to_string(bytes_) + " bytes";
    if (at < data()) return std::to_string(data() - at) + " bytes before an array" + of;
    if (at >= data() + bytes_) return std::to_string(at - data() - bytes_) + " bytes behind the end of an array" + of;
    return std::to_string(at - data()) + " bytes into an array" + of;
  }

 private:
  char* begin_;
  size_t capacity_;
  size_t bytes_ = 0;
};

struct Allocation {
  Guarded memory;
  int device;
};

std::map<const char*, Allocation> allocations;  // by address
size_t allocated = 0;

std::map<const char*, Allocation>::iterator holding(const void* address) {
  auto found = allocations.upper_bound(static_cast<const char*>(address));
  if (found == allocations.begin()) return allocations.end();
  --found;
  return address < found->first + found->second.memory.bytes() ? found : allocations.end();
}

// The arrays of a block: the dynamic one, then those that a kernel declares.
std::vector<Guarded> arrays;
std::vector<bool> is_taken;
size_t dynamic_size = 0;

}  // namespace

int allocate(void** out, size_t bytes) {
  if (int error = broken()) return error;
  const std::string wanted = std::to_string(bytes) + " bytes were asked for";
  if (bytes > memory_bytes() || allocated + bytes > memory_bytes()) return fail(kOutOfMemory, wanted);
  Guarded memory(bytes);
  if (!memory.ok()) return fail(kOutOfMemory, wanted);
  memory.open();
  *out = memory.take(bytes);
  memory.close();
  allocated += bytes;
  allocations.emplace(static_cast<const char*>(*out), Allocation{memory, current_device()});
  return kSuccess;
}

int release(void* pointer) {
  if (!pointer) return kSuccess;
  const auto found = allocations.find(static_cast<const char*>(pointer));
  if (found == allocations.end()) return fail(kInvalidValue, "this memory was not allocated");
  allocated -= found->second.memory.bytes();
  found->second.memory.unmap();
  allocations.erase(found);
  return kSuccess;
}

int copy(void* to, const void* from, size_t bytes) {
  if (int error = broken()) return error;
  const auto target = holding(to), source = holding(from);
  for (const auto& [found, address] : {std::pair(target, const_cast<const void*>(to)), std::pair(source, from)})
    if (found != allocations.end() &&
        static_cast<const char*>(address) + bytes > found->first + found->second.memory.bytes())
      return fail(kInvalidValue, "a copy of " + std::to_string(bytes) + " bytes ends behind an array of " +
                                     std::to_string(found->second.memory.bytes()));
  for (const auto& found : {target, source})
    if (found != allocations.end()) found->second.memory.open();
  memmove(to, from, bytes);
  for (const auto& found : {target, source})
    if (found != allocations.end()) found->second.memory.close();
  return kSuccess;
}

void open_memory(int device) {
  for (const auto& [_, allocation] : allocations)
    if (allocation.device == device) allocation.memory.open();
}

void close_memory(int device) {
  for (const auto& [_, allocation] : allocations)
    if (allocation.device == device) allocation.memory.close();
}

std::string explain(const void* address, bool is_write) {
  const std::string did = is_write ? "wrote " : "read ";
  std::string shared;
  if (explain_shared(address, &shared)) return did + shared;
  for (const auto& [_, allocation] : allocations)
    if (allocation.memory.holds(address)) {
      const std::string whose = allocation.device == current_device() ? "" : ", which is another device's";
      return did + allocation.memory.place(address) + " of device memory" + whose;
    }
  return did + "where no device memory is";
}

void damaged(std::string* what) {
  for (const auto& [_, allocation] : allocations)
    if (allocation.device == current_device() && allocation.memory.is_damaged())
      *what += "wrote next to an array of " + std::to_string(allocation.memory.bytes()) + " bytes of device memory";
}

void begin_shared(size_t dynamic_bytes) {
  dynamic_size = dynamic_bytes;
  is_taken.assign(arrays.size(), false);
}

static void* shared(size_t number, size_t bytes) {
  while (arrays.size() <= number) {
    arrays.emplace_back(kDynamicShared);
    arrays.back().open();
    is_taken.push_back(false);
  }
  if (!is_taken[number]) {
    is_taken[number] = true;
    arrays[number].take(bytes);
  }
  return arrays[number].data();
}

void* dynamic_shared() { return shared(0, dynamic_size); }
void* static_shared(int number, size_t bytes) { return shared(1 + number, bytes); }

size_t shared_bytes() {
  size_t sum = 0;
  for (size_t n = 1; n < arrays.size(); n++)
    if (is_taken[n]) sum += arrays[n].bytes();
  return sum + dynamic_size;
}

bool explain_shared(const void* address, std::string* what) {
  for (size_t n = 0; n < arrays.size(); n++)
    if (arrays[n].holds(address)) {
      *what = arrays[n].place(address) + " of shared memory";
      return true;
    }
  return false;
}

void damaged_shared(std::string* what) {
  for (size_t n = 0; n < arrays.size(); n++)
    if (is_taken[n] && arrays[n].is_damaged())
      *what += "wrote next to an array of " + std::to_string(arrays[n].bytes()) + " bytes of shared memory";
}

}  // namespace standin
