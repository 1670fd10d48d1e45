// CUDA's half, as the compiler of the host has it.
#pragma once

using half = _Float16;
using __half = half;

struct alignas(4) half2 {
  half x, y;
};
using __half2 = half2;

inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
inline half __hfma(half a, half b, half c) { return half(float(a) * float(b) + float(c)); }
inline half __hmax(half a, half b) { return a > b ? a : b; }
inline half __hmin(half a, half b) { return a < b ? a : b; }
inline half hexp(half x) { return half(std::exp(float(x))); }
inline half hlog(half x) { return half(std::log(float(x))); }
inline half hsqrt(half x) { return half(std::sqrt(float(x))); }
inline half hrsqrt(half x) { return half(1 / std::sqrt(float(x))); }
inline half hrcp(half x) { return half(1 / float(x)); }
inline half hsin(half x) { return half(std::sin(float(x))); }
inline half hcos(half x) { return half(std::cos(float(x))); }
inline half htanh(half x) { return half(std::tanh(float(x))); }
inline half hfloor(half x) { return half(std::floor(float(x))); }
inline half hceil(half x) { return half(std::ceil(float(x))); }
inline half hrint(half x) { return half(std::nearbyint(float(x))); }
inline half htrunc(half x) { return half(std::trunc(float(x))); }
inline half __habs(half x) { return x < half(0) ? half(-x) : x; }
