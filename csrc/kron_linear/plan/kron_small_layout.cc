// Where the elements of a tile of kron_linear_small.cu are, and which thread takes which of them in each pass.
#include "kron_small_layout.h"

#include <algorithm>

namespace cuops {
namespace {

struct Bit {
  int axis, shared, memory, sample;
};

// The bits of all axes but some, as threads take them: the first ones such that a warp's elements, one or four each, are in
// different banks, then those nearest in device memory.
std::vector<Bit> order_bits(const std::vector<KronAxis>& axes, int skip, int skip_too, bool fours, bool by_memory) {
  std::vector<Bit> left, ordered;
  for (int a = static_cast<int>(axes.size()) - 1; a >= 0; --a) {
    if (a == skip || a == skip_too) continue;
    for (int b = 0; b < axes[a].log; ++b)
      left.push_back({a, axes[a].shared << b, axes[a].memory << b, axes[a].first < 0 ? 1 << b : 0});
  }
  std::stable_sort(left.begin(), left.end(), [](const Bit& a, const Bit& b) {
    return a.sample != b.sample && (a.sample == 0 || b.sample == 0) ? a.sample == 0 : a.memory < b.memory;
  });
  if (by_memory) return left;
  for (const int bank : fours ? std::vector<int>{8, 16, 4} : std::vector<int>{1, 2, 4, 8, 16}) {
    const auto found = std::find_if(left.begin(), left.end(), [&](const Bit& b) { return b.shared % 32 == bank; });
    if (found == left.end()) continue;
    ordered.push_back(*found);
    left.erase(found);
  }
  ordered.insert(ordered.end(), left.begin(), left.end());
  return ordered;
}

// Bits as parts of a number, lowest first; 0 where there are too many.
int parts_of(const std::vector<Bit>& bits, KronSmallPart* parts) {
  int count = 0, last_axis = -1;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const Bit& b = bits[i];
    if (count > 0 && b.axis == last_axis && b.shared == parts[count - 1].shared << parts[count - 1].log) {
      ++parts[count - 1].log;
      continue;
    }
    if (count == kKronParts) return 0;
    parts[count++] = {1, b.shared, b.memory, b.sample};
    last_axis = b.axis;
  }
  return count;
}

void find_axes(const std::vector<KronSize>& sizes, std::size_t first, std::vector<KronAxis>* axes,
               std::vector<std::vector<KronAxis>>* found) {
  if (first == sizes.size()) return found->push_back(*axes);
  std::int64_t size = 1;
  for (std::size_t i = first; i < sizes.size() && size <= 16; ++i) {
    size *= sizes[i].in;
    if (size != 8 && size != 16) continue;
    axes->push_back({static_cast<int>(first), static_cast<int>(i + 1 - first), log_from(size), 0, 0});
    find_axes(sizes, i + 1, axes, found);
    axes->pop_back();
  }
}

}  // namespace

std::vector<std::vector<KronAxis>> small_axes(const std::vector<KronSize>& sizes) {
  std::vector<std::vector<KronAxis>> found;
  std::vector<KronAxis> axes;
  find_axes(sizes, 0, &axes, &found);
  return found;
}

bool lay_out(std::vector<KronAxis> axes, std::int64_t inner, int log_samples, int columns, KronSmallParams* params,
             KronTileSize* tile) {
  KronSmallParams& p = *params;
  const bool by_columns = inner > 1;
  const int last = static_cast<int>(axes.size());  // once axes[0] has the samples
  if (by_columns) axes.push_back({0, 0, log_from(columns), 0, 0});
  axes.insert(axes.begin(), {-1, 0, log_samples, 0, 0});
  // Where elements are; gaps bring what a warp works on at the same time to different banks.
  int shared = 1, sum = 0;
  std::int64_t memory = 1, elements = 1;
  for (int a = static_cast<int>(axes.size()) - 1, depth = 0; a >= 0; --a, ++depth) {
    KronAxis& axis = axes[a];
    if (!by_columns && depth == 2) shared += 4;
    if (!by_columns && depth == 3) shared += 8;
    axis.shared = shared;
    axis.memory = axis.first < 0 ? 0 : static_cast<int>(memory);
    shared <<= axis.log;
    if (axis.first >= 0) memory = axis.count == 0 ? inner : memory << axis.log;
    elements <<= axis.log;
    if (shared > 60000 || memory > INT32_MAX) return false;
    if (axis.count > 0) sum += 1 << axis.log;
  }
  p.stages = 0;
  auto add = [&](int axis, bool pair) {
    if (p.stages == kKronSteps) return false;
    KronSmallStage& stage = p.stage[p.stages++];
    const KronAxis& outer = axes[axis];
    stage.pair = pair;
    stage.unit = !by_columns && axis == last && !pair;
    stage.log_size = outer.log;
    stage.shared = outer.shared;
    stage.memory = outer.memory;
    for (int i = 0; i < 1 + pair; ++i) {
      stage.first[i] = axes[axis + i].first;
      stage.count[i] = axes[axis + i].count;
    }
    std::vector<Bit> bits = order_bits(axes, axis, pair ? axis + 1 : -1, stage.unit, false);
    if (pair) {
      for (int j = 0; j < 8; ++j) stage.fiber[j] = {0, j * axes[axis + 1].shared, j * axes[axis + 1].memory, 0};
    } else {
      const int log = 6 - outer.log;
      if (static_cast<int>(bits.size()) < log) return false;
      for (int j = 0; j < 1 << log; ++j) {
        stage.fiber[j] = {};
        for (int b = 0; b < log; ++b) {
          const Bit& bit = bits[bits.size() - log + b];
          if (!(j >> b & 1)) continue;
          stage.fiber[j].shared += bit.shared;
          stage.fiber[j].memory += bit.memory;
          stage.fiber[j].sample += bit.sample;
        }
      }
      bits.resize(bits.size() - log);
    }
    stage.parts = parts_of(bits, stage.part);
    return stage.parts > 0 || bits.empty();
  };
  // From the inside out; of the axes that are not the innermost, the outer ones go in pairs.
  std::vector<std::pair<int, bool>> order;
  const int strided = by_columns ? last : last - 1;
  for (int a = 1; a <= strided;) {
    const bool pair = a < strided && axes[a].log == 3 && axes[a + 1].log == 3;
    order.push_back({a, pair});
    a += 1 + pair;
  }
  if (!by_columns) order.push_back({last, false});
  std::reverse(order.begin(), order.end());
  p.copies_out = order.size() == 1 && !by_columns;
  for (const auto& [axis, pair] : order)
    if (!add(axis, pair)) return false;
  std::vector<Bit> bits = order_bits(axes, -1, -1, false, true);
  bits.erase(bits.begin(), bits.begin() + 2);
  p.chunk_parts = parts_of(bits, p.chunk);
  *tile = {shared, sum, elements, memory};
  return p.chunk_parts > 0;
}

void set_sample_strides(KronSmallParams* p) {
  for (int s = 0; s < p->stages; ++s) {
    KronSmallStage& stage = p->stage[s];
    const int stride = static_cast<int>(s == 0 ? p->x.stride : p->y.stride);
    for (int i = 0; i < stage.parts; ++i) stage.part[i].memory += stage.part[i].sample * stride;
    for (KronSmallPart& fiber : stage.fiber) fiber.memory += fiber.sample * stride;
  }
}

}  // namespace cuops
