// Kronecker-factored linear layers of two factors of up to 64, 96 or 128, in 16 bits or as TF32, on compute capability 9.0: 128
// threads multiply 64 of the last factor's rows by X^T. What that leaves in their registers is, without a move, the first operand
// of the product with W1, as float16 or TF32. One thread of others asks for the copies of X to shared memory, or they lay out its
// rows there.
#include "device/overlap.cuh"
#include "device/tensor_copy.cuh"
#include "device/tuned.cuh"
#include "device/wgmma.cuh"
#include "kron_linear/mma/kron_half.cuh"
#include "kron_pieces.cuh"
#include "kron_wide_between.cuh"
#include "kron_wide_results.cuh"
#include "kron_wide_rows.cuh"

CUOPS_ONLY_FOR(90a, CUDA 12.0)

namespace cuops {

// Whose products wait for all else that a thread does.
constexpr bool kProductsWait = __CUDACC_VER_MAJOR__ * 10 + __CUDACC_VER_MINOR__ < 128;

// Copies of samples to slots in turn, kRows rows to each, as matrices of 128 bytes a row. One thread asks for them.
template <class T, int kSize, int kRows, int kSlots>
class WideCopies {
 public:
  __device__ WideCopies(const KronWideParams& p, char* to, unsigned long long* full, unsigned long long* empty)
      : p_(p), to_(to), full_(full), empty_(empty) {}

  // The next sample: once it has a slot.
  __device__ void ask(long long sample) {
#pragma unroll 1
    for (int row = 0; row < kSize; row += kRows, slot_.advance(1)) {
      wait_for_arrivals(&empty_[slot_.next], slot_.parity ^ 1);
      arrive_expecting(&full_[slot_.next], kSlot);
#pragma unroll
      for (int i = 0; i < kSize / kColumns; ++i)
        copy_box(to_ + slot_.next * kSlot + i * kMatrix, p_.matrices, i * kColumns, row, static_cast<int>(sample),
                 &full_[slot_.next]);
    }
  }

 private:
  static constexpr int kColumns = 128 / sizeof(T), kMatrix = kRows * 128, kSlot = kSize / kColumns * kMatrix;
  const KronWideParams& p_;
  char* const to_;
  unsigned long long *const full_, *const empty_;
  WideSlots<kSlots> slot_;
};

// What calls an instance is for: all of whole vectors, those of them without a bias, whose factors come in vectors, or samples
// whose rows start anywhere.
enum class WideCalls { kAny, kPlain, kOdd };

// Of factors of up to kUsed, which lie in shared memory as those of kSize do. Where kBlocks share a sample, each has some rows of
// its results, and no other sample.
template <class T, int kSize, int kUsed, int kBlocks, WideCalls kCalls>
__device__ void kron_wide(const KronWideParams& p) {
  // kRows of a sample are in a slot of shared memory, as matrices of 128 bytes a row; W1 and W2 are as ones of kSize rows.
  // A sample has kCopies slots, and kParts times 128 threads, which are a team.
  constexpr bool kPlain = kCalls == WideCalls::kPlain, kOdd = kCalls == WideCalls::kOdd;
  constexpr int kVector = 16 / sizeof(T), kColumns = 128 / sizeof(T);
  constexpr int kSlots = kOdd ? wide_odd_slots(kSize) : wide_slots(kSize, sizeof(T));
  static_assert(kUsed == kSize || wide_rows(kSize, sizeof(T)) == kSize, "parts of a sample have 8 tiles each");
  constexpr int kRows = wide_rows(kSize, sizeof(T)), kCopies = kSize / kRows, kMatrices = kSize / kColumns;
  constexpr int kWhole = kSize * 128, kSlot = wide_copy(kSize, sizeof(T));
  constexpr int kTiles = kUsed / 8, kOutTiles = kTiles / kBlocks, kSteps = kUsed * static_cast<int>(sizeof(T)) / 32;
  using Between = WideBetween<T, kSize, kTiles>;
  using Layers = WideLayers<kSize, kSlots, 1, wide_odd_room(kSize)>;
  constexpr int kWarps = wide_threads(kSize) / 32, kParts = kSize / 64, kTeams = kWarps / 4 / kParts;
  __shared__ unsigned long long full[kSlots], empty[kSlots], asked, there[kOdd ? kMostRaw : 1];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // which all lanes are known to have
  const int block = static_cast<int>(blockIdx.x) / kBlocks, blocks = static_cast<int>(gridDim.x) / kBlocks;
  const int first_row = static_cast<int>(blockIdx.x) % kBlocks * (kSize / kBlocks);
  char* const slots = shared_at<char>(0) + (-shared_address(kron_shared) & 1023);
  char *const last = slots + kSlots * kSlot, *const first = last + kMatrices * kWhole;
  if (warp >= kWarps && lane == 0) {  // all of these warps, as each barrier takes a while
#pragma unroll 1
    for (int i = warp - kWarps; i < kSlots; i += kWideCopyThreads / 32) {
      init_arrivals(&full[i], 1);
      init_arrivals(&empty[i], kParts * 4);
    }
    // Once factors are asked for, samples but the first ones are, which else came before.
    if (warp == kWarps) init_arrivals(&asked, kWarps);
    if constexpr (kOdd) {
      if (warp == kWarps + 1) Layers::init(there);
    }
    show_to_products();
  }
  __syncthreads();
  if (warp >= kWarps) {
    if constexpr (kOdd) {
      keep_registers<wide_lay_registers(kSize)>();
      const Layers layers{{{p.x.data, p.x.stride, p.factors[0].in, p.factors[1].in}},
                          slots,
                          first + kMatrices * kWhole,
                          there,
                          full,
                          empty,
                          block,
                          blocks,
                          p.rows};
      layers.run([&](int n) {
        if (n >= kTeams) wait_for_arrivals(&asked, 0);
      });
      return;
    }
    keep_registers<kWideCopyRegisters>();
    if (warp > kWarps) return;
    WideCopies<T, kSize, kRows, kSlots> copies(p, slots, full, empty);
    long long sample = block;
    if (lane > 0) return;
#pragma unroll 1
    for (int i = 0; sample < p.rows; ++i, sample += blocks) {
      if (i == kTeams) wait_for_arrivals(&asked, 0);
      copies.ask(sample);
    }
    return;
  }

  take_registers<wide_registers(kWarps * 32, kOdd ? wide_lay_registers(kSize) : kWideCopyRegisters)>();
  FactorPieces<T, kSize, kWarps * 32, kPlain> w2;  // both on their way
  FactorPieces<T, kSize, kWarps * 32, kPlain, kSize / kBlocks> w1;
  w2.load(p.factors[1]);
  w1.load(p.factors[0], first_row);
  if (lane == 0) arrive(&asked);
  int* const maxima = reinterpret_cast<int*>(first);
  int exponent_last[1], exponent_first[1];
  find_exponents<T, kWarps>(maxima, exponent_last, {w2.magnitude()});
  // Of 16 rows of W2, those of even numbers come first, so that a thread has neighbours of Y.
  const float scale_last = power_of_two(-exponent_last[0]);
#pragma unroll
  for (int i = 0; i < w2.kCount; ++i) {
    const int row = w2.row(i), to = row / 16 * 16 + row % 2 * 8 + row % 16 / 2;
    const auto u = w2.piece(i);
#pragma unroll
    for (int part = 0; part < 8 / kVector; ++part) {
      const int piece = w2.column(i) / kVector + part;
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

  const unsigned long long slot_matrix = matrix_at(shared_address(slots)), first_matrix = matrix_at(shared_address(first));
  const unsigned long long last_matrix = matrix_at(shared_address(last) + warp / 4 % kParts * 64 * 128);
  const int out_rows = p.factors[0].out - first_row, out_columns = p.factors[1].out, first_result = first_row * out_columns;
  const int column = warp % (4 * kParts) * 16 + lane / 4 * 2;  // and the next one: of Y
  const int team = warp / (4 * kParts);
  const long long stride = 1LL * kTeams * blocks;
  WideSlots<kSlots> slot;
  slot.advance(team);
  // The results of a sample leave during the first product of the next one, which is begun behind the second one of the sample
  // where there are registers for both.
  constexpr bool kAlone = kBlocks > 1, kOverlaps = kSize == 128 && sizeof(T) == 2 && !kAlone;
  float t[kTiles][4] = {}, y[kOutTiles][4] = {};
  const auto begin_first = [&](bool exists) {
#pragma unroll
    for (int part = 0; part < kCopies; ++part) {
      if (exists) wait_for_arrivals(&full[slot.next], slot.parity);
      const unsigned long long x_matrix = slot_matrix + slot.next * (kSlot / 16);
      begin_products<T, kSteps>(
          reinterpret_cast<float (&)[kTiles / kCopies][4]>(t[part * (kTiles / kCopies)]),
          [&](int s) { return last_matrix + (s / 4 * kWhole + s % 4 * 32) / 16; },
          [&](int s) { return x_matrix + (s / 4 * kRows * 128 + s % 4 * 32) / 16; });
      slot.advance(kTeams);
    }
  };
  const auto end_first = [&](bool exists, int used) {
    wait_for_products<0>(t);
    if (exists && lane < kCopies) arrive(&empty[used + lane - (used + lane < kSlots ? 0 : kSlots)]);
  };
  const auto bring_first = [&] {
    find_exponents<T, kWarps, Between::kTop>(maxima, exponent_first, {w1.magnitude()});
    sync_warps(1, kWarps);
    const float scale_first = power_of_two(-exponent_first[0]);
#pragma unroll
    for (int i = 0; i < w1.kCount; ++i) Between::store(first, w1.row(i), w1.column(i), w1.piece(i), scale_first);
    show_to_products();
    sync_warps(1, kWarps);
  };
  long long sample = block + 1LL * team * blocks;
  bool more = sample < p.rows;
  int used = slot.next;
  if constexpr (kProductsWait) {
    bring_first();
    if (!more) return;
    begin_first(true);
    end_first(true, used);
  } else {
    begin_first(more);
    bring_first();
    end_first(more, used);
  }
  const int exponent = exponent_first[0] + exponent_last[0];
#pragma unroll 1
  for (; more; sample += stride) {
    const Between between(t, exponent);
    between.begin(y, first_matrix);
    more = sample + stride < p.rows;
    used = slot.next;
    if (kOverlaps) begin_first(more);  // of nothing that matters, after the last one
    WideResults<T, 2 * kOutTiles, kOdd> results;
    if (!kPlain && p.bias) results.load(wide_bias<T>(p, sample) + first_result, out_rows, out_columns, column);
    wait_for_products<kOverlaps>(y);
#pragma unroll
    for (int i = 0; i < 2 * kOutTiles; ++i) {
      Pack<float, 2> v = {between.result(y[i / 2][i % 2], 0), between.result(y[i / 2][i % 2 + 2], 1)};
      if (!kPlain && p.bias) v = {v.at[0] + convert<float>(results.v[i].at[0]), v.at[1] + convert<float>(results.v[i].at[1])};
      results.v[i] = convert<T>(v);
    }
    if (!kOverlaps && !kAlone) begin_first(more);
    results.store(static_cast<T*>(p.y.data) + offset_of(p.y, sample) + first_result, out_rows, out_columns, column);
    if (!kAlone) end_first(more, used);
  }
}

}  // namespace cuops

#define KRON_WIDE_ONE(size, used, blocks, name, T, calls)                                              \
  extern "C" __global__ void __launch_bounds__(cuops::wide_threads(size) + cuops::kWideCopyThreads, 1) \
      kron_wide_##name(const __grid_constant__ cuops::KronWideParams p) {                              \
    cuops::wait_in_turn();                                                                             \
    cuops::kron_wide<T, size, used, blocks, cuops::WideCalls::calls>(p);                               \
  }
#define KRON_WIDE(size, used, name, T)                           \
  KRON_WIDE_ONE(size, used, 1, used##_##name##_plain, T, kPlain) \
  KRON_WIDE_ONE(size, used, 1, used##_##name, T, kAny)

// Instances, as kron_plan_wide.cc asks for them. Of few samples, plain ones are no faster.
KRON_WIDE(64, 64, tf32, float)
KRON_WIDE(64, 64, f16, __half)
KRON_WIDE(64, 64, bf16, __nv_bfloat16)
KRON_WIDE(128, 96, f16, __half)
KRON_WIDE(128, 96, bf16, __nv_bfloat16)
KRON_WIDE(128, 128, tf32, float)
KRON_WIDE(128, 128, f16, __half)
KRON_WIDE(128, 128, bf16, __nv_bfloat16)
KRON_WIDE_ONE(128, 128, 2, halves_tf32, float, kAny)
KRON_WIDE_ONE(128, 128, 2, halves_f16, __half, kAny)
KRON_WIDE_ONE(128, 128, 2, halves_bf16, __nv_bfloat16, kAny)
KRON_WIDE_ONE(64, 64, 1, 64_f16_odd, __half, kOdd)
KRON_WIDE_ONE(64, 64, 1, 64_bf16_odd, __nv_bfloat16, kOdd)
KRON_WIDE_ONE(128, 128, 1, 128_f16_odd, __half, kOdd)
KRON_WIDE_ONE(128, 128, 1, 128_bf16_odd, __nv_bfloat16, kOdd)
