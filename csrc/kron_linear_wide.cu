// Kronecker-factored linear layers of two factors of up to 128, in 16 bits or as TF32, on compute capability 9.0: 128 threads
// multiply 64 of the last factor's rows by X^T. What that leaves in their registers is, without a move, the first operand of the
// product with W1, as TF32. One warp more has the copies of X to shared memory.
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "device/kron_half.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"

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

// Where a factor is in shared memory at first: rows of 128 elements, whose pieces of 8 are in another order in each group of rows
// that a vector of a column has.
template <class T>
__device__ int raw_at(int row, int column) {
  return row * kWideSize + (column ^ row / (16 / static_cast<int>(sizeof(T))) % 16 * 8);
}

// Starts to copy a factor there, with zeros around it.
template <class T>
__device__ void copy_factor(T* to, const KronFactor& f) {
  constexpr int kVector = 16 / sizeof(T);
  const T* const data = static_cast<const T*>(f.data);
  const bool of_columns = f.row_stride == 1 && f.column_stride % kVector == 0 && f.out % kVector == 0 &&
                          reinterpret_cast<unsigned long long>(data) % 16 == 0;
  if (f.vectors || of_columns) {
#pragma unroll 4
    for (int i = threadIdx.x * kVector; i < kWideSize * kWideSize; i += kWideThreads * kVector) {
      const int row = f.vectors ? i / kWideSize : i % kWideSize, column = f.vectors ? i % kWideSize : i / kWideSize;
      const bool valid = row < f.out && column < f.in;
      const T* const from = valid ? data + row * f.row_stride + column * f.column_stride : data;
      if (f.vectors) {
        copy_or_zero(reinterpret_cast<char*>(to + raw_at<T>(row, column)), from, valid);
      } else {
        const auto v = valid ? load_pack<T, kVector>(from) : Pack<T, kVector>{};
#pragma unroll
        for (int e = 0; e < kVector; ++e) to[raw_at<T>(row + e, column)] = v.at[e];
      }
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < kWideSize * kWideSize; i += kWideThreads) {
      const int row = i / kWideSize, column = i % kWideSize;
      const bool valid = row < f.out && column < f.in;
      to[raw_at<T>(row, column)] = valid ? data[row * f.row_stride + column * f.column_stride] : T();
    }
  }
}

// A thread's pieces of a factor, of 8 columns.
template <class T>
struct WidePieces {
  static constexpr int kCount = kWideSize * kWideSize / 8 / kWideThreads;
  Pack<T, 8> v[kCount];

  __device__ static int row(int i) { return threadIdx.x / (kWideSize / 8) + i * (kWideThreads * 8 / kWideSize); }
  __device__ static int column() { return threadIdx.x % (kWideSize / 8) * 8; }

  __device__ explicit WidePieces(const T* from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = load_pack<T, 8>(from + raw_at<T>(row(i), column()));
  }
};

template <class T>
__device__ void kron_wide(const KronWideParams& p) {
  // Half a sample's rows are in a slot of shared memory, as matrices of 64 rows and 128 bytes; W1 and W2 are as ones of 128 rows.
  constexpr int kSize = kWideSize, kVector = 16 / sizeof(T), kSlots = wide_slots(sizeof(T)), kColumns = 128 / sizeof(T);
  constexpr int kHalf = kSize / 2 * 128, kWhole = kSize * 128, kMatrices = kSize / kColumns, kSlot = kMatrices * kHalf;
  __shared__ unsigned long long full[kSlots], empty[kSlots];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  char* const slots = shared_at<char>(0) + (-shared_address(kron_shared) & 1023);
  char *const last = slots + kSlots * kSlot, *const first = last + kMatrices * kWhole;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      init_arrivals(&full[i], 1);
      init_arrivals(&empty[i], kWideThreads / 32);
    }
    show_to_products();
  }
  __syncthreads();
  int slot = 0;
  unsigned parity = 0;  // of the slot's phase
  auto advance = [&] {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  };
  if (warp == kWideThreads / 32) {
    if (lane > 0) return;
#pragma unroll 1
    for (long long sample = blockIdx.x; sample < p.rows; sample += gridDim.x) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half, advance()) {
        wait_for_arrivals(&empty[slot], parity ^ 1);
        arrive_expecting(&full[slot], kSlot);
#pragma unroll
        for (int i = 0; i < kMatrices; ++i)
          copy_box(slots + slot * kSlot + i * kHalf, p.matrices, i * kColumns, half * (kSize / 2), static_cast<int>(sample),
                   &full[slot]);
      }
    }
    return;
  }

  // Both factors as they are, where the other one will be.
  copy_factor(reinterpret_cast<T*>(last), p.factors[0]);
  copy_factor(reinterpret_cast<T*>(first), p.factors[1]);
  commit_copies();
  wait_for_copies<0>();
  sync_warps(1, kWideThreads / 32);
  const WidePieces<T> w1(reinterpret_cast<const T*>(last)), w2(reinterpret_cast<const T*>(first));
  sync_warps(1, kWideThreads / 32);
  int exponents[2];
  find_exponents<T, kWideThreads / 32>(reinterpret_cast<int*>(first), exponents, {magnitude_of(w1.v), magnitude_of(w2.v)});
  sync_warps(1, kWideThreads / 32);
  // Of 8 columns of W1, those of even numbers come first, so that what multiplies them lies in registers; of 16 rows of W2, too, so
  // that a thread has neighbours of Y.
  const float scale_first = power_of_two(-exponents[0]), scale_last = power_of_two(-exponents[1]);
#pragma unroll
  for (int i = 0; i < WidePieces<T>::kCount; ++i) {
    const int row = WidePieces<T>::row(i), column = WidePieces<T>::column();
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
  sync_warps(1, kWideThreads / 32);
  int exponent = exponents[0] + exponents[1];
  const float scale = take_power_of_two(exponent), scale_between = power_of_two(exponent);
  const unsigned long long slot_matrix = matrix_at(shared_address(slots)), first_matrix = matrix_at(shared_address(first));
  const unsigned long long last_matrix = matrix_at(shared_address(last) + warp / 4 * kHalf);
  const int out_rows = p.factors[0].out, out_columns = p.factors[1].out;
  const int column = warp * 16 + lane / 4 * 2;  // and the next one: of Y
  auto row_of = [&](int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; };

  float t[2][8][4] = {}, y[2][8][4] = {};
  Pack<T, 2> results[32] = {};
  for (long long sample = blockIdx.x;; sample += gridDim.x) {
    const bool more = sample < p.rows;
    const int used = slot;
    begin_products(t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (more) wait_for_arrivals(&full[slot], parity);
      const unsigned long long x_matrix = slot_matrix + slot * (kSlot / 16);
#pragma unroll
      for (int s = 0; s < kMatrices * 4; ++s)
        multiply<T>(t[half], last_matrix + (s / 4 * kWhole + s % 4 * 32) / 16, x_matrix + (s / 4 * kHalf + s % 4 * 32) / 16, s > 0);
      advance();
    }
    end_products();
    // Meanwhile the results of the sample before leave; after the last one, all is done.
    const long long before = sample - gridDim.x;
    if (before >= 0) {
      T* to = static_cast<T*>(p.y.data) + offset_of(p.y, before) + lane % 4 * 2 * out_columns + column;
      const int rows = column < out_columns ? out_rows : 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        store_if(row_of(i) < rows, to, results[i]);
        to += (i % 2 ? 7 : 1) * out_columns;
      }
    }
    wait_for_products(t);
    if (!more) break;
    if (lane < 2) arrive(&empty[used + lane - (used + lane < kSlots ? 0 : kSlots)]);
    unsigned between[16][4];
#pragma unroll
    for (int i = 0; i < 64; ++i)  // rows, then columns
      between[i / 4][i % 4] = __float_as_uint(near_tf32(t[i / 32][i / 4 % 8][i % 2 * 2 + i % 4 / 2] * scale_between));
    begin_products(y);
#pragma unroll
    for (int s = 0; s < 16; ++s) multiply_tf32(y, between[s], first_matrix + (s / 4 * kWhole + s % 4 * 32) / 16, s > 0);
    end_products();
    wait_for_products(y);
    Pack<float, 2> v[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] = {y[i / 16][i / 2 % 8][i % 2] * scale, y[i / 16][i / 2 % 8][i % 2 + 2] * scale};
    if (p.bias && column < out_columns) {
      const T* bias =
          static_cast<const T*>(p.bias) + sample % p.bias_lead * (out_rows * out_columns) + lane % 4 * 2 * out_columns + column;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (row_of(i) < out_rows) v[i] = {v[i].at[0] + convert<float>(bias[0]), v[i].at[1] + convert<float>(bias[1])};
        bias += (i % 2 ? 7 : 1) * out_columns;
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) results[i] = convert<T>(v[i]);
  }
}

}  // namespace cuops

#define KRON_WIDE(name, T)                                                  \
  extern "C" __global__ void __launch_bounds__(cuops::kWideThreads + 32, 1) \
      kron_wide_##name(const __grid_constant__ cuops::KronWideParams p) {   \
    cuops::kron_wide<T>(p);                                                 \
  }

// Instances, as kron_plan_half.cc asks for them.
KRON_WIDE(tf32, float)
KRON_WIDE(f16, __half)
KRON_WIDE(bf16, __nv_bfloat16)
#else
extern "C" __global__ void kron_wide_nowhere() {}
#endif
