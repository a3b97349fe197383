// What kron_linear_factor_bwd.cu applies to a factor's outputs where it finds dx, too.
#pragma once

#include "kron_factor_bwd_operand.cuh"

namespace cuops {

// What x's gradient is found of: the factor's transpose as tensor cores have it, 16 of its rows by kColumns for an instruction, in
// the order of a warp's registers, and stages of g that have its rows along the depth.
template <class T, int kPiece>
class BwdInput {
 public:
  static constexpr int kColumns = sizeof(T) == 2 ? 16 : 8, kUnits = sizeof(T) == 2 ? 1 : 2;  // units: of a lane
  using G = BwdOperand<T, false, true, kPiece>;

  // Of a block that has every `between`-th stage, from `stage` on. A warp has the same step of each.
  __device__ BwdInput(const KronFactorBwdParams& p, unsigned stage, unsigned between)
      : p_(p), parts_((p.g.size + kColumns - 1) / kColumns), vectors_(p.row_vectors) {
    const int tiles = (p.x.size + 15) / 16, warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
    for (int n = threadIdx.x; n < tiles * parts_ * 32; n += blockDim.x) {
      const int part = n / 32 % parts_, row = n / 32 / parts_ * 16 + lane / 4;
      auto at = [&](int m, int k) {
        m += row;
        k += part * kColumns;
        return m < p.x.size && k < p.g.size ? static_cast<const T*>(p.w)[k * p.x.size + m] : T(0.0f);
      };
      Pack<T, kUnits * G::kWidth> v;
#pragma unroll
      for (int i = 0; i < kUnits * G::kWidth; ++i) {
        v.at[i] = sizeof(T) == 2 ? at(i / 2 % 2 * 8, lane % 4 * 2 + i / 4 * 8 + i % 2) : at(i % 2 * 8, row_of(lane) + i / 2 * 2);
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) *place(n / 32, i) = reinterpret_cast<const uint4*>(&v)[i];
    }
    step_ = warp % p.steps;
    position_ = (stage * p.steps + step_) * 4 + lane % 4;
    row_ = position_ / vectors_;
    column_ = position_ - row_ * vectors_;
    advance_ = between * p.steps * 4;
    advance_rows_ = advance_ / vectors_;
    advance_columns_ = advance_ - advance_rows_ * vectors_;
  }

  // dx of a stage, whose g is in shared memory, and goes on to the next one.
  __device__ void apply(int g_at) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32,
              between = static_cast<int>(blockDim.x) / 32 / p_.steps;
    T* const to = static_cast<T*>(p_.dx) + static_cast<long long>(row_) * p_.x.size * p_.inner + column_ * G::kWidth;
    const bool exists = position_ < p_.depth / G::kWidth;
    if (warp >= between * p_.steps) return;  // others have all tiles
    for (int tile = warp / p_.steps; tile * 16 < p_.x.size; tile += between) {
      uint4 v[2];  // of 16 bytes of the depth: of two of x's rows
      multiply(v, tile * parts_, g_at, step_ * 4, T());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = tile * 16 + i * 8 + lane / 4;
        if (exists && m < p_.x.size) store(to + static_cast<long long>(m) * p_.inner, v[i]);
      }
    }
    position_ += advance_;
    row_ += advance_rows_;
    column_ += advance_columns_;
    if (column_ >= vectors_) {
      column_ -= vectors_;
      ++row_;
    }
  }

 private:
  // What exists of 16 bytes of a row of dx.
  __device__ void store(T* to, const uint4& v) const {
    const int count = min(static_cast<int>(p_.inner - column_ * G::kWidth), G::kWidth);
    if constexpr (kPiece == 16) {
      *reinterpret_cast<uint4*>(to) = v;
    } else if constexpr (kPiece == 2) {
      // The words of device memory that lie within, and elements at the ends.
      auto put = [&](int at, unsigned half) { reinterpret_cast<unsigned short*>(to)[at] = static_cast<unsigned short>(half); };
      const unsigned r[] = {v.x, v.y, v.z, v.w};
      const int first = is_second(reinterpret_cast<const char*>(to));
      if (first > 0) put(0, r[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first + 2 * i;
        const unsigned word = first > 0 ? __funnelshift_r(r[i], r[min(i + 1, 3)], 16) : r[i];
        if (at + 1 < count) {
          *reinterpret_cast<unsigned*>(to + at) = word;
        } else if (at < count) {
          put(at, word);
        }
      }
    } else {
      using Piece = Select<kPiece == 8, double, unsigned>;
#pragma unroll
      for (int i = 0; i < 16 / kPiece; ++i)
        if (i * kPiece < count * static_cast<int>(sizeof(T)))
          reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(&v)[i];
    }
  }

  __device__ uint4* place(int n, int unit) const { return shared_at<uint4>(p_.w_at + (n * kUnits + unit) * 32 + threadIdx.x % 32); }

  // Of eight rows of g, the first one that a lane multiplies; the other one is two behind it.
  __device__ static int row_of(int lane) { return lane % 4 / 2 * 4 + lane % 2; }

  __device__ void multiply(uint4 (&v)[2], int w, int g_at, int unit, double) const {
    const int lane = threadIdx.x % 32, eighth = lane / 4;  // of 64 bytes
    auto load = [&](int row) {
      return shared_at<double>(g_at + row * p_.g.pitch + ((unit + eighth / 2) ^ G::swizzle_along(row)))[eighth % 2];
    };
    double c[4] = {};
#pragma unroll 2
    for (int part = 0; part < parts_; ++part) {
      const double2 low = *reinterpret_cast<const double2*>(place(w + part, 0));
      const double2 high = *reinterpret_cast<const double2*>(place(w + part, 1));
      const double a[4] = {low.x, low.y, high.x, high.y};
      const int row = part * kColumns + row_of(lane);
      mma(c, a, load(row), load(row + 2));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) *reinterpret_cast<double2*>(&v[i]) = make_double2(c[2 * i], c[2 * i + 1]);
  }

  template <class Half>
  __device__ void multiply(uint4 (&v)[2], int w, int g_at, int unit, Half) const {
    const int lane = threadIdx.x % 32;
    float c[4][4] = {};
#pragma unroll 2
    for (int part = 0; part < parts_; ++part) {
      const uint4 from = *place(w + part, 0);
      const unsigned a[4] = {from.x, from.y, from.z, from.w};
      const int row = part * kColumns + lane % 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned b[4];
        const int at = g_at + row * p_.g.pitch + ((unit + 2 * i + lane / 16) ^ G::swizzle_along(row));
        load_matrices_transposed(b, shared_address(shared_at<char>(at)));
        mma<Half>(c[2 * i], a, b[0], b[1]);
        mma<Half>(c[2 * i + 1], a, b[2], b[3]);
      }
    }
    // Each of four lanes has a part of four units, and then one of these.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned r[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const Pack<Half, 2> two = convert<Half>(Pack<float, 2>{c[t][2 * i], c[t][2 * i + 1]});
        r[t] = *reinterpret_cast<const unsigned*>(&two);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          if (t & bit) continue;
          const bool upper = lane & bit;
          const unsigned other = __shfl_xor_sync(~0u, upper ? r[t] : r[t + bit], bit);
          (upper ? r[t] : r[t + bit]) = other;
        }
      }
      v[i] = uint4{r[0], r[1], r[2], r[3]};
    }
  }

  const KronFactorBwdParams& p_;
  const int parts_;
  const unsigned vectors_;
  int step_;
  unsigned position_, row_, column_, advance_, advance_rows_, advance_columns_;  // in units of the depth
};

// Where dx is not asked for.
struct NoFactor {
  __device__ NoFactor(const KronFactorBwdParams&, unsigned, unsigned) {}
};

}  // namespace cuops
