// Tensor cores by CUDA's warp matrix functions. A warp holds a matrix together: of m x n elements a lane has m * n / 32.
//
// Which lane has which is not defined on a GPU, so programs must not depend on it; here it is the row-major order.
// Products of halves are exact in float; sums are in the accumulator's type at the end of each call.
#pragma once

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K>
struct Shape;
template <int M, int N, int K>
struct Shape<matrix_a, M, N, K> {
  static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct Shape<matrix_b, M, N, K> {
  static constexpr int rows = K, columns = N;
};
template <int M, int N, int K>
struct Shape<accumulator, M, N, K> {
  static constexpr int rows = M, columns = N;
};

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment : Shape<Use, M, N, K> {
  using element = T;
  static constexpr int num_elements = Shape<Use, M, N, K>::rows * Shape<Use, M, N, K>::columns / 32;
  T x[num_elements];

  fragment() { memset(static_cast<void*>(x), 0xFF, sizeof x); }
};

// Where an element of this lane lies in memory.
template <class F>
size_t place(int n, unsigned stride, bool by_rows) {
  const int element = standin::lane() * F::num_elements + n;
  const size_t row = element / F::columns, column = element % F::columns;
  return by_rows ? row * stride + column : column * stride + row;
}

template <class F, class V>
void fill_fragment(F& fragment, V value) {
  for (auto& each : fragment.x) each = typename F::element(value);
}

template <class Use, int M, int N, int K, class T, class Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& into, const T* from, unsigned stride) {
  using F = fragment<Use, M, N, K, T, Layout>;
  standin::sync_warp(~0u);
  for (int n = 0; n < F::num_elements; n++) into.x[n] = from[place<F>(n, stride, std::is_same_v<Layout, row_major>)];
}

template <int M, int N, int K, class T>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& into, const T* from, unsigned stride, layout_t layout) {
  using F = fragment<accumulator, M, N, K, T>;
  standin::sync_warp(~0u);
  for (int n = 0; n < F::num_elements; n++) into.x[n] = from[place<F>(n, stride, layout == mem_row_major)];
}

template <int M, int N, int K, class T>
void store_matrix_sync(T* to, const fragment<accumulator, M, N, K, T>& from, unsigned stride, layout_t layout) {
  using F = fragment<accumulator, M, N, K, T>;
  for (int n = 0; n < F::num_elements; n++) to[place<F>(n, stride, layout == mem_row_major)] = from.x[n];
  standin::sync_warp(~0u);
}

// All elements of a matrix that the warp holds, in row-major order, as wide as sums are.
template <class Sum, class F>
void gather(const F& mine, Sum* all) {
  void** lanes = standin::exchange(const_cast<F*>(&mine), ~0u);
  for (int lane = 0; lane < 32; lane++) {
    if (!lanes[lane]) standin::trap("multiplied matrices in a warp that is not whole");
    for (int n = 0; n < F::num_elements; n++)
      all[lane * F::num_elements + n] = Sum(static_cast<const F*>(lanes[lane])->x[n]);
  }
  standin::sync_warp(~0u);
}

template <int M, int N, int K, class T, class A, class B, class LayoutA, class LayoutB>
void mma_sync(fragment<accumulator, M, N, K, T>& d, const fragment<matrix_a, M, N, K, A, LayoutA>& a,
              const fragment<matrix_b, M, N, K, B, LayoutB>& b, const fragment<accumulator, M, N, K, T>& c) {
  using Sum = std::conditional_t<std::is_integral_v<T>, int, float>;
  Sum left[M * K], right[K * N];
  gather(a, left);
  gather(b, right);
  using F = fragment<accumulator, M, N, K, T>;
  for (int n = 0; n < F::num_elements; n++) {
    const int element = standin::lane() * F::num_elements + n, row = element / N, column = element % N;
    Sum sum = Sum(c.x[n]);
    for (int k = 0; k < K; k++) sum += left[row * K + k] * right[k * N + column];
    d.x[n] = T(sum);
  }
}

}  // namespace nvcuda::wmma
