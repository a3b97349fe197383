// What the host tells the kernels of kron_linear_wide_bwd.cu.
#pragma once

namespace cuops {

// A tile is a matrix of up to 128 rows and columns in 16 bits, with zeros around it, as two of 64 columns. Shared memory has those
// of both factors, and slots for x and dy of a sample.
constexpr int kWideBwdSize = 128, kWideBwdTile = kWideBwdSize * kWideBwdSize * 2, kWideBwdSlots = 2;
constexpr int kWideBwdBytes = 1024 + (2 + 2 * kWideBwdSlots) * kWideBwdTile;
// Of 128 threads each: those that multiply. As many more are for the one that asks for copies, and leave registers to them.
constexpr int kWideBwdTeams = 3, kWideBwdThreads = 128 * (kWideBwdTeams + 1);
constexpr int kWideBwdCopyRegisters = 24, kWideBwdRegisters = 160;
static_assert((kWideBwdCopyRegisters + kWideBwdTeams * kWideBwdRegisters) * 128 <= 65536, "registers of a multiprocessor");

}  // namespace cuops
