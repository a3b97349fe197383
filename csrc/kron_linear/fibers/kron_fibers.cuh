// Products of small factors with the fibers of a tile in shared memory, without tensor cores: a thread has whole fibers in
// registers.
#pragma once

#include "kron_fibers_tile.cuh"

namespace cuops {

// An element of what shared memory has of the weights, zeros around each: the product of elements of the factors.
template <class Acc>
class FibersWeight {
 public:
  // Finds them, without reading what the kernel before may still write.
  __device__ FibersWeight(const KronFibersChain& p, int i) : dtype_(p.dtype), exists_(i < p.weights), from_{} {
    if (!exists_) return;
    int s = 0;
    while (s + 1 < p.steps && i >= p.step[s + 1].weight.at) ++s;
    const KronFibersStep& step = p.step[s];
    int row = divide(i - step.weight.at, step.weight.by_pitch), column = i - step.weight.at - row * step.weight.pitch;
    exists_ = row < step.out && column < step.in;
#pragma unroll
    for (int j = kFibersMerged - 1; j >= 0; --j) {
      if (exists_ && j < step.count) {
        const KronFactor& f = p.factors[step.first + j];
        const int outer_row = j > 0 ? divide(row, f.by_out) : 0, outer_column = j > 0 ? divide(column, f.by_in) : 0;
        const long long at = (row - outer_row * f.out) * f.row_stride + (column - outer_column * f.in) * f.column_stride;
        from_[j] = static_cast<const char*>(f.data) + at * size_of(dtype_);
        row = outer_row;
        column = outer_column;
      }
      asm volatile("" : "+l"(from_[j]));
    }
  }
  // Sets them on their way, as they are.
  __device__ void load() {
#pragma unroll
    for (int j = 0; j < kFibersMerged; ++j) {
      if (from_[j] == nullptr) continue;
      if constexpr (kSame<Acc, double>) {
        v_[j] = *static_cast<const double*>(from_[j]);
      } else {
        v_[j] = size_of(dtype_) == 4 ? *static_cast<const unsigned*>(from_[j]) : *static_cast<const unsigned short*>(from_[j]);
      }
    }
  }
  __device__ Acc value() const {
    Acc product = exists_;
#pragma unroll
    for (int j = 0; j < kFibersMerged; ++j) {
      if (from_[j] == nullptr) continue;
      if constexpr (kSame<Acc, double>) {
        product *= v_[j];
      } else {
        product *= dtype_ == kFloat32   ? __uint_as_float(v_[j])
                   : dtype_ == kFloat16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(v_[j])))
                                        : __uint_as_float(v_[j] << 16);
      }
    }
    return product;
  }

 private:
  DType dtype_;
  bool exists_;
  const void* from_[kFibersMerged];
  Select<kSame<Acc, double>, double, unsigned> v_[kFibersMerged];
};

// All of them, for a block of which each thread has had the first one loaded.
template <class Acc>
__device__ void store_weights(const KronFibersChain& p, Acc first, Acc* weights) {
  int i = threadIdx.x;
  if (i >= p.weights) return;
  weights[i] = first;
#pragma unroll 1
  while ((i += blockDim.x) < p.weights) {
    FibersWeight<Acc> other(p, i);
    other.load();
    weights[i] = other.value();
  }
}

// A product along an axis: of a step, or for its gradient of the transposed factor.
struct FibersProduct {
  int out, in, inner, weight, size;
  KronDivisor by_inner;

  __device__ FibersProduct(const KronFibersStep& s, bool transposed)
      : out(transposed ? s.in : s.out),
        in(transposed ? s.out : s.in),
        inner(s.inner),
        weight(transposed ? s.transposed.at : s.weight.at),
        size(transposed ? s.transposed.size : s.weight.size),
        by_inner(s.by_inner) {}
};

// A fiber of an axis whose elements are `inner` apart.
struct Fiber {
  int before, beyond;
  __device__ Fiber(int fiber, KronDivisor by_inner) {
    const int outer = divide(fiber, by_inner);
    before = outer * static_cast<int>(by_inner.divisor);
    beyond = fiber - before;
  }
  // Where it starts, if its axis has so many elements.
  __device__ int start(int size) const { return before * size + beyond; }
};

// Of kSize elements of a fiber, those that are there; neighbours together, where all are.
template <int kSize>
constexpr int kFiberVector = kSize % 4 == 0 ? 4 : 2;
template <class Acc, int kSize>
__device__ void load_fiber(const Acc* from, int inner, int size, Acc (&v)[kSize]) {
  if (size != kSize) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) v[k] = k < size ? from[k * inner] : Acc(0);
  } else if (kSize % 2 == 0 && inner == 1) {
    constexpr int kVector = kFiberVector<kSize>;
#pragma unroll
    for (int k = 0; k < kSize; k += kVector) {
      const auto some = load_pack<Acc, kVector>(from + k);
#pragma unroll
      for (int j = 0; j < kVector; ++j) v[k + j] = some.at[j];
    }
  } else {
#pragma unroll
    for (int k = 0; k < kSize; ++k, from += inner) v[k] = *from;
  }
}
template <class Acc, int kSize>
__device__ void store_fiber(Acc* to, int inner, int size, bool together, const Acc (&v)[kSize]) {
  if (size < kSize) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if (k < size) to[k * inner] = v[k];
    }
  } else if (kSize % 2 == 0 && together) {
    constexpr int kVector = kFiberVector<kSize>;
#pragma unroll
    for (int k = 0; k < kSize; k += kVector) {
      Pack<Acc, kVector> some;
#pragma unroll
      for (int j = 0; j < kVector; ++j) some.at[j] = v[k + j];
      store_pack(to + k, some);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kSize; ++k, to += inner) *to = v[k];
  }
}

// A small weight in registers.
template <class Acc, int kSize>
__device__ void load_weight(const Acc* from, Acc (&weight)[kSize][kSize]) {
#pragma unroll
  for (int o = 0; o < kSize; ++o) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) weight[o][k] = from[o * fibers_pitch(kSize, kSize) + k];
  }
}
template <class Acc, int kSize>
__device__ void multiply(const Acc (&weight)[kSize][kSize], const Acc (&v)[kSize], Acc (&sum)[kSize]) {
#pragma unroll
  for (int o = 0; o < kSize; ++o) {
    sum[o] = weight[o][0] * v[0];
#pragma unroll
    for (int k = 1; k < kSize; ++k) sum[o] += weight[o][k] * v[k];
  }
}

// A warp takes kFibers fibers a lane at a time, and a lane those 32 apart. `from` and `to` may be the same where in == out.
template <class Acc, int kSize>
__device__ void multiply_small(const FibersProduct& axis, const Acc* weights, const Acc* from, Acc* to, int fibers) {
  constexpr int kFibers = 2;
  Acc weight[kSize][kSize];
  load_weight(weights + axis.weight, weight);
  const bool together = axis.inner == 1 && axis.out == kSize;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / 32 * 32 * kFibers; first < fibers; first += kFibers * blockDim.x) {
    Acc v[kFibers][kSize];
    int at[kFibers];
#pragma unroll
    for (int f = 0; f < kFibers; ++f) {
      const Fiber fiber(min(first + 32 * f + lane, fibers - 1), axis.by_inner);
      load_fiber(from + fiber.start(axis.in), axis.inner, axis.in, v[f]);
      at[f] = fiber.start(axis.out);
    }
    __syncwarp();  // lanes beyond the last fiber have read it too
#pragma unroll
    for (int f = 0; f < kFibers; ++f) {
      if (first + 32 * f + lane >= fibers) break;
      Acc sum[kSize];
      multiply(weight, v[f], sum);
      store_fiber(to + at[f], axis.inner, axis.out, together, sum);
    }
  }
}

// The same for larger ones, with the weight in shared memory.
template <class Acc, int kIn, int kFibers>
__device__ void multiply_fibers(const FibersProduct& axis, const Acc* weights, const Acc* from, Acc* to, int fibers) {
  constexpr int kPitch = fibers_pitch(kIn, kIn), kOuts = 4;
  const int lane = threadIdx.x % 32;
  const bool together = axis.inner == 1 && axis.out % kOuts == 0;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / 32 * 32 * kFibers; first < fibers; first += kFibers * blockDim.x) {
    Acc v[kFibers][kIn];
    Acc* at[kFibers];
#pragma unroll
    for (int f = 0; f < kFibers; ++f) {
      const Fiber fiber(min(first + 32 * f + lane, fibers - 1), axis.by_inner);
      load_fiber(from + fiber.start(axis.in), axis.inner, axis.in, v[f]);
      at[f] = to + fiber.start(axis.out);
    }
    __syncwarp();  // lanes beyond the last fiber have read it too
    const Acc* weight = weights + axis.weight;
#pragma unroll 1
    for (int o = 0; o < axis.out; o += kOuts) {
      Acc sum[kFibers][kOuts] = {};
#pragma unroll
      for (int r = 0; r < kOuts; ++r) {
#pragma unroll
        for (int k = 0; k < kIn; k += 4) {
          const auto w = load_anew<4>(weight + r * kPitch + k);
#pragma unroll
          for (int f = 0; f < kFibers; ++f) {
#pragma unroll
            for (int j = 0; j < 4 && k + j < kIn; ++j) sum[f][r] += w.at[j] * v[f][k + j];
          }
        }
      }
#pragma unroll
      for (int f = 0; f < kFibers; ++f) {
        if (first + 32 * f + lane < fibers) store_fiber(at[f], axis.inner, min(kOuts, axis.out - o), together, sum[f]);
        at[f] += kOuts * axis.inner;
      }
      weight += kOuts * kPitch;
    }
  }
}

template <class Acc, int kIn, int kMany>
__device__ void multiply_some(const FibersProduct& axis, const Acc* weights, const Acc* from, Acc* to, int fibers) {
  if (fibers > static_cast<int>(blockDim.x) * kMany / 2) {
    multiply_fibers<Acc, kIn, sizeof(Acc) == 4 ? kMany : kMany / 2>(axis, weights, from, to, fibers);
  } else {
    multiply_fibers<Acc, kIn, 1>(axis, weights, from, to, fibers);
  }
}

template <class Acc>
__device__ void multiply_axis(const FibersProduct& axis, const Acc* weights, const Acc* from, Acc* to, int fibers) {
  if (static_cast<int>(threadIdx.x) / 32 * 32 >= fibers) return;  // this warp has none
  switch (axis.size) {
    case 2: return multiply_small<Acc, 2>(axis, weights, from, to, fibers);
    case 3: return multiply_small<Acc, 3>(axis, weights, from, to, fibers);
    case 4: return multiply_small<Acc, 4>(axis, weights, from, to, fibers);
    case 6: return multiply_small<Acc, 6>(axis, weights, from, to, fibers);
    case 8: return multiply_some<Acc, 8, 4>(axis, weights, from, to, fibers);
    case 9: return multiply_some<Acc, 9, 4>(axis, weights, from, to, fibers);
    case 12: return multiply_some<Acc, 12, 2>(axis, weights, from, to, fibers);
    default: return multiply_some<Acc, 16, 2>(axis, weights, from, to, fibers);
  }
}

}  // namespace cuops
