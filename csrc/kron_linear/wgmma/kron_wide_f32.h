// What the host tells the kernels of kron_linear_wide_f32.cu and kron_linear_wide_bwd_f32.cu.
#pragma once

namespace cuops {

// For factors of up to `size`, 64 or 128: a tile is a matrix of so many rows and columns, as two in float16, each of some of 64
// columns. Samples come in pieces of 16 rows and 32 columns of float32, of which warps make parts of tiles: so many warps, and so
// many pieces of each on their way. Shared memory has some tiles of samples beside those of both factors. Where gradients of a
// factor need no more than the other one, they have one more.
constexpr int kWideF32Rows = 16, kWideF32Piece = kWideF32Rows * 128;
constexpr int wide_f32_tile(int size) { return size * size * 4; }
constexpr int wide_f32_warps(int size) { return size == 64 ? 4 : 8; }
constexpr int wide_f32_pieces(int size) { return size == 64 ? 8 : 2; }
constexpr int wide_f32_slots(int size) { return size == 64 ? 4 : 1; }
constexpr int wide_bwd_f32_slots(int size) { return size == 64 ? 4 : 2; }
constexpr int wide_f32_bytes(int size) {
  return 1024 + (2 + wide_f32_slots(size)) * wide_f32_tile(size) + wide_f32_warps(size) * wide_f32_pieces(size) * kWideF32Piece;
}
// The threads of a block: 256 multiply, and, for gradients of factors of up to 64, 128 more. Where they need them, they have
// registers of the others.
constexpr int wide_f32_threads(int size) { return 256 + 32 * wide_f32_warps(size); }
constexpr int kWideBwdF32Threads = 512;
constexpr int kWideF32CopyRegisters = 48, kWideF32Registers = 208, kWideF32RegistersOf64 = 152;
static_assert(kWideF32CopyRegisters * 256 + kWideF32Registers * 256 <= 65536 &&
                  kWideF32CopyRegisters * 128 + kWideF32RegistersOf64 * 384 <= 65536,
              "what some take, others gave up");

}  // namespace cuops
