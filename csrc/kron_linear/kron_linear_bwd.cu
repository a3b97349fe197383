// Gradients by one factor of kron_linear on the device: of the factor, products of two arrays summed over all that it does not
// touch, and of what it is applied to.
#include "device/overlap.cuh"
#include "device/tuned.cuh"

#if CUOPS_TUNED >= 80
#include "device/row_sums.cuh"
#include "kron_block_sums.cuh"
#include "kron_bwd.h"
#include "kron_shared.cuh"

namespace cuops {

// 16 bytes on their way to shared memory, or zeros.
__device__ inline void copy_vector(unsigned to, const uint4* from, bool exists) {
  if (exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
}

// An operand in shared memory. What a lane multiplies is of 16 bytes of the depth, one after the other; four lanes have a step. So
// a row along the depth is read in whole units, and of one across the depth, lanes find the same elements in as many units.
// kDx: eight rows have the same elements at eight places of shared memory, too, as dx reads columns of g.
template <class T, bool kAcross, bool kDx>
class BwdOperand {
 public:
  static constexpr int kWidth = 16 / sizeof(T), kStep = 4 * kWidth;

  // Of a block that copies every `between`-th stage, from `stage` on.
  __device__ BwdOperand(const KronBwdParams& p, const KronBwdOperand& o, int first, unsigned stage, unsigned between)
      : operand_(o), rows_(min(o.tile, o.size - first)) {
    const int units = kAcross ? 1 << o.unit_bits : p.steps * 4;  // of which neighbouring threads have one each
    unit_ = static_cast<int>(threadIdx.x) % units;
    line_ = static_cast<int>(threadIdx.x) / units;
    lines_ = static_cast<int>(blockDim.x) / units;
    const unsigned depth = p.steps * (kAcross ? kStep : 4);
    position_ = stage * depth + (kAcross ? line_ : unit_);
    advance_ = between * depth;
    end_ = kAcross ? p.depth : p.depth / kWidth;
    const uint4* const data = static_cast<const uint4*>(o.data);
    if constexpr (kAcross) {
      from_ = data + static_cast<long long>(position_) * (o.size / kWidth) + first / kWidth + unit_;
    } else {
      each_ = p.inner / kWidth;
      row_ = position_ / each_;
      column_ = position_ - row_ * each_;
      advance_rows_ = advance_ / each_;
      advance_columns_ = advance_ - advance_rows_ * each_;
      from_ = data + static_cast<long long>(first + line_) * each_;
    }
  }

  // Starts to copy what of a stage belongs to the block, zeros beyond the depth, and goes on to the next one.
  __device__ void copy(int at, int depth) {
    const int pitch = operand_.pitch;
    if constexpr (kAcross) {
      const long long each = operand_.size / kWidth;
      if (unit_ < rows_ / kWidth) {
        const uint4* from = from_;
#pragma unroll 4
        for (int k = line_; k < depth; k += lines_) {
          copy_vector(shared_address(shared_at<char>(at + k * pitch + (unit_ ^ swizzle(k)))), from, position_ + (k - line_) < end_);
          from += lines_ * each;
        }
      }
      from_ += advance_ * each;
    } else {
      const bool exists = position_ < end_;
      const uint4* from = from_ + static_cast<long long>(row_) * operand_.size * each_ + column_;
      const long long step = static_cast<long long>(lines_) * each_;
      unsigned to = shared_address(shared_at<char>(at + line_ * pitch + (unit_ ^ swizzle_along(line_))));
#pragma unroll 4
      for (int m = line_; m < rows_; m += lines_) {
        copy_vector(to, from, exists);
        from += step;
        to += lines_ * pitch * 16;
      }
      row_ += advance_rows_;
      column_ += advance_columns_;
      if (column_ >= each_) {
        column_ -= each_;
        ++row_;
      }
    }
    position_ += advance_;
  }

  // 32 rows of a step, in groups of 8: of each, what a lane has of the row of number lane / 4.
  __device__ static void load_rows(unsigned (&v)[4][4], const KronBwdOperand& o, int at, int first, int step) {
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
  // Of the units of one of the depth: lanes that load together are at different ones of eight.
  __device__ static int swizzle(int k) { return k / kWidth % 4 * 2 + k % 2; }

  __device__ static void set(unsigned (&r)[4], const uint4& u) {
    r[0] = u.x;
    r[1] = u.y;
    r[2] = u.z;
    r[3] = u.w;
  }

  const KronBwdOperand& operand_;
  int rows_;                 // of the block
  int unit_, line_, lines_;  // this thread's unit, and its first one of as many lines as threads have at a time
  const uint4* from_;
  unsigned position_, advance_, end_;  // in the depth
  unsigned each_, row_, column_, advance_rows_, advance_columns_;
};

// float32 as the sum of two TF32, the nearest and what is left. The largest numbers, which would overflow, are cut off, as is NaN.
__device__ inline void split_tf32(unsigned v, unsigned& high, unsigned& low) {
  const bool rounds = fabsf(__uint_as_float(v)) < __uint_as_float(0x7f7ff000u);
  high = (rounds ? v + 0x1000u : v) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(v) - __uint_as_float(high));
}

// sum += a step's products: 32 x 32 sums, of 16 x 8 each. kPairs: float32 as pairs, or as TF32. As tensor cores cut sums off, they
// form those of 8 products only.
template <bool kPairs>
__device__ void add_products(const unsigned (&g)[4][4], const unsigned (&x)[4][4], float (&sum)[2][4][4], int, int, float) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    unsigned high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) split_tf32(g[i / 4 * 2 + i % 2][k + i % 4 / 2], high[i / 4][i % 4], low[i / 4][i % 4]);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      unsigned x_high[2][2], x_low[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) split_tf32(x[n + i / 2][k + i % 2], x_high[i / 2][i % 2], x_low[i / 2][i % 2]);
      float part[2][2][4] = {};
      auto add_part = [&](const unsigned (&a)[2][4], const unsigned (&b)[2][2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mma_tf32(part[i / 2][i % 2], a[i / 2], b[i % 2][0], b[i % 2][1]);
      };
      if constexpr (kPairs) {
        add_part(low, x_high);
        add_part(high, x_low);
      }
      add_part(high, x_high);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 8][n + i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
    }
  }
}

template <bool, class Half>
__device__ void add_products(const unsigned (&g)[4][4], const unsigned (&x)[4][4], float (&sum)[2][4][4], int, int, Half) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const unsigned a[4] = {g[2 * m][k], g[2 * m + 1][k], g[2 * m][k + 1], g[2 * m + 1][k + 1]};
#pragma unroll
      for (int n = 0; n < 4; ++n) mma<Half>(sum[m][n], a, x[n][k], x[n][k + 1]);
    }
  }
}

template <bool>
__device__ void add_products(const unsigned (&g)[4][4], const unsigned (&x)[4][4], double (&sum)[2][4][4], int rows, int columns,
                             double) {
  auto number = [](const unsigned (&v)[4], int k) {
    return __hiloint2double(static_cast<int>(v[2 * k + 1]), static_cast<int>(v[2 * k]));
  };
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    if (m * 16 >= rows) continue;
    const double a[4] = {number(g[2 * m], 0), number(g[2 * m + 1], 0), number(g[2 * m], 1), number(g[2 * m + 1], 1)};
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (n / 2 * 16 < columns) mma(sum[m][n], a, number(x[n], 0), number(x[n], 1));
  }
}

// What x's gradient is found of: the factor's transpose as tensor cores have it, 16 of its rows by kColumns for an instruction, in
// the order of a warp's registers, and stages of g that have its rows along the depth.
template <class T>
class BwdFactor {
 public:
  static constexpr int kColumns = sizeof(T) == 2 ? 16 : 8, kUnits = sizeof(T) == 2 ? 1 : 2;  // units: of a lane
  using G = BwdOperand<T, false, true>;

  // Of a block that has every `between`-th stage, from `stage` on. A warp has the same step of each.
  __device__ BwdFactor(const KronBwdParams& p, unsigned stage, unsigned between)
      : p_(p), parts_((p.g.size + kColumns - 1) / kColumns), each_(p.inner / G::kWidth) {
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
    row_ = position_ / each_;
    column_ = position_ - row_ * each_;
    advance_ = between * p.steps * 4;
    advance_rows_ = advance_ / each_;
    advance_columns_ = advance_ - advance_rows_ * each_;
  }

  // dx of a stage, whose g is in shared memory, and goes on to the next one.
  __device__ void apply(int g_at) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32,
              between = static_cast<int>(blockDim.x) / 32 / p_.steps;
    uint4* const to = static_cast<uint4*>(p_.dx) + static_cast<long long>(row_) * p_.x.size * each_ + column_;
    const bool exists = position_ < p_.depth / G::kWidth;
    for (int tile = warp / p_.steps; tile * 16 < p_.x.size; tile += between) {
      uint4 v[2];  // of 16 bytes of the depth: of two of x's rows
      multiply(v, tile * parts_, g_at, step_ * 4, T());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = tile * 16 + i * 8 + lane / 4;
        if (exists && m < p_.x.size) to[static_cast<long long>(m) * each_] = v[i];
      }
    }
    position_ += advance_;
    row_ += advance_rows_;
    column_ += advance_columns_;
    if (column_ >= each_) {
      column_ -= each_;
      ++row_;
    }
  }

 private:
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

  const KronBwdParams& p_;
  const int parts_;
  const unsigned each_;
  int step_;
  unsigned position_, row_, column_, advance_, advance_rows_, advance_columns_;  // in units of the depth
};

// Where dx is not asked for.
struct NoFactor {
  __device__ NoFactor(const KronBwdParams&, unsigned, unsigned) {}
};

// Blocks take every n-th stage of the depth, so that every run adds in the same order. Warps share the block's tile; where this is
// small, several warps have the same part of it, each in other steps.
template <class T, class Acc, bool kPairs, bool kAcrossG, bool kAcrossX, bool kDx = false>
__device__ void kron_linear_bwd(const KronBwdParams& p) {
  static_assert(!kDx || !(kAcrossG || kAcrossX));
  using G = BwdOperand<T, kAcrossG, kDx>;
  using X = BwdOperand<T, kAcrossX, kDx>;
  const int pairs = p.out_blocks * p.in_blocks, pair = static_cast<int>(blockIdx.x) % pairs;
  const unsigned block = blockIdx.x / pairs, blocks = gridDim.x / pairs;
  const int first_out = pair % p.out_blocks * p.g.tile, first_in = pair / p.out_blocks * p.x.tile;
  const int out_tiles = (p.g.tile + kBwdTile - 1) / kBwdTile, in_tiles = (p.x.tile + kBwdTile - 1) / kBwdTile;
  const int warp = threadIdx.x / 32, tiles = out_tiles * in_tiles, parts = static_cast<int>(blockDim.x) / 32 / tiles;
  const int part = warp / tiles, tile = warp - part * tiles, m0 = tile % out_tiles * kBwdTile, n0 = tile / out_tiles * kBwdTile;
  const int depth = p.steps * G::kStep;
  const unsigned stages = (p.depth + depth - 1) / depth;

  if constexpr (kDx) {  // what is beyond g's rows counts as zeros
    for (int i = threadIdx.x; i < p.w_at; i += blockDim.x) *shared_at<uint4>(i) = uint4{};
    __syncthreads();
  }
  G g(p, p.g, first_out, block, blocks);
  X x(p, p.x, first_in, block, blocks);
  auto load = [&](unsigned stage, int slot) {
    if (stage < stages) {
      g.copy(slot * p.stage_units, depth);
      x.copy(slot * p.stage_units + p.x_at, depth);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < kBwdStages - 1; ++i) load(block + i * blocks, i);
  Select<kDx, BwdFactor<T>, NoFactor> factor(p, block, blocks);
  Acc sum[2][4][4] = {};
  int slot = 0;
#pragma unroll 1
  for (unsigned stage = block; stage < stages; stage += blocks) {
    wait_for_copies<kBwdStages - 2>();
    __syncthreads();
    load(stage + (kBwdStages - 1) * blocks, slot > 0 ? slot - 1 : kBwdStages - 1);
    if (part < parts) {
#pragma unroll 1
      for (int step = part; step < p.steps; step += parts) {
        unsigned rows[4][4], columns[4][4];
        G::load_rows(rows, p.g, slot * p.stage_units, m0, step);
        X::load_rows(columns, p.x, slot * p.stage_units + p.x_at, n0, step);
        add_products<kPairs>(rows, columns, sum, p.g.size - first_out - m0, p.x.size - first_in - n0, T());
      }
    }
    if constexpr (kDx) factor.apply(slot * p.stage_units);
    slot = slot + 1 < kBwdStages ? slot + 1 : 0;
  }
  __syncthreads();
  // Parts are added in order: a lane's sums are where the same lane of the other parts has its own.
  Acc* const shared = shared_at<Acc>(0) + tile * kBwdTile * kBwdTile + threadIdx.x % 32;
  for (int turn = 1; turn < parts; ++turn) {
    if (part == turn) {
#pragma unroll
      for (int i = 0; i < 32; ++i) shared[i * 32] = sum[i / 16][i / 4 % 4][i % 4];
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[i / 16][i / 4 % 4][i % 4] += shared[i * 32];
    }
    __syncthreads();
  }
  if (part > 0) return;
  const long long sums = static_cast<long long>(p.g.size) * p.x.size, stride = sums_stride(sums);
  Acc* const partial = static_cast<Acc*>(p.partial) + block * stride;
  const int lane = threadIdx.x % 32;
  if (pair == 0 && threadIdx.x < stride - sums) partial[sums + threadIdx.x] = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int m = m0 + G::row_of(i / 16 * 2 + i % 4 / 2, lane / 4), n = n0 + X::row_of(i / 4 % 4, lane % 4 * 2 + i % 2);
    if (m < min(p.g.tile, p.g.size - first_out) && n < min(p.x.tile, p.x.size - first_in))
      partial[static_cast<long long>(first_out + m) * p.x.size + first_in + n] = sum[i / 16][i / 4 % 4][i % 4];
  }
}

template <class Acc, class Vector>
__device__ void kron_bwd_sum(const KronBwdSum& p) {
  const long long stride = sums_stride(p.n) * sizeof(Acc) / sizeof(Vector);
  const bool exists = blockIdx.x * 8 + threadIdx.x % 8 < stride;
  add_up_blocks<Acc, Vector>(p, stride, exists, [&](int i, Acc sum) {
    if (i < p.n) store_chunk(p.dtype, p.dw, i, Pack<Acc, 1>{sum});
  });
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(512) kron_bwd_sum_f32(const __grid_constant__ cuops::KronBwdSum p) {
  cuops::kron_bwd_sum<float, float4>(p);
}
extern "C" __global__ void __launch_bounds__(512) kron_bwd_sum_f64(const __grid_constant__ cuops::KronBwdSum p) {
  cuops::kron_bwd_sum<double, double2>(p);
}

// Instances, as kron_linear_bwd.cc asks for them: both operands along the depth, g along and x across, both across; both along it,
// and dx.
#define KRON_LINEAR_BWD_OF(name, ...)                                                                                    \
  extern "C" __global__ void __launch_bounds__(512, 1) kron_bwd_##name(const __grid_constant__ cuops::KronBwdParams p) { \
    cuops::wait_in_turn();                                                                                               \
    cuops::kron_linear_bwd<__VA_ARGS__>(p);                                                                              \
  }
#define KRON_LINEAR_BWD(name, T, Acc, pairs)                          \
  KRON_LINEAR_BWD_OF(name##_along, T, Acc, pairs, false, false)       \
  KRON_LINEAR_BWD_OF(name##_along_across, T, Acc, pairs, false, true) \
  KRON_LINEAR_BWD_OF(name##_across, T, Acc, pairs, true, true)
KRON_LINEAR_BWD(f64, double, double, false)
KRON_LINEAR_BWD(f32, float, float, true)
KRON_LINEAR_BWD(tf32, float, float, false)
KRON_LINEAR_BWD(f16, __half, float, false)
KRON_LINEAR_BWD(bf16, __nv_bfloat16, float, false)
KRON_LINEAR_BWD_OF(f64_dx, double, double, false, false, false, true)
KRON_LINEAR_BWD_OF(f16_dx, __half, float, false, false, false, true)
KRON_LINEAR_BWD_OF(bf16_dx, __nv_bfloat16, float, false, false, false, true)
#else
extern "C" __global__ void kron_bwd_nowhere() {}
#endif
