// What kron_linear_factor_bwd.cu multiplies, on its way through shared memory to the registers of tensor cores.
#pragma once

#include "kron_factor_bwd.h"
#include "kron_linear/kron_shared.cuh"

namespace cuops {

// 16 bytes likewise, in pieces that exist or do not.
template <int kPiece>
__device__ inline void copy_pieces(unsigned to, const char* from, int existing) {
#pragma unroll
  for (int i = 0; i < 16; i += kPiece) copy_bytes<kPiece>(to + i, from + i, i < existing ? kPiece : 0);
}

// Whether an element of 16 bits is the second one of a word.
__device__ inline bool is_second(const char* element) { return reinterpret_cast<unsigned long long>(element) % 4 != 0; }

// 16 bytes likewise, of elements of 16 bits: in whole words, from the one on that the first is in; the fifth one goes elsewhere.
__device__ inline void copy_words(unsigned to, unsigned fifth, const char* from, int existing) {
  if (is_second(from)) {
    from -= 2;
    if (existing > 0) existing += 2;
  }
#pragma unroll
  for (int i = 0; i <= 16; i += 4) copy_bytes<4>(i < 16 ? to + i : fifth, from + i, min(max(existing - i, 0), 4));
}

// An operand in shared memory. What a lane multiplies is of 16 bytes of the depth, one after the other; four lanes have a step. So
// a row along the depth is read in whole units, and of one across the depth, lanes find the same elements in as many units.
// kDx: eight rows have the same elements at eight places of shared memory, too, as dx reads columns of g. kPiece: bytes that
// are copied at once, whole numbers of which make a row along the depth. 2: rows begin in the middle of words, too, and words are
// copied.
template <class T, bool kAcross, bool kDx, int kPiece>
class BwdOperand {
 public:
  static constexpr int kWidth = 16 / sizeof(T), kStep = 4 * kWidth;

  // Of a block that copies every `between`-th stage, from `stage` on.
  __device__ BwdOperand(const KronFactorBwdParams& p, const KronFactorBwdOperand& o, int first, unsigned stage, unsigned between)
      : operand_(o), rows_(min(o.tile, o.size - first)) {
    const int units = kAcross ? 1 << o.unit_bits : p.steps * 4;  // of which neighbouring threads have one each
    unit_ = static_cast<int>(threadIdx.x) % units;
    line_ = static_cast<int>(threadIdx.x) / units;
    lines_ = static_cast<int>(blockDim.x) / units;
    const unsigned depth = p.steps * (kAcross ? kStep : 4);
    position_ = stage * depth + (kAcross ? line_ : unit_);
    advance_ = between * depth;
    end_ = kAcross ? p.depth : p.depth / kWidth;
    const char* const data = static_cast<const char*>(o.data);
    if constexpr (kAcross) {
      from_ = data + (static_cast<long long>(position_) * o.size + first) * sizeof(T) + unit_ * 16;
    } else {
      inner_ = p.inner;
      vectors_ = p.row_vectors;
      row_ = position_ / vectors_;
      column_ = position_ - row_ * vectors_;
      advance_rows_ = advance_ / vectors_;
      advance_columns_ = advance_ - advance_rows_ * vectors_;
      from_ = data + static_cast<long long>(first + line_) * inner_ * sizeof(T);
    }
  }

  // Starts to copy what of a stage belongs to the block, zeros beyond the depth, and goes on to the next one.
  __device__ void copy(int at, int depth) {
    const int pitch = operand_.pitch;
    if constexpr (kAcross) {
      const long long position_bytes = static_cast<long long>(operand_.size) * sizeof(T);
      if (unit_ < rows_ / kWidth) {
        const char* from = from_;
#pragma unroll 4
        for (int k = line_; k < depth; k += lines_) {
          copy_vector(shared_address(shared_at<char>(at + k * pitch + (unit_ ^ swizzle(k)))), from, position_ + (k - line_) < end_);
          from += lines_ * position_bytes;
        }
      }
      from_ += advance_ * position_bytes;
    } else {
      const bool exists = position_ < end_;
      const long long row_bytes = static_cast<long long>(inner_) * sizeof(T);
      const char* from = from_ + static_cast<long long>(row_) * operand_.size * row_bytes + column_ * 16LL;
      const int count = exists ? min(kWidth, static_cast<int>(inner_ - column_ * kWidth)) : 0;
      unsigned to = shared_address(shared_at<char>(at + line_ * pitch + (unit_ ^ swizzle_along(line_))));
#pragma unroll 4
      for (int m = line_; m < rows_; m += lines_) {
        if constexpr (kPiece == 16) {
          copy_vector(to, from, exists);
        } else if constexpr (kPiece > 2) {
          copy_pieces<kPiece>(to, from, count * static_cast<int>(sizeof(T)));
        } else {
          copy_words(to, shared_address(fifth_word(at, m)), from, count * 2);
        }
        from += lines_ * row_bytes;
        to += lines_ * pitch * 16;
      }
      row_ += advance_rows_;
      column_ += advance_columns_;
      if (column_ >= vectors_) {
        column_ -= vectors_;
        ++row_;
      }
    }
    position_ += advance_;
  }

  // Pieces of 2 bytes: has each element of this thread's copies of a stage in its place. Where a row's first one is the second one
  // of a word, all are one place behind; as a block has an even number of lines at a time, of all rows of a thread or of none.
  __device__ void mend(int at, unsigned stage, int steps) const {
    const unsigned row = (stage * steps * 4 + unit_) / vectors_;
    if (!is_second(from_ + static_cast<long long>(row) * operand_.size * inner_ * sizeof(T))) return;
#pragma unroll 4
    for (int m = line_; m < rows_; m += lines_) {
      uint4& v = *shared_at<uint4>(at + m * operand_.pitch + (unit_ ^ swizzle_along(m)));
      const unsigned w[] = {v.x, v.y, v.z, v.w, *fifth_word(at, m)};
      v = {__funnelshift_r(w[0], w[1], 16), __funnelshift_r(w[1], w[2], 16), __funnelshift_r(w[2], w[3], 16),
           __funnelshift_r(w[3], w[4], 16)};
    }
  }

  // 32 rows of a step, in groups of 8: of each, what a lane has of the row of number lane / 4.
  __device__ static void load_rows(unsigned (&v)[4][4], const KronFactorBwdOperand& o, int at, int first, int step) {
    const int lane = threadIdx.x % 32, row = lane / 4, part = lane % 4;
    if constexpr (!kAcross) {
      const uint4* const from = shared_at<uint4>(at + (first + row) * o.pitch + ((step * 4 + part) ^ swizzle_along(row)));
#pragma unroll
      for (int i = 0; i < 4; ++i) set(v[i], from[i * 8 * o.pitch]);
    } else if constexpr (sizeof(T) == 2) {
      const int one = lane % 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = step * kStep + one / 2 * 8 + 2 * j + one % 2;
        unsigned r[4];
        load_matrices_transposed(r, shared_address(shared_at<char>(at + k * o.pitch + ((first / 8 + lane / 8) ^ swizzle(k)))));
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i][j] = r[i];
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // kWidth of the depth, in float64 of two times 16 rows.
        const int k = step * kStep + part * kWidth + j % kWidth, unit = first / kWidth + j / kWidth * 8 + row;
        unsigned r[4];
        set(r, *shared_at<uint4>(at + k * o.pitch + (unit ^ swizzle(k))));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (sizeof(T) == 4) {
            v[i][j] = r[i];
          } else {
            v[j / 2 * 2 + i / 2][j % 2 * 2 + i % 2] = r[i];
          }
        }
      }
    }
  }

  // Of a row's units: those of the next row are elsewhere. kDx: and the same one of eight rows is at eight places.
  __device__ static int swizzle_along(int row) { return row % 2 * 4 + (kDx ? row / 2 % 4 : 0); }

  // The row of the tile that is number `index` of a group.
  __device__ static int row_of(int group, int index) {
    if constexpr (kAcross && sizeof(T) == 4) return index * 4 + group;
    if constexpr (kAcross && sizeof(T) == 8) return group / 2 * 16 + index * 2 + group % 2;
    return group * 8 + index;
  }

 private:
  // Where a thread has the last one of the five words that a unit is in.
  __device__ unsigned* fifth_word(int at, int m) const {
    return shared_at<unsigned>(at + operand_.fifths_at) + m / lines_ * static_cast<int>(blockDim.x) + threadIdx.x;
  }

  // Of the units of one of the depth: lanes that load together are at different ones of eight.
  __device__ static int swizzle(int k) { return k / kWidth % 4 * 2 + k % 2; }

  __device__ static void set(unsigned (&r)[4], const uint4& u) {
    r[0] = u.x;
    r[1] = u.y;
    r[2] = u.z;
    r[3] = u.w;
  }

  const KronFactorBwdOperand& operand_;
  int rows_;                 // of the block
  int unit_, line_, lines_;  // this thread's unit, and its first one of as many lines as threads have at a time
  const char* from_;
  unsigned position_, advance_, end_;  // in the depth
  unsigned inner_, vectors_, row_, column_, advance_rows_, advance_columns_;
};

}  // namespace cuops
