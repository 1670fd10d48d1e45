/*!
 * Runs models that family-tuner compiled, without Python.
 *
 *     family_tuner::Model model("compiled/");
 *     auto x = model.empty(0);                       // a tensor for the first input, to be filled
 *     std::vector<tvm::ffi::Tensor> y = model({x});
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

/*! An input or an output. */
struct Value {
  std::string name;
  std::vector<int64_t> shape;
  DLDataType dtype;

  std::string text() const {
    std::ostringstream told;
    told << name << ": " << std::string(ffi::DLDataTypeToString(dtype)) << "[";
    for (size_t n = 0; n < shape.size(); ++n) told << (n ? ", " : "") << shape[n];
    told << "]";
    return told.str();
  }
};

namespace detail {

constexpr int64_t kAlignment = 64;  // bytes: what TVM's kernels assume
constexpr int kFormat = 1;          // of bundles: what this code reads

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
    found.push_back({get<ffi::String>(said, "name", path), integers(get<ffi::json::Array>(said, "shape", path)),
                     ffi::StringToDLDataType(get<ffi::String>(said, "dtype", path))});
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

/*! What sessions share. */
struct Loaded {
  std::string folder, entry;
  int threads;
  double tolerance;
  std::optional<std::string> reference;
  std::vector<Value> inputs, outputs;
  ffi::Optional<ffi::Module> executable;
  std::vector<ffi::Tensor> weights;
};

inline std::shared_ptr<Loaded> load(const std::string& folder) {
  std::string path = folder + "/manifest.json";
  Object facts = parse(read(path), path);
  auto format = facts.Get(ffi::String("format"));
  if (!format || format->try_cast<int64_t>() != std::optional<int64_t>(kFormat)) {
    throw Error(folder + " is not a bundle of format " + std::to_string(kFormat));
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
  made->executable = ffi::Module::LoadFromFile(folder + "/" + std::string(get<ffi::String>(facts, "library", path)));
  for (auto& [name, tensor] : tensors(folder + "/" + std::string(get<ffi::String>(facts, "params", path)))) {
    made->weights.push_back(std::move(tensor));
  }
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

  /*! A new tensor for an input, to be filled by the caller. */
  ffi::Tensor empty(size_t input) const {
    const Value& value = loaded_->inputs.at(input);
    return ffi::Tensor::FromNDAlloc(detail::Aligned{}, ffi::Shape(value.shape), value.dtype, DLDevice{kDLCPU, 0});
  }

  /*! A tensor over memory of the caller's that has the input's values in C order; it must begin at a multiple of 64
   * bytes, else it is copied when the model is called, and stay until that returns. */
  ffi::Tensor wrap(size_t input, const void* data) const {
    const Value& value = loaded_->inputs.at(input);
    return ffi::Tensor::FromNDAlloc(detail::Borrowed{const_cast<void*>(data)}, ffi::Shape(value.shape), value.dtype,
                                    DLDevice{kDLCPU, 0});
  }

  /*!
   * Compute. Each call returns memory of its own, which nobody else reads or writes then.
   *
   * \param inputs In their order. None is copied that begins at a multiple of 64 bytes, as those of `empty` do.
   * \return The outputs in their order.
   *
   * Throws Error if number, shapes or types are not the model's.
   */
  std::vector<ffi::Tensor> operator()(std::vector<ffi::Tensor> inputs) {
    check(&inputs);
    std::vector<ffi::Tensor> outputs;
    driver_->run([&] {
      std::vector<ffi::AnyView> given(inputs.begin(), inputs.end());
      ffi::Any found;
      infer_.CallPacked(given.data(), static_cast<int32_t>(given.size()), &found);
      detail::flatten(found, &outputs);
    });
    for (ffi::Tensor& output : outputs) {
      bool is_shared = false;
      for (const ffi::Tensor& weight : loaded_->weights) is_shared |= output.data_ptr() == weight.data_ptr();
      for (const ffi::Tensor& input : inputs) is_shared |= output.data_ptr() == input.data_ptr();
      if (is_shared) output = detail::copied(output);
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
    constexpr int kCpu = 1, kPooled = 2;
    ffi::Module executable = loaded_->executable.value();
    machine_ = detail::function(executable, "vm_load_executable")().cast<ffi::Module>();
    detail::function(machine_.value(), "vm_initialization")(kCpu, 0, kPooled);
    std::vector<ffi::AnyView> bound = {ffi::AnyView(loaded_->entry), ffi::AnyView(kBound), ffi::AnyView(true)};
    for (const ffi::Tensor& tensor : loaded_->weights) bound.emplace_back(tensor);
    ffi::Any none;
    detail::function(machine_.value(), "save_function")
        .CallPacked(bound.data(), static_cast<int32_t>(bound.size()), &none);
    infer_ = detail::function(machine_.value(), kBound);
  }

  void check(std::vector<ffi::Tensor>* inputs) const {
    if (inputs->size() != loaded_->inputs.size()) {
      throw Error(std::to_string(inputs->size()) + " inputs were given, and the model takes " +
                  std::to_string(loaded_->inputs.size()));
    }
    for (size_t n = 0; n < inputs->size(); ++n) {
      const Value& value = loaded_->inputs[n];
      ffi::Tensor& given = (*inputs)[n];
      std::vector<int64_t> shape(given.shape().begin(), given.shape().end());
      DLDataType dtype = given.dtype();
      if (shape != value.shape || dtype.code != value.dtype.code || dtype.bits != value.dtype.bits ||
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
  }

  static constexpr const char* kBound = "with its weights";  // the function that has them as its last arguments

  std::shared_ptr<detail::Loaded> loaded_;
  int threads_ = 0;
  ffi::Optional<ffi::Module> machine_;
  ffi::Function infer_;
  std::unique_ptr<detail::Driver> driver_;  // the last member: its thread ends first
};

}  // namespace family_tuner

#endif  // FAMILY_TUNER_RUNTIME_HPP_
