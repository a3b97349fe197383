// The tile of kron_linear in shared memory: its layout, and its way from and to device memory.
#pragma once

#include "kron_shared.cuh"

namespace cuops {

// Which part of the problem a block works on.
struct KronTile {
  long long sample, column;
  int slice;
};

// The tables of offsets, which do not depend on the tile.
template <class Acc>
__device__ void fill_tables(const KronFwdParams& p) {
  const int last = p.axes - 1;
  auto fill = [&](int table, int entries, const KronDivisor* by_size, int skip, KronDivisor chunks) {
#pragma unroll 1
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      int rest = divide(i, chunks), offset = (i - rest * static_cast<int>(chunks.divisor)) * kChunkUnits<Acc>;
#pragma unroll 1
      for (int axis = last - 1; axis >= 0; --axis) {
        if (axis == skip) continue;
        const int outer = divide(rest, by_size[axis]);
        offset += (rest - outer * static_cast<int>(by_size[axis].divisor)) * p.stride[axis];
        rest = outer;
      }
      shared_at<unsigned short>(table)[i] = static_cast<unsigned short>(offset + rest * p.sample_stride);
    }
  };
#pragma unroll 1
  for (int i = -2; i < p.steps; ++i) {
    if (i < 0) {
      fill(i == -2 ? p.in_table : p.out_table, p.samples * (i == -2 ? p.in_rows : p.out_rows), i == -2 ? p.by_in : p.by_out, -1,
           {1, 0});
    } else {
      const KronStep& step = p.step[i];
      fill(step.table, step.entries, step.by_size, step.innermost ? -1 : step.axis, step.by_chunks);
    }
  }
}

// A piece of a row of x, of `width` neighbours, on its way to the tile; `each` of them make a row.
struct TilePiece {
  const char* from;
  char* to;  // the row
  int column;
  bool valid;

  __device__ TilePiece(const KronFwdParams& p, int state, const KronTile& tile, int i, int each, int width) {
    const int row = divide(i, p.by_in_pieces), in_tile = divide(row, p.by_in_rows), rest = row - in_tile * p.in_rows;
    const long long limit = p.columns ? min(p.inner - tile.column, static_cast<long long>(p.columns)) : p.in[p.axes - 1];
    const long long sample = tile.sample + in_tile;
    column = (i - row * each) * width;
    valid = sample < p.rows && column < limit;
    from = static_cast<const char*>(p.x.data) +
           (valid ? offset_of(p.x, sample) + rest * p.in_pitch + tile.column + column : 0) * size_of(p.dtype);
    to = shared_at<char>(state + shared_at<unsigned short>(p.in_table)[row]);
  }
};

// Less than vectors: elements, which become those of the tile, or words of 16 bits each, which it has as they are. Several of a
// thread are on their way at a time.
template <class Acc, class Word>
__device__ void load_words(const KronFwdParams& p, int state, const KronTile& tile, int each, int count) {
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int start = threadIdx.x; start < count; start += kBatch * blockDim.x) {
    Word v[kBatch];
    char* to[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const TilePiece piece(p, state, tile, min(start + b * static_cast<int>(blockDim.x), count - 1), each, p.x_piece);
      if constexpr (kSame<Word, Acc>) {
        to[b] = piece.to + piece.column * sizeof(Acc);
        v[b] = piece.valid ? load_element<Acc>(p.dtype, piece.from, 0) : Acc(0);
      } else {
        to[b] = piece.to + piece.column / 8 * 32 + piece.column % 8 * 2;
        v[b] = piece.valid ? *reinterpret_cast<const Word*>(piece.from) : Word{};
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) *reinterpret_cast<Word*>(to[b]) = v[b];
  }
}

// Rows and columns beyond the end read as zero. kWiden: 16-bit elements become float32; otherwise they take the first half of
// their chunk.
template <class Acc, bool kWiden>
__device__ void load_tile(const KronFwdParams& p, int state, const KronTile& tile) {
  const unsigned short* const table = shared_at<unsigned short>(p.in_table);
  const int size = size_of(p.dtype), width = p.x_piece, units = size == 2 ? 2 : 1;
  const int each = p.in_chunks * 8 / width, count = p.samples * p.in_rows * each;
  const char* const x = static_cast<const char*>(p.x.data);
  const bool in_vectors = width * size == 16;
  if (in_vectors && p.x_linear && !(kWiden && size == 2)) {
    const long long elements = static_cast<long long>(p.in_rows) * p.in[p.axes - 1], first = tile.sample * elements;
    const long long bytes = (p.rows * elements - first) * size;
    const char* const from = x + first * size;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int row = divide(i, p.by_in_pieces), piece = i - row * each;
      const bool valid = i * 16 < bytes;
      copy_or_zero(shared_at<char>(state + table[row] + piece * units), valid ? from + i * 16 : x, valid);
    }
    return;
  }
  if (!in_vectors) {
    if (kWiden || size > 2) return load_words<Acc, Acc>(p, state, tile, each, count);
    if (width == 4) return load_words<Acc, uint2>(p, state, tile, each, count);
    return load_words<Acc, unsigned short>(p, state, tile, each, count);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const TilePiece piece(p, state, tile, i, each, width);
    if (kWiden && size == 2) {
      *reinterpret_cast<Pack<Acc, 8>*>(piece.to + piece.column * sizeof(Acc)) =
          piece.valid ? load_chunk<Acc>(p.dtype, piece.from) : Pack<Acc, 8>{};
    } else {
      copy_or_zero(piece.to + piece.column * size * units, piece.from, piece.valid);
    }
  }
}

// Where the results of a row of the tile go, and what undoes their scale.
template <class Acc, bool kScaled>
struct OutputRow {
  bool exists;
  long long start;  // in elements of y
  long long bias;
  PowerOfTwo scale;

  __device__ OutputRow(const KronFwdParams& p, const KronTile& tile, int row) {
    const int in_tile = divide(row, p.by_out_rows), rest = row - in_tile * p.out_rows + tile.slice * p.out_rows;
    const long long sample = tile.sample + in_tile;
    exists = sample < p.rows && rest < p.all_out_rows;
    start = offset_of(p.y, sample) + rest * p.out_pitch + tile.column;
    bias = p.bias ? (sample % p.bias_lead * p.all_out_rows + rest) * p.out[p.axes - 1] : 0;
    scale = PowerOfTwo(kScaled ? shared_at<int>(p.scales)[kKronSteps + in_tile] : 0);
  }
  __device__ Acc finish(const KronFwdParams& p, Acc v, int column) const {
    if constexpr (kScaled) v = scale.of(v);
    return p.bias ? v + load_element<Acc>(p.dtype, p.bias, bias + column) : v;
  }
};

// The results, which the last step left in the precision of the sums.
template <class Acc, bool kScaled>
__device__ void store_tile(const KronFwdParams& p, int state, const KronTile& tile) {
  const unsigned short* const table = shared_at<unsigned short>(p.out_table);
  const int n = p.columns ? p.columns : p.out[p.axes - 1];
  const long long limit = p.columns ? min(p.inner - tile.column, static_cast<long long>(n)) : n;
  const int each = p.y_piece == 1 ? n : p.out_chunks * 8 / p.y_piece, count = p.samples * p.out_rows * each;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int row = divide(i, p.by_out_pieces), piece = i - row * each;
    const int column = piece * p.y_piece;
    const OutputRow<Acc, kScaled> output(p, tile, row);
    if (!output.exists || column >= limit) continue;
    const Acc* const from = shared_at<Acc>(state + table[row]) + column;
    auto store = [&](int at, auto v) {
      constexpr int kWidth = sizeof(v) / sizeof(Acc);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.at[j] = output.finish(p, v.at[j], column + at + j);
      store_chunk(p.dtype, p.y.data, output.start + column + at, v);
    };
    constexpr int kVector = 16 / sizeof(Acc);  // of float32 and float64: rows of 16 bits are whole chunks, or have no vectors
    if (p.y_piece == 8 && column + 8 <= limit) {
      store(0, *reinterpret_cast<const Pack<Acc, 8>*>(from));
    } else if (p.y_piece == 8) {
      for (int at = 0; at < limit - column; at += kVector) store(at, *reinterpret_cast<const Pack<Acc, kVector>*>(from + at));
    } else if (p.y_piece == 4) {
      store(0, *reinterpret_cast<const Pack<Acc, 4>*>(from));
    } else {
      store(0, Pack<Acc, 1>{*from});
    }
  }
}

}  // namespace cuops
