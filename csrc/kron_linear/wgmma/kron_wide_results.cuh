// What threads of kron_linear_wide.cu have of a sample's results, and how these leave: with a predicate instead of a branch, for
// which products on their way would be waited.
#pragma once

#include "kron_linear/kron_shared.cuh"
#include "kron_wide.h"

namespace cuops {

// Stores where it is asked to, without a branch.
__device__ inline void store_if(bool stores, void* to, const Pack<float, 2>& v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to), "f"(v.at[0]),
               "f"(v.at[1]), "r"(static_cast<int>(stores))
               : "memory");
}
template <class T>
__device__ inline void store_if(bool stores, void* to, const Pack<T, 2>& v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.b32 [%0], %1;\n}" ::"l"(to),
               "r"(*reinterpret_cast<const unsigned*>(&v)), "r"(static_cast<int>(stores))
               : "memory");
}

template <class T>
__device__ inline void store_if(bool stores, void* to, const T& v) {
  static_assert(sizeof(T) == 2);
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.b16 [%0], %1;\n}" ::"l"(to),
               "h"(*reinterpret_cast<const unsigned short*>(&v)), "r"(static_cast<int>(stores))
               : "memory");
}

// Loads where it is asked to, likewise.
__device__ inline void load_if(bool loads, const void* from, Pack<float, 2>& v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.f32 {%0, %1}, [%2];\n}"
               : "+f"(v.at[0]), "+f"(v.at[1])
               : "l"(from), "r"(static_cast<int>(loads)));
}
template <class T>
__device__ inline void load_if(bool loads, const void* from, Pack<T, 2>& v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}"
               : "+r"(*reinterpret_cast<unsigned*>(&v))
               : "l"(from), "r"(static_cast<int>(loads)));
}

// What a thread has of a sample's results: kCount pairs of neighbours in a row, in rows row_of(i) and from `column` on. kOdd: of
// any number of columns, in words where all rows start with one.
template <class T, int kCount, bool kOdd>
struct WideResults {
  Pack<T, 2> v[kCount] = {};

  __device__ static int row_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  // Calls visit(i, whether there is such a row, where it is) for all pairs in an array of these rows and columns.
  template <class E, class Visit>
  __device__ static void each(E* at, int rows, int columns, int column, const Visit& visit) {
    if (column >= columns) rows = 0;
    at += threadIdx.x % 4 * 2 * columns + column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      visit(i, row_of(i) < rows, at);
      at += (i % 2 ? 7 : 1) * columns;
    }
  }

  __device__ void store(T* y, int rows, int columns, int column) const {
    const bool pairs = !kOdd || (columns % 2 == 0 && reinterpret_cast<unsigned long long>(y) % 4 == 0),
               second = column + 1 < columns;
    each(y, rows, columns, column, [&](int i, bool valid, T* at) {
      store_if(valid && pairs, at, v[i]);
      if constexpr (kOdd) {
        store_if(valid && !pairs, at, v[i].at[0]);
        store_if(valid && !pairs && second, at + 1, v[i].at[1]);
      }
    });
  }
  __device__ void load(const T* bias, int rows, int columns, int column) {
    if (!kOdd && reinterpret_cast<unsigned long long>(bias) % (2 * sizeof(T)) == 0) {
      each(bias, rows, columns, column, [&](int i, bool valid, const T* at) { load_if(valid, at, v[i]); });
    } else {
      each(bias, rows, columns, column, [&](int i, bool valid, const T* at) {
        if (valid) v[i] = {at[0], at[!kOdd || column + 1 < columns]};
      });
    }
  }
};

// The bias of a sample.
template <class T>
__device__ const T* wide_bias(const KronWideParams& p, long long sample) {
  const long long of = p.bias_lead == 1 ? 0 : sample % p.bias_lead;
  return static_cast<const T*>(p.bias) + of * (p.factors[0].out * p.factors[1].out);
}

}  // namespace cuops
