// Products of small factors with the fibers of a tile in shared memory, without tensor cores: a thread has whole fibers in
// registers.
#pragma once

#include "../kron_fibers.h"
#include "kron_tile.cuh"

namespace cuops {

// Which part of the problem a tile is: so many samples, or so many columns of one.
struct FibersTile {
  long long sample, column;
  int samples, columns;

  __device__ FibersTile(const KronFibersChain& p, long long index) : column(0), columns(0) {
    if (p.columns == 0) {
      sample = index * p.samples;
      samples = static_cast<int>(min(static_cast<long long>(p.samples), p.rows - sample));
    } else {
      sample = index / p.column_tiles;
      samples = 1;
      column = (index - sample * p.column_tiles) * p.columns;
      columns = static_cast<int>(min(static_cast<long long>(p.columns), p.inner - column));
    }
  }
};

// Elements of a tile that move together: where they are in device memory, and whether.
template <int kWidth>
struct FibersPiece {
  int first;  // of the tile's elements
  long long at;
  bool valid;

  __device__ FibersPiece(const KronFibersChain& p, const KronFibersArray& array, const FibersTile& tile, int piece)
      : first(piece * kWidth), valid(true) {
    if (array.dense) {
      at = tile.sample * array.run + first;
      return;
    }
    const int run = divide(first, array.by_run), column = first - run * array.run;
    if (tile.columns == 0) {
      at = offset_of(array.rows, tile.sample + run) + column;
    } else {
      valid = column < tile.columns;
      at = offset_of(array.rows, tile.sample) + tile.column + run * p.inner + column;
    }
  }
};

template <int kWidth, class T, class Acc>
__device__ void load_pieces(const KronFibersChain& p, const KronFibersArray& array, const FibersTile& tile, Acc* state) {
  constexpr int kBatch = 4;
  const int pieces = tile.samples * array.runs * array.run / kWidth, threads = blockDim.x;
#pragma unroll 1
  for (int start = threadIdx.x; start < pieces; start += kBatch * threads) {
    Pack<T, kWidth> v[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (start + b * threads >= pieces) break;
      const FibersPiece<kWidth> piece(p, array, tile, start + b * threads);
      if (piece.valid) v[b] = load_pack<T, kWidth>(static_cast<const T*>(array.rows.data) + piece.at);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (start + b * threads >= pieces) break;
      store_pack(state + kWidth * (start + b * threads), convert<Acc>(v[b]));
    }
  }
}

template <int kWidth, class T, class Acc>
__device__ void store_pieces(const KronFibersChain& p, const KronFibersArray& array, const FibersTile& tile, const Acc* state,
                             const T* bias, long long bias_lead) {
  const int pieces = tile.samples * array.runs * array.run / kWidth;
#pragma unroll 2
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
    const FibersPiece<kWidth> piece(p, array, tile, i);
    if (!piece.valid) continue;
    auto v = load_pack<Acc, kWidth>(state + piece.first);
    if (bias) {  // then runs are samples, into two of which a piece may reach
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int run = divide(piece.first + j, array.by_run);
        const long long lead = bias_lead == 1 ? 0 : (tile.sample + run) % bias_lead;
        v.at[j] += convert<Acc>(bias[lead * array.run + piece.first + j - run * array.run]);
      }
    }
    store_pack(static_cast<T*>(array.rows.data) + piece.at, convert<T>(v));
  }
}

__device__ inline bool moves_in_fours(const KronFibersArray& array, const FibersTile& tile) {
  return array.together == 4 && tile.samples * array.run % 4 == 0;
}

// From device memory to shared memory, and back. Columns that are not there become zeros.
template <class Acc>
__device__ void load_samples(const KronFibersChain& p, const KronFibersArray& array, const FibersTile& tile, Acc* state) {
  with_dtype<Acc>(p.dtype, [&](auto element) {
    if (moves_in_fours(array, tile)) {
      load_pieces<4, decltype(element)>(p, array, tile, state);
    } else {
      load_pieces<1, decltype(element)>(p, array, tile, state);
    }
  });
}
template <class Acc>
__device__ void store_samples(const KronFibersChain& p, const KronFibersArray& array, const FibersTile& tile, const Acc* state,
                              const void* bias = nullptr, long long bias_lead = 1) {
  with_dtype<Acc>(p.dtype, [&](auto element) {
    using T = decltype(element);
    if (moves_in_fours(array, tile)) {
      store_pieces<4>(p, array, tile, state, static_cast<const T*>(bias), bias_lead);
    } else {
      store_pieces<1>(p, array, tile, state, static_cast<const T*>(bias), bias_lead);
    }
  });
}

// An element of what shared memory has of the weights, zeros around each: where it is, and its value, a product of the factors'.
template <class Acc>
class FibersWeight {
 public:
  __device__ FibersWeight(const KronFibersChain& p, int i) : p_(p), exists_(i < p.weights) {
    if (!exists_) return;
    while (step_ + 1 < p.steps && i >= p.step[step_ + 1].weight) ++step_;
    const KronFibersStep& step = p.step[step_];
    const int pitch = fibers_pitch(step.out, step.in);
    row_ = (i - step.weight) / pitch;
    column_ = i - step.weight - row_ * pitch;
    exists_ = row_ < step.out && column_ < step.in;
  }
  __device__ Acc value() const {
    Acc v = exists_;
    const KronFibersStep& step = p_.step[step_];
    int row = row_, column = column_;
#pragma unroll 1
    for (int j = step.first + step.count - 1; exists_ && j >= step.first; --j) {
      const KronFactor& f = p_.factors[j];
      const int outer_row = j > step.first ? divide(row, f.by_out) : 0, outer_column = j > step.first ? divide(column, f.by_in) : 0;
      const long long at = (row - outer_row * f.out) * f.row_stride + (column - outer_column * f.in) * f.column_stride;
      v *= load_element<Acc>(p_.dtype, f.data, at);
      row = outer_row;
      column = outer_column;
    }
    return v;
  }

 private:
  const KronFibersChain& p_;
  bool exists_;
  int step_ = 0, row_ = 0, column_ = 0;
};

// A product along an axis: of a step, or for its gradient of the transposed factor.
struct FibersProduct {
  int out, in, inner, weight;
  KronDivisor by_inner;

  __device__ FibersProduct(const KronFibersStep& s, bool transposed)
      : out(transposed ? s.in : s.out),
        in(transposed ? s.out : s.in),
        inner(s.inner),
        weight(transposed ? s.transposed : s.weight),
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
  switch (fibers_class(axis.out, axis.in)) {
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
