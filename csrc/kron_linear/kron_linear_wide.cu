// Kronecker-factored linear layers of two factors of up to 64, 96 or 128, in 16 bits or as TF32, on compute capability 9.0: 128
// threads multiply 64 of the last factor's rows by X^T. What that leaves in their registers is, without a move, the first operand
// of the product with W1, as TF32. One thread of others asks for the copies of X to shared memory.
#include "device/overlap.cuh"
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "kron_half.cuh"
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

// Where a factor is in shared memory at first: rows of kSize elements, whose pieces of 8 are in another order in each group of rows
// that a vector of a column has.
template <class T, int kSize>
__device__ int raw_at(int row, int column) {
  return row * kSize + (column ^ row / (16 / static_cast<int>(sizeof(T))) % (kSize / 8) * 8);
}

// Starts to copy a factor there, with zeros around it.
template <class T, int kSize, int kThreads>
__device__ void copy_factor(T* to, const KronFactor& f) {
  constexpr int kVector = 16 / sizeof(T);
  const T* const data = static_cast<const T*>(f.data);
  const bool of_columns = f.row_stride == 1 && f.column_stride % kVector == 0 && f.out % kVector == 0 &&
                          reinterpret_cast<unsigned long long>(data) % 16 == 0;
  if (f.vectors || of_columns) {
#pragma unroll 4
    for (int i = threadIdx.x * kVector; i < kSize * kSize; i += kThreads * kVector) {
      const int row = f.vectors ? i / kSize : i % kSize, column = f.vectors ? i % kSize : i / kSize;
      const bool valid = row < f.out && column < f.in;
      const T* const from = valid ? data + row * f.row_stride + column * f.column_stride : data;
      if (f.vectors) {
        copy_or_zero(reinterpret_cast<char*>(to + raw_at<T, kSize>(row, column)), from, valid);
      } else {
        const auto v = valid ? load_pack<T, kVector>(from) : Pack<T, kVector>{};
#pragma unroll
        for (int e = 0; e < kVector; ++e) to[raw_at<T, kSize>(row + e, column)] = v.at[e];
      }
    }
  } else {
#pragma unroll kSize / 8
    for (int i = threadIdx.x; i < kSize * kSize; i += kThreads) {
      const int row = i / kSize, column = i % kSize;
      const bool valid = row < f.out && column < f.in;
      to[raw_at<T, kSize>(row, column)] = valid ? data[row * f.row_stride + column * f.column_stride] : T();
    }
  }
}

// A thread's pieces of a factor, of 8 columns.
template <class T, int kSize, int kThreads>
struct WidePieces {
  static constexpr int kUnits = kSize / 8, kCount = kSize * kUnits / kThreads;
  Pack<T, 8> v[kCount];

  __device__ static int row(int i) { return (threadIdx.x + i * kThreads) / kUnits; }
  __device__ static int column() { return threadIdx.x % kUnits * 8; }

  __device__ explicit WidePieces(const T* from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = load_pack<T, 8>(from + raw_at<T, kSize>(row(i), column()));
  }
};

// The slots of shared memory, in turn: the one that is next, and the parity of its phase.
template <int kSlots>
struct WideSlots {
  int next = 0;
  unsigned parity = 0;

  __device__ void advance(int by) {
    next += by;
    if (next >= kSlots) {
      next -= kSlots;
      parity ^= 1;
    }
  }
};

// Copies all samples of a block to its slots, kRows rows to each, as matrices of 128 bytes a row. One thread does.
template <class T, int kSize, int kRows, int kSlots>
__device__ void copy_samples(const KronWideParams& p, char* to, unsigned long long* full, unsigned long long* empty) {
  constexpr int kColumns = 128 / sizeof(T), kMatrix = kRows * 128, kSlot = kSize / kColumns * kMatrix;
  WideSlots<kSlots> slot;
#pragma unroll 1
  for (long long sample = blockIdx.x; sample < p.rows; sample += gridDim.x) {
#pragma unroll 1
    for (int row = 0; row < kSize; row += kRows, slot.advance(1)) {
      wait_for_arrivals(&empty[slot.next], slot.parity ^ 1);
      arrive_expecting(&full[slot.next], kSlot);
#pragma unroll
      for (int i = 0; i < kSize / kColumns; ++i)
        copy_box(to + slot.next * kSlot + i * kMatrix, p.matrices, i * kColumns, row, static_cast<int>(sample), &full[slot.next]);
    }
  }
}

// What a thread has of a sample's results: kCount pairs of neighbours in a row, in rows row_of(i) and from `column` on.
template <class T, int kCount>
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
    each(y, rows, columns, column, [&](int i, bool valid, T* at) { store_if(valid, at, v[i]); });
  }
  __device__ void load(const T* bias, int rows, int columns, int column) {
    if (reinterpret_cast<unsigned long long>(bias) % (2 * sizeof(T)) == 0) {
      each(bias, rows, columns, column, [&](int i, bool valid, const T* at) { load_if(valid, at, v[i]); });
    } else {
      each(bias, rows, columns, column, [&](int i, bool valid, const T* at) {
        if (valid) v[i] = {at[0], at[1]};
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

// Of factors of up to kUsed, which lie in shared memory as those of kSize do.
template <class T, int kSize, int kUsed>
__device__ void kron_wide(const KronWideParams& p) {
  // kRows of a sample are in a slot of shared memory, as matrices of 128 bytes a row; W1 and W2 are as ones of kSize rows.
  // A sample has kCopies slots, and kParts times 128 threads, which are a team.
  constexpr int kVector = 16 / sizeof(T), kSlots = wide_slots(kSize, sizeof(T)), kColumns = 128 / sizeof(T);
  static_assert(kUsed == kSize || wide_rows(kSize, sizeof(T)) == kSize, "parts of a sample have 8 tiles each");
  constexpr int kRows = wide_rows(kSize, sizeof(T)), kCopies = kSize / kRows, kMatrices = kSize / kColumns;
  constexpr int kWhole = kSize * 128, kSlot = wide_copy(kSize, sizeof(T));
  constexpr int kTiles = kUsed / 8, kSteps = kUsed * static_cast<int>(sizeof(T)) / 32;
  constexpr int kWarps = wide_threads(kSize) / 32, kParts = kSize / 64, kTeams = kWarps / 4 / kParts;
  using Pieces = WidePieces<T, kSize, kWarps * 32>;
  __shared__ unsigned long long full[kSlots], empty[kSlots];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // which all lanes are known to have
  char* const slots = shared_at<char>(0) + (-shared_address(kron_shared) & 1023);
  char *const last = slots + kSlots * kSlot, *const first = last + kMatrices * kWhole;
  if (warp < kWarps) {  // both factors as they are, where the other one will be: before there are other copies to wait for
    copy_factor<T, kSize, kWarps * 32>(reinterpret_cast<T*>(last), p.factors[0]);
    copy_factor<T, kSize, kWarps * 32>(reinterpret_cast<T*>(first), p.factors[1]);
    commit_copies();
  } else if (warp == kWarps && lane == 0) {
    fetch_map(p.matrices);
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      init_arrivals(&full[i], 1);
      init_arrivals(&empty[i], kParts * 4);
    }
    show_to_products();
  }
  __syncthreads();
  if (warp >= kWarps) {
    keep_registers<kWideCopyRegisters>();
    if (warp == kWarps && lane == 0) copy_samples<T, kSize, kRows, kSlots>(p, slots, full, empty);
    return;
  }

  take_registers<wide_registers(kWarps * 32)>();
  wait_for_copies<0>();
  sync_warps(1, kWarps);
  const Pieces w1(reinterpret_cast<const T*>(last)), w2(reinterpret_cast<const T*>(first));
  sync_warps(1, kWarps);
  int exponents[2];
  find_exponents<T, kWarps>(reinterpret_cast<int*>(first), exponents, {magnitude_of(w1.v), magnitude_of(w2.v)});
  sync_warps(1, kWarps);
  // Of 8 columns of W1, those of even numbers come first, so that what multiplies them lies in registers; of 16 rows of W2, too, so
  // that a thread has neighbours of Y.
  const float scale_first = power_of_two(-exponents[0]), scale_last = power_of_two(-exponents[1]);
#pragma unroll
  for (int i = 0; i < Pieces::kCount; ++i) {
    const int row = Pieces::row(i), column = Pieces::column();
    const auto v = convert<float>(w1.v[i]);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int piece = column / 4 + odd;
      Pack<float, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.at[e] = near_tf32(v.at[2 * e + odd] * scale_first);
      store_pack(first + piece / 8 * kWhole + swizzled(row, piece % 8), four);
    }
    const auto u = convert<float>(w2.v[i]);
    const int to = row / 16 * 16 + row % 2 * 8 + row % 16 / 2;
#pragma unroll
    for (int part = 0; part < 8 / kVector; ++part) {
      const int piece = column / kVector + part;
      Pack<float, kVector> some;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float scaled = u.at[part * kVector + e] * scale_last;
        some.at[e] = kSame<T, float> ? near_tf32(scaled) : scaled;
      }
      store_pack(last + piece / 8 * kWhole + swizzled(to, piece % 8), convert<T>(some));
    }
  }
  show_to_products();
  sync_warps(1, kWarps);
  int exponent = exponents[0] + exponents[1];
  const float scale = take_power_of_two(exponent), scale_between = power_of_two(exponent);
  const unsigned long long slot_matrix = matrix_at(shared_address(slots)), first_matrix = matrix_at(shared_address(first));
  const unsigned long long last_matrix = matrix_at(shared_address(last) + warp / 4 % kParts * 64 * 128);
  const int out_rows = p.factors[0].out, out_columns = p.factors[1].out;
  const int column = warp % (4 * kParts) * 16 + lane / 4 * 2;  // and the next one: of Y
  const int team = warp / (4 * kParts);
  const long long stride = 1LL * kTeams * gridDim.x;
  WideSlots<kSlots> slot;
  slot.advance(team);
  float t[kTiles][4] = {}, y[kTiles][4] = {};
  WideResults<T, 2 * kTiles> results;
  for (long long sample = blockIdx.x + 1LL * team * gridDim.x;; sample += stride) {
    const bool more = sample < p.rows;
    const int used = slot.next;
    begin_products(t);
#pragma unroll
    for (int part = 0; part < kCopies; ++part) {
      if (more) wait_for_arrivals(&full[slot.next], slot.parity);
      const unsigned long long x_matrix = slot_matrix + slot.next * (kSlot / 16);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const unsigned long long a = last_matrix + (s / 4 * kWhole + s % 4 * 32) / 16;
        const unsigned long long b = x_matrix + (s / 4 * kRows * 128 + s % 4 * 32) / 16;
        if constexpr (kRows == 128) {
          multiply<T>(t, a, b, s > 0);
        } else {
          multiply<T>(reinterpret_cast<float (&)[8][4]>(t[part * 8]), a, b, s > 0);
        }
      }
      slot.advance(kTeams);
    }
    end_products();
    // Meanwhile the results of the sample before leave; after the last one, all is done.
    const long long before = sample - stride;
    if (before >= 0) results.store(static_cast<T*>(p.y.data) + offset_of(p.y, before), out_rows, out_columns, column);
    wait_for_products(t);
    if (!more) break;
    if (lane < kCopies) arrive(&empty[used + lane - (used + lane < kSlots ? 0 : kSlots)]);
    unsigned between[kTiles][4];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i)  // rows, then columns
      between[i / 4][i % 4] = __float_as_uint(near_tf32(t[i / 4][i % 2 * 2 + i % 4 / 2] * scale_between));
    begin_products(y);
#pragma unroll
    for (int s = 0; s < kTiles; ++s) multiply<float>(y, between[s], first_matrix + (s / 4 * kWhole + s % 4 * 32) / 16, s > 0);
    end_products();
    if (p.bias) results.load(wide_bias<T>(p, sample), out_rows, out_columns, column);  // meanwhile, too
    wait_for_products(y);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      Pack<float, 2> v = {y[i / 2][i % 2] * scale, y[i / 2][i % 2 + 2] * scale};
      if (p.bias) v = {v.at[0] + convert<float>(results.v[i].at[0]), v.at[1] + convert<float>(results.v[i].at[1])};
      results.v[i] = convert<T>(v);
    }
  }
}

}  // namespace cuops

#define KRON_WIDE(size, used, name, T)                                                                 \
  extern "C" __global__ void __launch_bounds__(cuops::wide_threads(size) + cuops::kWideCopyThreads, 1) \
      kron_wide_##used##_##name(const __grid_constant__ cuops::KronWideParams p) {                     \
    cuops::wait_in_turn();                                                                             \
    cuops::kron_wide<T, size, used>(p);                                                                \
  }

// Instances, as kron_plan_half.cc asks for them.
KRON_WIDE(64, 64, tf32, float)
KRON_WIDE(64, 64, f16, __half)
KRON_WIDE(64, 64, bf16, __nv_bfloat16)
KRON_WIDE(128, 96, f16, __half)
KRON_WIDE(128, 96, bf16, __nv_bfloat16)
KRON_WIDE(128, 128, tf32, float)
KRON_WIDE(128, 128, f16, __half)
KRON_WIDE(128, 128, bf16, __nv_bfloat16)
#else
extern "C" __global__ void kron_wide_nowhere() {}
#endif
