// What the host tells the kernels of kron_linear_wide_bwd_f32.cu.
#pragma once

namespace cuops {

// A tile is a matrix of up to 128 rows and columns, as two in float16, each of two of 64 columns. Shared memory has three, and for
// each of 8 warps two pieces of 16 rows and 32 columns in float32, which become parts of tiles.
constexpr int kWideF32Size = 128, kWideF32Matrix = kWideF32Size * 128, kWideF32Tile = 4 * kWideF32Matrix;
constexpr int kWideF32Rows = 16, kWideF32Piece = kWideF32Rows * 128, kWideF32Pieces = 2, kWideF32Warps = 8;
constexpr int kWideF32Bytes = 1024 + 3 * kWideF32Tile + kWideF32Warps * kWideF32Pieces * kWideF32Piece;
// 256 threads multiply, and have registers of the others, which bring samples and make them tiles.
constexpr int kWideF32Threads = 256 + 32 * kWideF32Warps, kWideF32CopyRegisters = 48, kWideF32Registers = 208;
static_assert(kWideF32CopyRegisters * (kWideF32Threads - 256) + kWideF32Registers * 256 <=
                  65536 / kWideF32Threads / 8 * 8 * kWideF32Threads,
              "what some take, others gave up");

}  // namespace cuops
