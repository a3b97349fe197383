// A tile of the kernels of small factors, on its way from device memory to shared memory and back.
#pragma once

#include "kron_fibers.h"
#include "kron_linear/kron_shared.cuh"

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

// Of each array the pieces of a thread are on their way at the same time.
template <int kWidth, class T, class Acc, int kArrays>
__device__ void load_pieces(const KronFibersChain& p, const KronFibersArray* const (&arrays)[kArrays], const FibersTile& tile,
                            Acc* const (&states)[kArrays]) {
  constexpr int kBatch = 4;
  const int threads = blockDim.x;
  int pieces[kArrays], most = 0;
#pragma unroll
  for (int a = 0; a < kArrays; ++a) {
    pieces[a] = tile.samples * arrays[a]->runs * arrays[a]->run / kWidth;
    most = max(most, pieces[a]);
  }
#pragma unroll 1
  for (int start = threadIdx.x; start < most; start += kBatch * threads) {
    Fetched<T, kWidth> v[kArrays][kBatch] = {};
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (start + b * threads >= pieces[a]) break;
        const FibersPiece<kWidth> piece(p, *arrays[a], tile, start + b * threads);
        if (piece.valid) v[a][b] = fetch<T, kWidth>(static_cast<const T*>(arrays[a]->rows.data) + piece.at);
      }
    }
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (start + b * threads >= pieces[a]) break;
        store_pack(states[a] + kWidth * (start + b * threads), convert<Acc>(v[a][b].pack()));
      }
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
template <class Acc, int kArrays>
__device__ void load_samples(const KronFibersChain& p, const KronFibersArray* const (&arrays)[kArrays], const FibersTile& tile,
                             Acc* const (&states)[kArrays]) {
  bool in_fours = true;
#pragma unroll
  for (int a = 0; a < kArrays; ++a) in_fours &= moves_in_fours(*arrays[a], tile);
  with_element<Acc>(p.dtype, [&](auto element) {
    if (in_fours) {
      load_pieces<4, decltype(element)>(p, arrays, tile, states);
    } else {
      load_pieces<1, decltype(element)>(p, arrays, tile, states);
    }
  });
}
template <class Acc>
__device__ void store_samples(const KronFibersChain& p, const KronFibersArray& array, const FibersTile& tile, const Acc* state,
                              const void* bias = nullptr, long long bias_lead = 1) {
  with_element<Acc>(p.dtype, [&](auto element) {
    using T = decltype(element);
    if (moves_in_fours(array, tile)) {
      store_pieces<4>(p, array, tile, state, static_cast<const T*>(bias), bias_lead);
    } else {
      store_pieces<1>(p, array, tile, state, static_cast<const T*>(bias), bias_lead);
    }
  });
}

}  // namespace cuops
