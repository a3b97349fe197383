// Kronecker-factored linear layers of three factors of up to 32 in float64. Blocks that share a sample have 16 rows of the first
// factor each: columns of the sample come from device memory to registers for it; its results, in shared memory, are matrices that
// a warp multiplies by the other two factors, one after the other.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_cube.h"
#include "kron_linear/kron_shared.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

constexpr int kSteps = 4;  // of 8 products

// Loaded again where it is needed again: registers that keep all weights would be too many.
__device__ __forceinline__ double2 load_pair(unsigned from) {
  double2 v;
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v.x), "=d"(v.y) : "r"(from));
  return v;
}

// A factor as operands of 8 rows and 8 columns, two elements a lane. kChained: columns in the order of the product before.
template <bool kChained>
__device__ void prepare(const KronFactor& f, int first, int tiles, double2* to) {
  const double* const data = static_cast<const double*>(f.data);
  for (int i = threadIdx.x; i < kSteps * tiles * 32; i += blockDim.x) {
    const int lane = i % 32, tile = i / 32 % tiles, step = i / 32 / tiles, row = first + tile * 8 + lane / 4;
    const int column = kChained ? step / 2 * 16 + lane % 4 * 4 + step % 2 : step * 8 + lane % 4;
    auto at = [&](int k) { return row < f.out && k < f.in ? data[row * f.row_stride + k * f.column_stride] : 0.0; };
    to[i] = make_double2(at(column), at(column + (kChained ? 2 : 4)));
  }
}

// Two such operands, one above the other.
struct Rows16 {
  double at[4];

  __device__ __forceinline__ explicit Rows16(unsigned from) {
    const double2 u = load_pair(from), v = load_pair(from + 512);
    at[0] = u.x, at[1] = v.x, at[2] = u.y, at[3] = v.y;
  }
};

__device__ void kron_cube(const KronCubeParams& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int ins0 = p.factors[0].in, ins2 = p.factors[2].in, in_columns = p.factors[1].in * ins2;
  const int outs1 = p.factors[1].out, outs2 = p.factors[2].out, tiles = (outs1 + 15) / 16;
  const int first_row = blockIdx.x % p.slices * kCubeRows, rows = min(kCubeRows, p.factors[0].out - first_row);
  const long long stride = gridDim.x / p.slices;
  long long sample = blockIdx.x / p.slices;
  double2 x[kSteps][2];  // all rows of 16 columns of a sample: of each step's 8 a lane has two, of two columns
  // The block reads nothing twice, so the L1 cache need not keep it.
  auto load = [&](int step, const double* from, int column) {
    const int left = column < in_columns ? ins0 - lane % 4 : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = step * 8 + half * 4;
      const double* const at = from + lane % 4 * in_columns + column + row * in_columns;
      x[step][half] = row < left ? __ldlu(reinterpret_cast<const double2*>(at)) : double2{};
    }
  };
  const double* current = static_cast<const double*>(p.x.data) + offset_of(p.x, sample);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) load(s, current, warp * 16 + lane / 4 * 2);
  char* const state = shared_at<char>(0);
  double2* const first = shared_at<double2>(kCubeRows * kCubeMatrix / 16);
  double2 *const second = first + kCubeRows * 16, *const last = second + 32 * 16;
  prepare<false>(p.factors[0], first_row, kCubeRows / 8, first);
  prepare<false>(p.factors[1], 0, 4, second);
  prepare<true>(p.factors[2], 0, 4, last);
  if (in_columns < 32 * 32)
    for (int i = threadIdx.x; i < kCubeRows * kCubeMatrix / 16; i += blockDim.x) shared_at<uint4>(0)[i] = uint4{};
  const unsigned first_at = shared_address(first + lane), second_at = shared_address(second + lane);
  const unsigned last_at = shared_address(last + lane);
  const unsigned state_at = shared_address(state) + lane % 4 * kCubePitch + lane / 4 * 16;
  for (; sample < p.rows; sample += stride) {
    const double* const next = static_cast<const double*>(p.x.data) + offset_of(p.x, min(sample + stride, p.rows - 1));
    __syncthreads();
#pragma unroll 1
    for (int start = warp * 16; start < in_columns; start += warps * 16) {
      const bool more = start + warps * 16 < in_columns;
      double c[2][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const Rows16 a(first_at + s * 1024);
        mma(c[0], a.at, x[s][0].x, x[s][1].x);
        mma(c[1], a.at, x[s][0].y, x[s][1].y);
        load(s, more ? current : next, (more ? start + warps * 16 : warp * 16) + lane / 4 * 2);
      }
      const int column = start + lane % 4 * 4;
      if (column >= in_columns) continue;
      const int row = divide(column, p.by_columns);
      char* const to = state + lane / 4 * kCubeMatrix + row * kCubePitch + (column - row * ins2) * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<double2*>(to + i / 2 * 8 * kCubeMatrix + i % 2 * 16) = make_double2(c[0][i], c[1][i]);
    }
    current = next;
    __syncthreads();
    double* const y = static_cast<double*>(p.y.data) + offset_of(p.y, sample);
    const double* const bias =
        p.bias ? static_cast<const double*>(p.bias) + sample % p.bias_lead * (p.factors[0].out * outs1 * outs2) : nullptr;
#pragma unroll 1
    for (int item = warp; item < rows * tiles; item += warps) {
      const int slice = item / tiles, tile = item - slice * tiles;
      const unsigned from = state_at + slice * kCubeMatrix;
      double c[4][4] = {}, sum[4][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const Rows16 a(second_at + s * 2048 + tile * 1024);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned at = from + s * 8 * kCubePitch + j * 128;
          const double2 u = load_pair(at), v = load_pair(at + 4 * kCubePitch);
          mma(c[2 * j], a.at, u.x, v.x);
          mma(c[2 * j + 1], a.at, u.y, v.y);
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const double a[4] = {c[s][0], c[s][2], c[s][1], c[s][3]};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const double2 b = load_pair(last_at + (s * 4 + n) * 512);
          mma(sum[n], a, b.x, b.y);
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = tile * 16 + i % 2 * 8 + lane / 4, column = i / 2 * 8 + lane % 4 * 2;
        if (row >= outs1 || column >= outs2) continue;
        const int at = ((first_row + slice) * outs1 + row) * outs2 + column;
        double2 v = make_double2(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]);
        if (bias) v = make_double2(v.x + bias[at], v.y + bias[at + 1]);
        *reinterpret_cast<double2*>(y + at) = v;
      }
    }
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(cuops::kCubeThreadsF64, 1)
    kron_cube_f64(const __grid_constant__ cuops::KronCubeParams p) {
  cuops::wait_in_turn();
  cuops::kron_cube(p);
}
