// Samples of 16 bits whose rows start anywhere: what they take of shared memory as they lie in device memory.
#pragma once

namespace cuops {

// With what is before and behind them in vectors, and a word more, which is read and not used.
constexpr int raw_bytes(int elements) { return (2 * elements + 29) / 16 * 16 + 16; }
constexpr int kMostRaw = 16;  // samples at a time
// Room for so many samples of a tile's size, or more that are smaller.
constexpr int raw_room(int size, int samples) { return samples * raw_bytes(size * size); }

}  // namespace cuops
