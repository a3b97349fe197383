// Divisions that round up, and powers of two.
#pragma once

#include <cstdint>

namespace cuops {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// The exponent of the least power of two that is at least n.
inline int log_from(std::int64_t n) {
  int log = 0;
  while ((std::int64_t{1} << log) < n) ++log;
  return log;
}

}  // namespace cuops
