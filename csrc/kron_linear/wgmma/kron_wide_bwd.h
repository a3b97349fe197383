// What the host tells the kernels of kron_linear_wide_bwd.cu.
#pragma once

#include "kron_wide_rows.h"

namespace cuops {

// For factors of up to `size`, 64 or 128: a tile is a matrix of so many rows and columns in 16 bits, with zeros around it, each of
// some of 64 columns. Shared memory has those of both factors, and slots for x and dy of a sample.
constexpr int wide_bwd_tile(int size) { return size * size * 2; }
constexpr int wide_bwd_slots(int size) { return size == 64 ? 6 : 2; }
constexpr int wide_bwd_bytes(int size) { return 1024 + (2 + 2 * wide_bwd_slots(size)) * wide_bwd_tile(size); }
// The same where rows are unaligned, beside room for samples as they lie.
constexpr int wide_bwd_odd_slots(int size) { return size == 64 ? 6 : 1; }
constexpr int wide_bwd_odd_room(int size) { return raw_room(size, size == 64 ? 4 : 1); }  // for each array
constexpr int wide_bwd_odd_bytes(int size) {
  return 1024 + (2 + 2 * wide_bwd_odd_slots(size)) * wide_bwd_tile(size) + 2 * wide_bwd_odd_room(size);
}
// Of 128 threads each: those that multiply. As many more are for the one that asks for copies, and leave registers to them.
constexpr int kWideBwdTeams = 3, kWideBwdThreads = 128 * (kWideBwdTeams + 1);
constexpr int kWideBwdCopyRegisters = 24, kWideBwdLayRegisters = 32, kWideBwdRegisters = 160;
static_assert((kWideBwdLayRegisters + kWideBwdTeams * kWideBwdRegisters) * 128 <= 65536, "registers of a multiprocessor");

}  // namespace cuops
