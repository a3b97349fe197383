// Gradients of two factors of up to 64, 80, 96 or 128 and of their input, in 16 bits, on compute capability 9.0, from samples as
// matrices:
//   dx = W1^T dy W2,   dW1 = sum of (dy W2) x^T,   dW2^T = sum of (x^T W1^T) dy.
// 128 threads have 64 rows of one of these, and what a first product leaves in their registers is, without a move, the first
// operand of the second. Of up to 64, each of three times 128 threads finds one of them; else, of two blocks that have the same
// samples, one has dW1 and the other one dW2, and each has half of dx. One thread of others asks for the copies of x and dy to
// shared memory, or they lay out their rows there.
#include "device/overlap.cuh"
#include "device/tensor_copy.cuh"
#include "device/tuned.cuh"
#include "device/wgmma.cuh"
#include "kron_linear/mma/kron_squares.cuh"
#include "kron_linear/mma/kron_squares.h"
#include "kron_wide_bwd.h"
#include "kron_wide_rows.cuh"

// From CUDA 12.8 on, products go on side by side; kron_linear_squares_bwd.cc asks for that, too.
CUOPS_ONLY_FOR(90a, CUDA 12.8)

namespace cuops {

constexpr int kColumns = 64;  // of a matrix
template <int kSize>
constexpr int kMatrix = kSize * 128;  // bytes

// Starts to copy a factor to a tile, with zeros around it.
template <class T, int kSize>
__device__ void copy_to_tile(char* to, const void* from, int rows, int columns) {
  const T* const data = static_cast<const T*>(from);
  const auto each = [&](const auto& copy) {
#pragma unroll
    for (int i = threadIdx.x; i < kSize * kSize / 8; i += kWideBwdThreads) {
      const int row = i / (kSize / 8), piece = i % (kSize / 8), valid = row < rows ? max(0, min(columns - piece * 8, 8)) : 0;
      copy(to + piece / 8 * kMatrix<kSize> + swizzled(row, piece % 8), data + (valid ? row * columns + piece * 8 : 0), valid);
    }
  };
  if (columns % 8 == 0) {
    each([](char* at, const T* elements, int valid) { copy_or_zero(at, elements, valid > 0); });
  } else {
    each([](char* at, const T* elements, int valid) {
      Pack<T, 8> v = {};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < valid) v.at[e] = elements[e];
      store_pack(at, v);
    });
  }
}

// The samples of a block, or of two, in the slots of shared memory in turn.
template <int kSlots>
struct WideSamples {
  unsigned long long *full, *empty;
  long long first, step, rows;

  // Calls visit(sample, slot, where it is to arrive) for each, once it is wanted in its slot, or is there.
  template <bool kIsThere, class Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    int slot = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (long long sample = first; sample < rows; sample += step) {
      wait_for_arrivals(kIsThere ? &full[slot] : &empty[slot], kIsThere ? parity : parity ^ 1);
      visit(sample, slot, kIsThere ? &empty[slot] : &full[slot]);
      slot = (slot + 1) % kSlots;
      parity ^= slot == 0;
    }
  }
};

// Products of a warpgroup, of tiles of which kUsed rows and columns are not zero.
template <class T, int kSize, int kUsed>
struct WideBwdProducts {
  static constexpr int kTiles = kUsed / 8, kSteps = kUsed / 16;
  using Results = float[kTiles][4];

  // A tile, or the half of it that begins with row or column `from`; across, where the sum is over its rows.
  template <bool kAcross>
  __device__ static unsigned operand(unsigned tile, int from = 0) {
    return kAcross ? place_across(tile + from / kColumns * kMatrix<kSize>, kMatrix<kSize>) : (tile + from * 128) / 16;
  }
  // How far the 16 of step s are, in units of 16 bytes.
  template <bool kAcross>
  __device__ static constexpr int step(int s) {
    return kAcross ? s * 16 * 8 : s / 4 * (kMatrix<kSize> / 16) + s % 4 * 2;
  }

  // t = a b.
  template <bool kAcrossA, bool kAcrossB>
  __device__ __forceinline__ static void first(Results& t, unsigned a, unsigned b) {
    begin_products<T, kSteps, kAcrossA, kAcrossB>(
        t, [&](int s) { return matrix(a + step<kAcrossA>(s)); }, [&](int s) { return matrix(b + step<kAcrossB>(s)); });
    wait_for_products(t);
  }

  // sum = t c, plus what it was where there is `more`.
  template <bool kAcross>
  __device__ __forceinline__ static void second(Results& sum, const Results& t, unsigned c, bool more) {
    unsigned a[kSteps][4];
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const float* const two = &t[i / 4 * 2 + i % 4 / 2][i % 2 * 2];
      a[i / 4][i % 4] = pack<T>(two[0], two[1]);
    }
    begin_products<T, kSteps, false, kAcross>(
        sum, [&](int s) { return a[s]; }, [&](int s) { return matrix(c + step<kAcross>(s)); }, more);
    wait_for_products(sum);
  }
};

// 16 rows by 16 columns of dx that a warp has, those that exist, of any number of columns. Rows that start in the middle of a word
// leave in words too, each of neighbours that two lanes have, but for the first and the last element.
template <class T>
__device__ void store_odd(T* to, int rows, int columns, int column, const float (&d)[2][4]) {
  const int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = r * 8 + lane / 4, left = row < rows ? columns - column - 2 * part : 0;
    T* const at = to + row * columns + column + 2 * part;
    const bool shifted = reinterpret_cast<unsigned long long>(at) % 4 != 0;
    const unsigned own[2] = {pack<T>(d[0][2 * r], d[0][2 * r + 1]), pack<T>(d[1][2 * r], d[1][2 * r + 1])};
    // Beyond the fourth lane's first two is the first lane's first of the other two.
    const unsigned from_next = __shfl_sync(~0u, part == 0 ? own[1] : own[0], lane / 4 * 4 + (lane + 1) % 4);
    const unsigned from_next_1 = __shfl_sync(~0u, own[1], lane / 4 * 4 + (lane + 1) % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_first = i == 0 && part == 0, is_last = i == 1 && part == 3;
      const int here = left - i * 8;  // elements from this lane's on
      const unsigned word = shifted ? __funnelshift_r(own[i], i == 0 ? from_next : from_next_1, 16) : own[i];
      const bool whole = here > 1 + shifted && !(shifted && is_last);
      if (whole) *reinterpret_cast<unsigned*>(at + i * 8 + shifted) = word;
      unsigned short* const single = reinterpret_cast<unsigned short*>(at + i * 8);
      if (here > 0 && (shifted ? is_first : here == 1)) single[0] = own[i] & 0xffff;
      if (here > 1 && shifted && !whole) single[1] = own[i] >> 16;
    }
  }
}

template <class T, int kSize, int kUsed, bool kOdd>
__device__ void kron_wide_bwd(const KronWideSquaresParams& p) {
  using Products = WideBwdProducts<T, kSize, kUsed>;
  constexpr int kSlots = kOdd ? wide_bwd_odd_slots(kSize) : wide_bwd_slots(kSize), kBytes = wide_bwd_tile(kSize);
  constexpr int kShare = kSize / 64;  // blocks that have the same samples
  using Layers = WideLayers<kSize, kSlots, 2, wide_bwd_odd_room(kSize)>;
  constexpr bool kAlone = kShare == 1;
  __shared__ unsigned long long full[kSlots], empty[kSlots], there[kOdd ? kMostRaw : 1];
  const KronSquaresParams& s = p.squares;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // which all lanes are known to have
  const int part = blockIdx.x % kShare, team = warp / 4;
  char* const first = reinterpret_cast<char*>(kron_shared) + (-shared_address(kron_shared) & 1023);
  char *const second = first + kBytes, *const slots = second + kBytes;
  const unsigned tiles = __shfl_sync(~0u, shared_address(first), 0);  // which compilers would find again at each product
  const WideSamples<kSlots> samples{full, empty, blockIdx.x / kShare, gridDim.x / kShare, s.rows};
  copy_to_tile<T, kSize>(first, s.first, s.out[0], s.in[0]);
  copy_to_tile<T, kSize>(second, s.second, s.out[1], s.in[1]);
  commit_copies();
  if (threadIdx.x == kWideBwdTeams * 128) {
    if constexpr (kOdd) {
      Layers::init(there);
    } else {
      fetch_map(p.x);
      fetch_map(p.dy);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      init_arrivals(&full[i], 1);
      init_arrivals(&empty[i], kWideBwdTeams * 4);
    }
  }
  wait_for_copies<0>();
  show_to_products();
  __syncthreads();
  if (team == kWideBwdTeams) {
    if constexpr (kOdd) {
      keep_registers<kWideBwdLayRegisters>();
      const Layers layers{{{s.x, 1LL * s.in[0] * s.in[1], s.in[0], s.in[1]}, {s.dy, 1LL * s.out[0] * s.out[1], s.out[0], s.out[1]}},
                          slots,
                          slots + kSlots * 2 * kBytes,
                          there,
                          full,
                          empty,
                          samples.first,
                          samples.step,
                          s.rows};
      layers.run([](int) {});
      return;
    }
    keep_registers<kWideBwdCopyRegisters>();
    if (threadIdx.x == kWideBwdTeams * 128) {
      samples.template each<false>([&](long long sample, int slot, unsigned long long* there) {
        char *const x = slots + slot * 2 * kBytes, *const dy = x + kBytes;
        arrive_expecting(there, 2 * kBytes);
#pragma unroll
        for (int i = 0; i < kSize / kColumns; ++i) {
          copy_box(x + i * kMatrix<kSize>, p.x, i * kColumns, 0, static_cast<int>(sample), there);
          copy_box(dy + i * kMatrix<kSize>, p.dy, i * kColumns, 0, static_cast<int>(sample), there);
        }
      });
    }
    return;
  }

  take_registers<kWideBwdRegisters>();
  typename Products::Results t = {}, sum = {};
  const auto done = [&](unsigned long long* empty) {
    if (lane == 0) arrive(empty);
  };
  // Where two blocks share samples, both gradients of factors are wanted.
  const int finds = !kAlone ? (team < 2 ? 1 << part : kInputGradient) : 1 << team & s.wanted,
            rows_from = kAlone ? 0 : team % 2 * 64;
  if (finds & (kFirstGradient | kSecondGradient)) {
    if (finds == kFirstGradient) {
      samples.template each<true>([&](long long, int slot, unsigned long long* empty) {
        const unsigned x = tiles + (2 + 2 * slot) * kBytes, dy = x + kBytes;
        Products::template first<false, true>(t, Products::template operand<false>(dy, rows_from),
                                              Products::template operand<true>(tiles + kBytes));
        Products::template second<false>(sum, t, Products::template operand<false>(x), true);
        done(empty);
      });
    } else {
      samples.template each<true>([&](long long, int slot, unsigned long long* empty) {
        const unsigned x = tiles + (2 + 2 * slot) * kBytes, dy = x + kBytes;
        Products::template first<true, false>(t, Products::template operand<true>(x, rows_from),
                                              Products::template operand<false>(tiles));
        Products::template second<true>(sum, t, Products::template operand<true>(dy), true);
        done(empty);
      });
    }
    launch_dependents();
    // In the order that kron_squares_sum knows.
    constexpr int kWarps = kUsed / 16;
    const int number = warp % (kAlone ? 4 : 8), of_factors = __popc(s.wanted & (kFirstGradient | kSecondGradient));
    const long long matrix = kAlone ? 1LL * blockIdx.x * of_factors + (of_factors == 2 && finds == kSecondGradient) : blockIdx.x;
    float4* const to = static_cast<float4*>(s.partial) + matrix * (kUsed * kUsed / 4LL) + number * 32 + lane;
    if (number < kWarps) {
#pragma unroll
      for (int i = 0; i < Products::kTiles; ++i) to[i * kWarps * 32] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
  } else {
    const int row = part * 64 + warp % 4 * 16;
    samples.template each<true>([&](long long sample, int slot, unsigned long long* empty) {
      const unsigned dy = tiles + (3 + 2 * slot) * kBytes;
      if (finds & s.wanted) {
        Products::template first<true, true>(t, Products::template operand<true>(tiles, part * 64),
                                             Products::template operand<true>(dy));
        done(empty);
        Products::template second<true>(sum, t, Products::template operand<true>(tiles + kBytes), false);
        T* const to = static_cast<T*>(s.dx) + (sample * s.in[0] + row) * s.in[1];
#pragma unroll
        for (int i = 0; i < kUsed; i += 16) {
          const float (&results)[2][4] = reinterpret_cast<const float (&)[2][4]>(sum[i / 8]);
          if constexpr (kOdd) {
            store_odd(to, s.in[0] - row, s.in[1], i, results);
          } else {
            Squares<T, kUsed>::store(to, s.in[0] - row, s.in[1], i, results, 1, 1);
          }
        }
      } else {
        __syncwarp();  // all of it has seen the sample
        done(empty);
      }
    });
    launch_dependents();
  }
}

}  // namespace cuops

#define KRON_WIDE_BWD_OF(size, used, name, T, odd)                                            \
  extern "C" __global__ void __launch_bounds__(cuops::kWideBwdThreads, 1)                     \
      kron_wide_bwd_##used##_##name(const __grid_constant__ cuops::KronWideSquaresParams p) { \
    cuops::wait_in_turn();                                                                    \
    cuops::kron_wide_bwd<T, size, used, odd>(p);                                              \
  }
#define KRON_WIDE_BWD(size, used)                  \
  KRON_WIDE_BWD_OF(size, used, f16, __half, false) \
  KRON_WIDE_BWD_OF(size, used, bf16, __nv_bfloat16, false)
#define KRON_WIDE_BWD_ODD(size, used)                 \
  KRON_WIDE_BWD_OF(size, used, f16_odd, __half, true) \
  KRON_WIDE_BWD_OF(size, used, bf16_odd, __nv_bfloat16, true)

// Instances, as kron_linear_squares_bwd.cc asks for them.
KRON_WIDE_BWD(64, 64)
KRON_WIDE_BWD(128, 80)
KRON_WIDE_BWD(128, 96)
KRON_WIDE_BWD(128, 128)
KRON_WIDE_BWD_ODD(64, 64)
KRON_WIDE_BWD_ODD(128, 128)
