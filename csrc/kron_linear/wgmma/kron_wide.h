// What the host tells the kernels of kron_linear_wide.cu and kron_linear_wide_f32.cu.
#pragma once

#include "kron_linear.h"
#include "kron_wide_rows.h"
#include "tensor_map.h"

namespace cuops {

// For factors of up to `size`, 64 or 128: the threads that compute, beside those of which one asks for copies,
// and the registers of either. A block starts with as many a thread as a multiprocessor has; from what some give up the others
// take, and would wait forever for more than there are.
constexpr int kWideMost = 128, kWideCopyThreads = 128, kWideCopyRegisters = 24;
constexpr int wide_threads(int size) { return size == 64 ? 512 : 256; }
constexpr int wide_registers(int threads, int given = kWideCopyRegisters) {
  const int block = threads + kWideCopyThreads;
  return (65536 / block / 8 * 8 * block - given * kWideCopyThreads) / threads / 8 * 8;
}
// Of X, the rows that one copy takes, and its bytes; the bytes of W1 and W2; how many copies shared memory has beside these, as
// many as have room, but no more than help; and all of its bytes.
constexpr int wide_rows(int size, int element_size) { return element_size == 2 ? size : 64; }
constexpr int wide_copy(int size, int element_size) { return wide_rows(size, element_size) * size * element_size; }
constexpr int wide_factors(int size, int element_size) { return 2 * size * size * element_size; }
constexpr int kWideMostSlots = 16;
constexpr int wide_slots(int size, int element_size) {
  const int room = (225 * 1024 - wide_factors(size, element_size)) / wide_copy(size, element_size);
  return room < kWideMostSlots ? room : kWideMostSlots;
}
constexpr int wide_bytes(int size, int element_size) {
  return 1024 + wide_factors(size, element_size) + wide_slots(size, element_size) * wide_copy(size, element_size);
}

// Where rows of 16 bits start anywhere, threads lay them out: how many copies there are, and the room for samples as they lie.
constexpr int wide_lay_registers(int size) { return size == 64 ? 64 : 40; }
constexpr int wide_odd_slots(int size) { return size == 64 ? 12 : 3; }
constexpr int wide_odd_room(int size) { return raw_room(size, size == 64 ? 8 : 2); }
constexpr int wide_odd_bytes(int size) {
  return 1024 + wide_factors(size, 2) + wide_odd_slots(size) * wide_copy(size, 2) + wide_odd_room(size);
}

struct KronWideParams {
  TensorMap matrices;  // of x
  Rows x, y;           // of a sample
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[2];
  int columns;  // beyond the only factor, or 0: a sample is all that has the same of them, 64 at a time
  // For the host, which makes the map: rows of x that one copy takes, 0 where no map brings them; whether they are rounded to TF32.
  int box_rows;
  bool as_tf32;
};
static_assert(sizeof(KronWideParams) == 384, "host and device must agree on the layout");

}  // namespace cuops
