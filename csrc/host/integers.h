// Divisions that round up, powers of two, and how many elements are in a vector.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace cuops {

// Elements of a vector of 16 bytes.
inline int width_of(DType dtype) { return 16 / size_of(dtype); }

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// The exponent of the least power of two that is at least n.
inline int log_from(std::int64_t n) {
  int log = 0;
  while ((std::int64_t{1} << log) < n) ++log;
  return log;
}

}  // namespace cuops
