// Where the elements of a tile of kron_linear_small.cu are, and which thread takes which of them in each pass.
#pragma once

#include <cstdint>
#include <vector>

#include "kron_plan.h"

namespace cuops {

// An axis of the tile: neighbouring factors whose product is 8 or 16, or columns (count == 0), or samples (first < 0).
struct KronAxis {
  int first, count, log, shared, memory;
};

struct KronTileSize {
  int shared, products;           // elements with the gaps between them; products an element
  std::int64_t elements, sample;  // of the tile; of a sample in device memory
};

// The axes that factors make: all ways.
std::vector<std::vector<KronAxis>> small_axes(const std::vector<KronSize>& sizes);

// The passes over a tile; false where they are too many.
bool lay_out(std::vector<KronAxis> axes, std::int64_t inner, int log_samples, int columns, KronSmallParams* params,
             KronTileSize* tile);

// The strides of rows, which plans do not know; chunks are told apart by their samples.
void set_sample_strides(KronSmallParams* p);

}  // namespace cuops
