/*!
 * Runs models that family-tuner compiled, without Python.
 *
 *     family_tuner::Model model("compiled/");
 *     auto x = model.empty(0);                       // a tensor for the first input, to be filled
 *     std::vector<tvm::ffi::Tensor> y = model({x});  // empty(0, {{"sequence", 37}}), where dimensions are open
 *     family_tuner::Model other = model.session({1});  // one thread; shares library and weights
 *
 * It needs C++17, Linux or macOS, and of the wheels apache-tvm and apache-tvm-ffi: the headers of the latter, and
 * libtvm_runtime and libtvm_ffi to link with (libtvm_runtime_extra, too, if the model sorts). See example/CMakeLists.txt.
 *
 * Several threads may call one session: calls run one after the other, in a thread of the session's own, so that its
 * thread count and its cores are its own and those of the caller stay as they were. Sessions run beside each other.
 */
#ifndef FAMILY_TUNER_RUNTIME_HPP_
#define FAMILY_TUNER_RUNTIME_HPP_

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace family_tuner {

namespace ffi = tvm::ffi;

/*! What goes wrong and is not TVM's to say (that is a tvm::ffi::Error). */
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/*! Of a session. */
struct Options {
  int threads = 0;              // of an inference; 0: as many as `cores`, else as the model was tuned for
  std::vector<int> cores = {};  // where they may run; empty: all that this process may use. Linux only
};

/*! Extents of dimensions that are open within a range, by name. */
using Extents = std::map<std::string, int64_t>;

/*! An input or an output. */
struct Value {
  std::string name;
  std::vector<int64_t> shape;  // -1 for dimensions that are open
  DLDataType dtype;
  std::vector<std::string> open = {};  // their names, and empty ones for the others; or none at all
  int64_t fill = 0;                    // what an input is padded with

  std::string text() const {
    std::ostringstream told;
    told << name << ": " << std::string(ffi::DLDataTypeToString(dtype)) << "[";
    for (size_t n = 0; n < shape.size(); ++n) {
      told << (n ? ", " : "");
      is_open(n) ? told << open[n] : told << shape[n];
    }
    told << "]";
    return told.str();
  }

  bool is_open(size_t axis) const { return axis < open.size() && !open[axis].empty(); }

  /*! The shape with the extents of what is open. */
  std::vector<int64_t> settled(const Extents& extents) const {
    std::vector<int64_t> found = shape;
    for (size_t n = 0; n < shape.size(); ++n) {
      if (!is_open(n)) continue;
      auto extent = extents.find(open[n]);
      if (extent == extents.end()) throw Error(text() + ": say how much " + open[n] + " is");
      found[n] = extent->second;
    }
    return found;
  }
};

namespace detail {

constexpr int64_t kAlignment = 64;  // bytes: what TVM's kernels assume
constexpr int kFormat = 1;          // of bundles of one shape
constexpr int kOfRanges = 3;        // of bundles of ranges of shapes; this code reads all up to it

inline std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

using Object = ffi::json::Object;

inline Object parse(const std::string& text, const std::string& path) {
  ffi::String wrong;
  ffi::Any found = ffi::json::Parse(text, &wrong);
  if (auto object = found.as<Object>()) return *object;
  throw Error(path + " is damaged: it is no JSON object. " + std::string(wrong));
}

template <typename T>
T get(const Object& object, const char* key, const std::string& path) {
  auto found = object.Get(ffi::String(key));
  if (found) {
    if (auto value = found->try_cast<T>()) return *value;
  }
  throw Error(path + " is damaged: it says nothing of " + key);
}

inline std::vector<int64_t> integers(const ffi::json::Array& values) {
  std::vector<int64_t> found;
  for (const ffi::Any& value : values) found.push_back(value.cast<int64_t>());
  return found;
}

inline std::vector<Value> values(const Object& facts, const char* key, const std::string& path) {
  std::vector<Value> found;
  for (const ffi::Any& each : get<ffi::json::Array>(facts, key, path)) {
    Object said = each.cast<Object>();
    Value value{get<ffi::String>(said, "name", path), {}, ffi::StringToDLDataType(get<ffi::String>(said, "dtype", path))};
    for (const ffi::Any& extent : get<ffi::json::Array>(said, "shape", path)) {
      auto name = extent.as<ffi::String>();
      value.open.push_back(name ? std::string(*name) : std::string());
      value.shape.push_back(name ? -1 : extent.cast<int64_t>());
    }
    if (auto fill = said.Get(ffi::String("fill"))) value.fill = fill->cast<int64_t>();
    found.push_back(std::move(value));
  }
  return found;
}

inline int64_t bytes(const std::vector<int64_t>& shape, DLDataType dtype) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count * ((dtype.bits + 7) / 8);
}

/*! A file that is mapped as long as one of its tensors is there. */
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat state {};
    if (file < 0 || ::fstat(file, &state) != 0) throw Error(path + " cannot be read");
    size_ = static_cast<size_t>(state.st_size);
    address_ = size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    ::close(file);
    if (address_ == MAP_FAILED) throw Error(path + " cannot be mapped");
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(address_, size_); }
  char* data() const { return static_cast<char*>(address_); }
  size_t size() const { return size_; }

 private:
  void* address_;
  size_t size_;
};

/*! Memory of a mapping, as an allocator of tensors. */
struct Mapped {
  std::shared_ptr<Mapping> mapping;
  char* begin;
  void AllocData(DLTensor* tensor) { tensor->data = begin; }
  void FreeData(DLTensor*) {}
};

/*! New memory that begins with a cache line. */
struct Aligned {
  void AllocData(DLTensor* tensor) {
    size_t size = std::max<size_t>(ffi::GetDataSize(*tensor), 1);
    if (::posix_memalign(&tensor->data, kAlignment, size) != 0) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

/*! A tensor with the same values; the other one must be contiguous and in the CPU's memory. */
inline ffi::Tensor copied(const ffi::Tensor& tensor) {
  std::vector<int64_t> shape(tensor.shape().begin(), tensor.shape().end());
  ffi::Tensor copy = ffi::Tensor::FromNDAlloc(Aligned{}, ffi::Shape(shape), tensor.dtype(), DLDevice{kDLCPU, 0});
  std::copy_n(static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset(), bytes(shape, tensor.dtype()),
              static_cast<char*>(copy.data_ptr()));
  return copy;
}

/*! Copy the first `extents` of each axis from one array in C order to another. */
inline void copy_block(const char* from, const std::vector<int64_t>& from_shape, char* to,
                       const std::vector<int64_t>& to_shape, const std::vector<int64_t>& extents, int64_t item) {
  auto strides = [item](const std::vector<int64_t>& shape) {
    std::vector<int64_t> found(shape.size(), item);
    for (size_t n = shape.size(); n-- > 1;) found[n - 1] = found[n] * shape[n];
    return found;
  };
  std::vector<int64_t> from_strides = strides(from_shape), to_strides = strides(to_shape);
  if (extents.empty()) {
    std::copy_n(from, item, to);
    return;
  }
  std::function<void(size_t, const char*, char*)> copy = [&](size_t axis, const char* one, char* other) {
    if (axis + 1 == extents.size()) {
      std::copy_n(one, extents[axis] * item, other);
      return;
    }
    for (int64_t n = 0; n < extents[axis]; ++n) copy(axis + 1, one + n * from_strides[axis], other + n * to_strides[axis]);
  };
  copy(0, from, to);
}

/*! Memory of the caller. */
struct Borrowed {
  void* begin;
  void AllocData(DLTensor* tensor) { tensor->data = begin; }
  void FreeData(DLTensor*) {}
};

inline DLDataType type_of(const std::string& name, const std::string& path) {
  static const std::map<std::string, const char*> names = {
      {"BOOL", "bool"},    {"U8", "uint8"},   {"I8", "int8"},     {"U16", "uint16"},    {"I16", "int16"},
      {"U32", "uint32"},   {"I32", "int32"},  {"U64", "uint64"},  {"I64", "int64"},     {"F16", "float16"},
      {"BF16", "bfloat16"}, {"F32", "float32"}, {"F64", "float64"}};
  auto found = names.find(name);
  if (found == names.end()) throw Error(path + " is damaged: it has elements of type " + name);
  return ffi::StringToDLDataType(found->second);
}

/*! The tensors of a file of safetensors by name, in the order in which they lie there. Nothing is read or copied. */
inline std::vector<std::pair<std::string, ffi::Tensor>> tensors(const std::string& path) {
  auto mapping = std::make_shared<Mapping>(path);
  uint64_t length = 0;
  if (mapping->size() >= 8) {
    for (int n = 7; n >= 0; --n) length = length << 8 | static_cast<unsigned char>(mapping->data()[n]);
  }
  if (length < 2 || length > mapping->size() - 8) throw Error(path + " is damaged: its header is longer than the file");
  Object header = parse(std::string(mapping->data() + 8, length), path);
  struct Placed {
    int64_t begin, end;
    std::string name;
    ffi::Tensor tensor;
  };
  std::vector<Placed> found;
  for (const auto& [key, each] : header) {
    std::string name = key.cast<ffi::String>();
    if (name.rfind("__", 0) == 0) continue;  // metadata, and gaps between tensors
    Object said = each.cast<Object>();
    std::vector<int64_t> shape = integers(get<ffi::json::Array>(said, "shape", path));
    std::vector<int64_t> place = integers(get<ffi::json::Array>(said, "data_offsets", path));
    DLDataType dtype = type_of(get<ffi::String>(said, "dtype", path), path);
    int64_t begin = 8 + static_cast<int64_t>(length) + place.at(0), end = begin + place.at(1) - place.at(0);
    if (begin < 0 || end - begin != bytes(shape, dtype) || end > static_cast<int64_t>(mapping->size())) {
      throw Error(path + " is damaged: " + name + " is not there in full");
    }
    if (end > begin && begin % kAlignment) throw Error(path + " is damaged: " + name + " is not aligned");
    found.push_back({begin, end, name,
                     ffi::Tensor::FromNDAlloc(Mapped{mapping, mapping->data() + begin}, ffi::Shape(shape), dtype,
                                              DLDevice{kDLCPU, 0})});
  }
  std::sort(found.begin(), found.end(), [](const Placed& one, const Placed& other) {
    return std::tie(one.begin, one.end, one.name) < std::tie(other.begin, other.end, other.name);
  });
  std::vector<std::pair<std::string, ffi::Tensor>> ordered;
  for (Placed& each : found) ordered.emplace_back(std::move(each.name), std::move(each.tensor));
  return ordered;
}

inline std::vector<int> allowed_cores() {
  std::vector<int> found;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) found.push_back(core);
    }
  }
#endif
  for (unsigned core = 0; found.empty() || (found.size() == core && core < std::thread::hardware_concurrency()); ++core) {
    found.push_back(static_cast<int>(core));
  }
  return found;
}

inline void run_on(const std::vector<int>& cores) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core : cores) CPU_SET(core, &set);
  ::sched_setaffinity(0, sizeof(set), &set);  // of this thread
#endif
}

/*! How many threads, and where: as `placed` of family_tuner_runtime/session.py, which says why. */
inline std::pair<int, std::vector<int>> placed(int tuned_for, const Options& options) {
  std::vector<int> allowed = allowed_cores(), chosen = options.cores.empty() ? allowed : options.cores;
  for (int core : options.cores) {
    if (std::find(allowed.begin(), allowed.end(), core) == allowed.end()) {
      throw Error("this process may not use core " + std::to_string(core));
    }
  }
  int available = static_cast<int>(chosen.size());
  int count = options.threads ? options.threads : options.cores.empty() ? std::min(tuned_for, available) : available;
  if (count < 1) throw Error("a session has at least one thread");
  if (count == 1 || count >= available) return {count, chosen};
  static std::atomic<int> turns{0};
  int first = options.cores.empty() ? turns++ * count : 0;
  std::vector<int> own;
  for (int n = 0; n < count; ++n) own.push_back(chosen[(first + n) % available]);
  return {count, own};
}

/*! Runs calls one after the other in a thread of its own, which begins with the first call: TVM keeps a pool of threads
 * for each thread that calls it, and pins the caller. */
class Driver {
 public:
  Driver(int threads, std::vector<int> cores) : threads_(threads), cores_(std::move(cores)) {}
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  ~Driver() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  void run(const std::function<void()>& call) {
    std::lock_guard<std::mutex> one_at_a_time(callers_);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    std::unique_lock<std::mutex> lock(mutex_);
    call_ = &call;
    wake_.notify_one();
    done_.wait(lock, [this] { return call_ == nullptr; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void serve() {
    std::exception_ptr failure;
    try {
      configure();
    } catch (...) {
      failure = std::current_exception();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return call_ != nullptr || is_over_; });
      if (call_ == nullptr) return;
      lock.unlock();
      try {
        if (failure) std::rethrow_exception(failure);
        (*call_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      lock.lock();
      call_ = nullptr;
      done_.notify_one();
    }
  }

  /*! Give the pool of this thread its size and its place; it is made here. */
  void configure() {
    constexpr int kOneEach = -2, kShared = -3;  // TVM's kSpecifyOneCorePerThread, kSpecifyThreadShareAllCore
    int available = static_cast<int>(cores_.size());
    run_on(cores_);
    ffi::Array<ffi::String> listed;
    for (int n = 0; n < threads_; ++n) listed.push_back(std::to_string(cores_[n % available]));
    ffi::Function::GetGlobalRequired("runtime.config_threadpool")(threads_ == available ? kOneEach : kShared, threads_,
                                                                  listed);
    run_on(cores_);
  }

  const int threads_;
  const std::vector<int> cores_;
  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void()>* call_ = nullptr;
  std::exception_ptr error_;
  bool is_over_ = false;
  std::thread thread_;
};

/*! A compiled shape: a library, and the weights as it takes them (by name, with shapes; none: all, as they lie). */
struct Bucket {
  Extents extents;
  std::string library;
  std::optional<std::vector<std::pair<std::string, std::vector<int64_t>>>> weights;

  bool holds(const Extents& wanted) const {
    return std::all_of(extents.begin(), extents.end(), [&](const auto& most) { return wanted.at(most.first) <= most.second; });
  }
  int64_t size() const {
    int64_t found = 1;
    for (const auto& [name, extent] : extents) found *= extent;
    return found;
  }
};

/*! What sessions share. */
struct Loaded {
  std::string folder, entry;
  int threads;
  double tolerance;
  std::optional<std::string> reference;
  std::vector<Value> inputs, outputs;
  std::map<std::string, std::pair<int64_t, int64_t>> limits;  // of open dimensions
  std::vector<Bucket> buckets;                                // the smallest first
  std::vector<std::pair<std::string, ffi::Tensor>> weights;

  /*! The library of a bucket and its weights; loaded once. */
  std::pair<ffi::Module, std::vector<ffi::Tensor>> executable(size_t bucket) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    auto known = executables_.find(bucket);
    if (known != executables_.end()) return known->second;
    std::vector<ffi::Tensor> own;
    if (const auto& wanted = buckets[bucket].weights) {
      for (const auto& [name, shape] : *wanted) own.push_back(view(name, shape));
    } else {
      for (const auto& [name, tensor] : weights) own.push_back(tensor);
    }
    ffi::Module library = ffi::Module::LoadFromFile(folder + "/" + buckets[bucket].library);
    return executables_.emplace(bucket, std::make_pair(library, std::move(own))).first->second;
  }

 private:
  /*! A weight in another shape, over the same memory; of one with more elements, the first. */
  ffi::Tensor view(const std::string& name, const std::vector<int64_t>& shape) const {
    for (const auto& [own, tensor] : weights) {
      if (own != name) continue;
      if (bytes(shape, tensor.dtype()) > bytes({tensor.shape().begin(), tensor.shape().end()}, tensor.dtype())) break;
      struct Shared {
        ffi::Tensor owner;
        void AllocData(DLTensor* made) { made->data = owner.data_ptr(); }
        void FreeData(DLTensor*) {}
      };
      return ffi::Tensor::FromNDAlloc(Shared{tensor}, ffi::Shape(shape), tensor.dtype(), DLDevice{kDLCPU, 0});
    }
    throw Error(folder + " is damaged: its weights lack " + name);
  }

  std::mutex mutex_;
  std::map<size_t, std::pair<ffi::Module, std::vector<ffi::Tensor>>> executables_;
};

/*! What a manifest says of ranges and of what was compiled for them. */
inline void read_ranges(const Object& facts, const std::string& path, Loaded* made) {
  if (!facts.Get(ffi::String("buckets"))) {
    made->buckets.push_back({{}, get<ffi::String>(facts, "library", path), std::nullopt});
    return;
  }
  for (const auto& [key, each] : get<Object>(facts, "ranges", path)) {
    Object said = each.cast<Object>();
    made->limits[key.cast<ffi::String>()] = {get<int64_t>(said, "from", path), get<int64_t>(said, "to", path)};
  }
  for (const ffi::Any& each : get<ffi::json::Array>(facts, "buckets", path)) {
    Object said = each.cast<Object>();
    Bucket bucket{{}, get<ffi::String>(said, "library", path), std::vector<std::pair<std::string, std::vector<int64_t>>>()};
    for (const auto& [key, extent] : get<Object>(said, "extents", path)) {
      bucket.extents[key.cast<ffi::String>()] = extent.cast<int64_t>();
    }
    for (const ffi::Any& weight : get<ffi::json::Array>(said, "weights", path)) {
      auto pair = weight.cast<ffi::json::Array>();
      bucket.weights->emplace_back(pair[0].cast<ffi::String>(), integers(pair[1].cast<ffi::json::Array>()));
    }
    made->buckets.push_back(std::move(bucket));
  }
  std::stable_sort(made->buckets.begin(), made->buckets.end(),
                   [](const Bucket& one, const Bucket& other) { return one.size() < other.size(); });
}

inline std::shared_ptr<Loaded> load(const std::string& folder) {
  std::string path = folder + "/manifest.json";
  Object facts = parse(read(path), path);
  auto format = facts.Get(ffi::String("format"));
  std::optional<int64_t> found = format ? format->try_cast<int64_t>() : std::nullopt;
  if (!found || *found < kFormat || *found > kOfRanges) {
    throw Error(folder + " is not a bundle of format " + std::to_string(kFormat) + " to " + std::to_string(kOfRanges));
  }
  for (const auto& [key, each] : get<Object>(facts, "files", path)) {
    std::string name = folder + "/" + std::string(key.cast<ffi::String>());
    int64_t expected = get<int64_t>(each.cast<Object>(), "bytes", path);
    struct stat state {};
    if (::stat(name.c_str(), &state) != 0) throw Error(name + " is missing");
    if (state.st_size != expected) throw Error(name + " is damaged: its size is not what the manifest says");
  }
  auto made = std::make_shared<Loaded>();
  made->folder = folder;
  made->entry = get<ffi::String>(facts, "entry", path);
  made->threads = static_cast<int>(get<int64_t>(facts, "threads", path));
  made->tolerance = get<double>(facts, "tolerance", path);
  auto reference = facts.Get(ffi::String("reference"));
  if (reference && reference->as<ffi::String>()) made->reference = folder + "/" + std::string(reference->cast<ffi::String>());
  made->inputs = values(facts, "model_inputs", path);
  made->outputs = values(facts, "model_outputs", path);
  read_ranges(facts, path, made.get());
  made->weights = tensors(folder + "/" + std::string(get<ffi::String>(facts, "params", path)));
  if (made->limits.empty()) made->executable(0);
  return made;
}

inline ffi::Function function(const ffi::Module& module, const char* name) {
  ffi::Optional<ffi::Function> found = module->GetFunction(name);
  if (!found.has_value()) throw Error(std::string("the library has no function ") + name);
  return found.value();
}

inline void flatten(const ffi::Any& value, std::vector<ffi::Tensor>* out) {
  if (auto tensor = value.as<ffi::Tensor>()) {
    out->push_back(*tensor);
  } else {
    for (const ffi::Any& item : value.cast<ffi::Array<ffi::Any>>()) flatten(item, out);
  }
}

}  // namespace detail

/*! A compiled model that is called like a function: one session. */
class Model {
 public:
  /*!
   * Load a bundle; its weights are mapped, not read.
   *
   * Throws Error if it is not whole or not readable by this code, and tvm::ffi::Error if TVM cannot load its library.
   * Digests are compared by `python -m family_tuner_runtime check`.
   */
  explicit Model(const std::string& folder, const Options& options = {}) : Model(detail::load(folder), options) {}

  /*! Another session of the same model: it shares library and weights, and has threads and activations of its own. */
  Model session(const Options& options = {}) const { return Model(loaded_, options); }

  const std::vector<Value>& inputs() const { return loaded_->inputs; }
  const std::vector<Value>& outputs() const { return loaded_->outputs; }
  int threads() const { return threads_; }

  /*! How far outputs may be from the reference, relative to their largest value. */
  double tolerance() const { return loaded_->tolerance; }

  /*! The lowest and the highest extent of each dimension that is open; empty for a model of one shape. */
  const std::map<std::string, std::pair<int64_t, int64_t>>& ranges() const { return loaded_->limits; }

  /*! A new tensor for an input, to be filled by the caller; with the extents of the dimensions that are open, if any. */
  ffi::Tensor empty(size_t input, const Extents& extents = {}) const {
    const Value& value = loaded_->inputs.at(input);
    return ffi::Tensor::FromNDAlloc(detail::Aligned{}, ffi::Shape(value.settled(extents)), value.dtype,
                                    DLDevice{kDLCPU, 0});
  }

  /*! A tensor over memory of the caller's that has the input's values in C order; it must begin at a multiple of 64
   * bytes, else it is copied when the model is called, and stay until that returns. */
  ffi::Tensor wrap(size_t input, const void* data, const Extents& extents = {}) const {
    const Value& value = loaded_->inputs.at(input);
    return ffi::Tensor::FromNDAlloc(detail::Borrowed{const_cast<void*>(data)}, ffi::Shape(value.settled(extents)),
                                    value.dtype, DLDevice{kDLCPU, 0});
  }

  /*!
   * Compute. Each call returns memory of its own, which nobody else reads or writes then. With dimensions that are
   * open, the smallest compiled shape is used in which the inputs fit: where it is larger, they are copied and padded,
   * and outputs are cut.
   *
   * \param inputs In their order. None is copied that begins at a multiple of 64 bytes, as those of `empty` do.
   * \return The outputs in their order.
   *
   * Throws Error if number, shapes or types are not the model's, or an extent is out of its range.
   */
  std::vector<ffi::Tensor> operator()(std::vector<ffi::Tensor> inputs) {
    Extents extents = check(&inputs);
    size_t bucket = 0;
    while (!loaded_->buckets[bucket].holds(extents)) ++bucket;
    const Extents& most = loaded_->buckets[bucket].extents;
    for (size_t n = 0; n < inputs.size() && extents != most; ++n) pad(loaded_->inputs[n], most, &inputs[n]);
    const ffi::Function& infer = infer_of(bucket);
    std::vector<ffi::Tensor> outputs;
    driver_->run([&] {
      std::vector<ffi::AnyView> given(inputs.begin(), inputs.end());
      ffi::Any found;
      infer.CallPacked(given.data(), static_cast<int32_t>(given.size()), &found);
      detail::flatten(found, &outputs);
    });
    for (size_t n = 0; n < outputs.size(); ++n) {
      ffi::Tensor& output = outputs[n];
      bool is_shared = false;
      for (const auto& [name, weight] : loaded_->weights) is_shared |= output.data_ptr() == weight.data_ptr();
      for (const ffi::Tensor& input : inputs) is_shared |= output.data_ptr() == input.data_ptr();
      if (is_shared) output = detail::copied(output);
      if (extents != most) cut(loaded_->outputs.at(n), extents, &output);
    }
    return outputs;
  }

  /*! The same with the inputs by their names. */
  std::vector<ffi::Tensor> operator()(const std::map<std::string, ffi::Tensor>& named) {
    std::vector<ffi::Tensor> inputs;
    for (const Value& value : loaded_->inputs) {
      auto found = named.find(value.name);
      if (found == named.end()) throw Error("there is no value for " + value.text());
      inputs.push_back(found->second);
    }
    if (named.size() != inputs.size()) throw Error("there are values for inputs that the model does not have");
    return (*this)(std::move(inputs));
  }

  /*! Inputs and what the model should make of them, mapped, as the bundle has them; both empty if it has none. */
  std::pair<std::vector<ffi::Tensor>, std::vector<ffi::Tensor>> reference() const {
    std::pair<std::vector<ffi::Tensor>, std::vector<ffi::Tensor>> found;
    if (!loaded_->reference) return found;
    for (auto& [name, tensor] : detail::tensors(*loaded_->reference)) {
      (name.rfind("input", 0) == 0 ? found.first : found.second).push_back(std::move(tensor));
    }
    return found;
  }

 private:
  Model(std::shared_ptr<detail::Loaded> loaded, const Options& options) : loaded_(std::move(loaded)) {
    auto [threads, cores] = detail::placed(loaded_->threads, options);
    threads_ = threads;
    driver_ = std::make_unique<detail::Driver>(threads, cores);
    if (loaded_->limits.empty()) infer_of(0);
  }

  /*! What computes a bucket's shape; made when it is first needed. */
  const ffi::Function& infer_of(size_t bucket) {
    std::lock_guard<std::mutex> one_at_a_time(*making_);
    auto known = machines_.find(bucket);
    if (known != machines_.end()) return known->second.second;
    constexpr int kCpu = 1, kPooled = 2;
    auto [executable, weights] = loaded_->executable(bucket);
    ffi::Module machine = detail::function(executable, "vm_load_executable")().cast<ffi::Module>();
    detail::function(machine, "vm_initialization")(kCpu, 0, kPooled);
    std::vector<ffi::AnyView> bound = {ffi::AnyView(loaded_->entry), ffi::AnyView(kBound), ffi::AnyView(true)};
    for (const ffi::Tensor& tensor : weights) bound.emplace_back(tensor);
    ffi::Any none;
    detail::function(machine, "save_function").CallPacked(bound.data(), static_cast<int32_t>(bound.size()), &none);
    ffi::Function infer = detail::function(machine, kBound);
    return machines_.emplace(bucket, std::make_pair(machine, infer)).first->second.second;
  }

  /*! Extents of what is open, if the inputs are the model's. */
  Extents check(std::vector<ffi::Tensor>* inputs) const {
    if (inputs->size() != loaded_->inputs.size()) {
      throw Error(std::to_string(inputs->size()) + " inputs were given, and the model takes " +
                  std::to_string(loaded_->inputs.size()));
    }
    Extents extents;
    for (size_t n = 0; n < inputs->size(); ++n) {
      const Value& value = loaded_->inputs[n];
      ffi::Tensor& given = (*inputs)[n];
      std::vector<int64_t> shape(given.shape().begin(), given.shape().end());
      DLDataType dtype = given.dtype();
      bool fits = shape.size() == value.shape.size();
      for (size_t axis = 0; fits && axis < shape.size(); ++axis) {
        int64_t expected = value.is_open(axis) ? extents.emplace(value.open[axis], shape[axis]).first->second
                                               : value.shape[axis];
        fits = shape[axis] == expected;
      }
      if (!fits || dtype.code != value.dtype.code || dtype.bits != value.dtype.bits ||
          given.device().device_type != kDLCPU || !given.IsContiguous()) {
        Value found{"a tensor", shape, dtype};
        throw Error(value.text() + ", contiguous and in the CPU's memory, is what the model takes, and " + found.text() +
                    " was given for it");
      }
      auto address = reinterpret_cast<uintptr_t>(given.data_ptr()) + given.byte_offset();
      if (address % detail::kAlignment || given.byte_offset()) {
        given = detail::copied(given);
      }
    }
    for (const auto& [name, extent] : extents) {
      auto [lowest, highest] = loaded_->limits.at(name);
      if (extent < lowest || extent > highest) {
        throw Error(name + " is " + std::to_string(extent) + ", and the model was compiled for " + std::to_string(lowest) +
                    " to " + std::to_string(highest));
      }
    }
    return extents;
  }

  static std::vector<int64_t> shape_of(const ffi::Tensor& tensor) {
    return {tensor.shape().begin(), tensor.shape().end()};
  }

  /*! Bring an input to the shape of a bucket. */
  static void pad(const Value& value, const Extents& most, ffi::Tensor* input) {
    std::vector<int64_t> own = shape_of(*input), shape = value.settled(most);
    if (own == shape) return;
    ffi::Tensor padded = ffi::Tensor::FromNDAlloc(detail::Aligned{}, ffi::Shape(shape), value.dtype, DLDevice{kDLCPU, 0});
    int64_t item = (value.dtype.bits + 7) / 8;
    std::fill_n(static_cast<char*>(padded.data_ptr()), detail::bytes(shape, value.dtype), 0);
    if (value.fill) throw Error(value.text() + " is padded with what this code does not know");
    detail::copy_block(static_cast<const char*>(input->data_ptr()), own, static_cast<char*>(padded.data_ptr()), shape, own,
                       item);
    *input = padded;
  }

  /*! Leave away what was computed for the padding. */
  static void cut(const Value& value, const Extents& extents, ffi::Tensor* output) {
    std::vector<int64_t> whole = shape_of(*output), shape = value.settled(extents);
    if (whole == shape) return;
    ffi::Tensor own = ffi::Tensor::FromNDAlloc(detail::Aligned{}, ffi::Shape(shape), value.dtype, DLDevice{kDLCPU, 0});
    detail::copy_block(static_cast<const char*>(output->data_ptr()), whole, static_cast<char*>(own.data_ptr()), shape,
                       shape, (value.dtype.bits + 7) / 8);
    *output = own;
  }

  static constexpr const char* kBound = "with its weights";  // the function that has them as its last arguments

  std::shared_ptr<detail::Loaded> loaded_;
  int threads_ = 0;
  std::map<size_t, std::pair<ffi::Module, ffi::Function>> machines_;  // by bucket
  std::unique_ptr<std::mutex> making_ = std::make_unique<std::mutex>();
  std::unique_ptr<detail::Driver> driver_;  // the last member: its thread ends first
};

}  // namespace family_tuner

#endif  // FAMILY_TUNER_RUNTIME_HPP_
