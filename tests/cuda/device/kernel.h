// CUDA C++ as TVM writes it, for a compiler of the host: the first that each kernel includes.
//
// `compiler.py` changes what macros cannot: declarations of shared memory, and PTX.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace standin {

struct Dim3 {
  unsigned x, y, z;
};

// The device's side: see device.h.
Dim3& thread_index();
Dim3& block_index();
Dim3& block_size();
Dim3& grid_size();
void* dynamic_shared();
void* static_shared(int number, size_t bytes);
void sync_block();
void sync_warp(unsigned lanes);
unsigned active_lanes();
int lane();
void** exchange(void* mine, unsigned lanes);
[[noreturn]] void trap(const char* why);

template <class Array>
Array& shared_array(int number) {
  return *static_cast<Array*>(static_shared(number, sizeof(Array)));
}

template <class... P, size_t... N>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<N...>) {
  kernel(*static_cast<std::remove_cv_t<P>*>(arguments[N])...);
}

template <class... P>
void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>());
}

// What a lane gets from another one of its warp; garbage from a lane that takes no part, as on a GPU.
template <class T>
T from_lane(T value, unsigned lanes, int source) {
  void** all = exchange(&value, lanes);
  T found;
  if (source >= 0 && source < 32 && all[source])
    memcpy(static_cast<void*>(&found), all[source], sizeof found);
  else
    memset(static_cast<void*>(&found), 0xFF, sizeof found);
  sync_warp(lanes);  // until all have read
  return found;
}

}  // namespace standin

#define threadIdx standin::thread_index()
#define blockIdx standin::block_index()
#define blockDim standin::block_size()
#define gridDim standin::grid_size()

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __ldg(address) (*(address))

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDA_ARCH__ 800

inline void __syncthreads() { standin::sync_block(); }
inline void __syncwarp(unsigned lanes = ~0u) { standin::sync_warp(lanes); }
inline unsigned __activemask() { return standin::active_lanes(); }

template <class T>
T __shfl_sync(unsigned lanes, T value, int source, int width = 32) {
  return standin::from_lane(value, lanes, standin::lane() / width * width + (source & (width - 1)));
}

template <class T>
T __shfl_up_sync(unsigned lanes, T value, unsigned delta, int width = 32) {
  const int lane = standin::lane(), inside = lane & (width - 1);
  return standin::from_lane(value, lanes, inside >= int(delta) ? lane - int(delta) : lane);
}

template <class T>
T __shfl_down_sync(unsigned lanes, T value, unsigned delta, int width = 32) {
  const int lane = standin::lane(), inside = lane & (width - 1);
  return standin::from_lane(value, lanes, inside + int(delta) < width ? lane + int(delta) : lane);
}

template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask, int width = 32) {
  const int lane = standin::lane(), source = lane ^ mask;
  return standin::from_lane(value, lanes, source / width <= lane / width ? source : lane);
}

// Vectors.

#define STANDIN_VECTORS(T, name)                                                                             \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                         \
  struct name##3 { T x, y, z; };                                                                             \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                         \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                 \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                         \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

STANDIN_VECTORS(float, float)
STANDIN_VECTORS(double, double)
STANDIN_VECTORS(int, int)
STANDIN_VECTORS(unsigned, uint)
STANDIN_VECTORS(short, short)
STANDIN_VECTORS(unsigned short, ushort)
STANDIN_VECTORS(signed char, char)
STANDIN_VECTORS(unsigned char, uchar)
STANDIN_VECTORS(long long, longlong)
STANDIN_VECTORS(unsigned long long, ulonglong)

// Functions that C++ does not have, or has by other names.

template <class A, class B>
inline auto max(A a, B b) -> std::common_type_t<A, B> {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmax(a, b);  // a number beats NaN
  return a > b ? a : b;
}

template <class A, class B>
inline auto min(A a, B b) -> std::common_type_t<A, B> {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmin(a, b);
  return a < b ? a : b;
}

inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float exp10f(float x) { return std::pow(10.0f, x); }
inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }

// Four products of bytes, added.
inline int __dp4a(int a, int b, int sum) {
  for (int n = 0; n < 4; n++) sum += int(int8_t(a >> 8 * n)) * int(int8_t(b >> 8 * n));
  return sum;
}

inline void __trap() { standin::trap("called __trap"); }
