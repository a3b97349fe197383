#include "kron_plan_product.h"

#include <algorithm>
#include <cmath>

namespace cuops {
namespace {

// Microseconds, measured on an H200: of a launch, of an element of a block's sum, of a tile, and of an element of its sum. Blocks
// of a multiprocessor take turns.
struct Costs {
  double start, depth, tile, tile_depth;
};
constexpr Costs kCosts = {4.9, 0.009, 0.54, 0.0038}, kCostsF64 = {4.9, 0.0155, 0.36, 0.0104};
constexpr double kDeepF64 = 96, kDeeper = 0.04;        // a sum beyond which each element of float64 takes this much more
constexpr double kShallow = 16, kShallowTile = 0.36;   // such a sum, of which the block asks for all at once, and its tile
constexpr double kSingles = 350;                       // ns, where elements move one by one
constexpr double kPass = 1.5;                          // of what shared memory holds of a sum, but for the first time
constexpr double kShared[] = {0, 1.1, 1.7, 2.4, 3.5};  // of a sum by 1, 2, 4, 8 or 16 blocks
constexpr int kLeast = 32;                             // elements of a sum, in each of these
constexpr double kIdle = 0.7;                          // tiles of a multiprocessor that take no time beside the first

struct Sizes {
  std::int64_t m, n, k;
};
Sizes sizes_of(const KronProductProblem& p) {
  return p.inner == 1 ? Sizes{p.rows, p.out, p.in} : Sizes{p.out, p.rows * p.inner, p.in};
}
KronProductProblem transposed(KronProductProblem p) {
  std::swap(p.out, p.in);
  return p;
}

// Whether all indices are in the range of the kernel's numbers.
bool fits(const KronProductProblem& p) {
  constexpr std::int64_t most = INT32_MAX - 4 * kKronMostProduct, range = std::int64_t{1} << 32;  // of kron_divisor's
  if (std::min({p.rows, p.inner, p.out, p.in}) < 1 || std::max(p.out, p.in) > kKronMostProduct) return false;
  if (p.rows > most / p.inner) return false;
  if (p.inner > 1 && p.rows * p.inner > range / p.inner) return false;
  for (const Sizes& size : {sizes_of(p), sizes_of(transposed(p))}) {
    const std::int64_t columns = ceil_div(size.n, kProductTile), tiles = ceil_div(size.m, kProductTile) * columns;
    if (tiles > range / columns) return false;
  }
  return true;
}

// What a launch of some products costs.
struct Launch {
  DType dtype;
  double blocks = 0, work = 0, longest = 0;

  const Costs& costs() const { return dtype == kFloat64 ? kCostsF64 : kCosts; }

  void add(const Sizes& size, int splits_log) {
    const double count = static_cast<double>((ceil_div(size.m, kProductTile) * ceil_div(size.n, kProductTile)) << splits_log);
    const double depth = std::ceil(std::ldexp(static_cast<double>(size.k), -splits_log)), most = product_depth(dtype);
    blocks += count;
    const bool shallow = depth <= kShallow && dtype != kFloat64;
    work += count * (shallow ? kShallowTile : costs().tile + costs().tile_depth * depth);
    const double deeper = dtype == kFloat64 ? kDeeper * std::max(0.0, depth - kDeepF64) : 0;
    longest = std::max(
        longest, costs().depth * std::min(depth, most) + kPass * (std::ceil(depth / most) - 1) + kShared[splits_log] + deeper);
  }
  double nanoseconds(const KronDevice& device) const {
    const double each = blocks / device.multiprocessors;
    return 1e3 * (costs().start + longest + work / blocks * std::max(0.0, each - kIdle));
  }
};

// A row of `inner` columns by index of one axis: the axis of the rows, or of the columns of all rows.
KronPlaces places(std::int64_t inner, std::int64_t stride) { return {stride, inner, kron_divisor(inner)}; }

// `beside`: neighbours along the axis are neighbours in memory, `step` elements from those of the other axis.
KronFours fours_of(const void* data, std::int64_t size, std::int64_t step, bool beside, DType dtype) {
  const bool together = size % 4 == 0 && step % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % (4 * size_of(dtype)) == 0;
  return together ? kTogether4 : beside ? kBeside4 : kScattered4;
}

// An array whose rows and columns are one axis, the other being that of the factor.
KronOperand operand_of(const KronProductProblem& p, const KronProductArray& a, std::int64_t size, bool sums_columns) {
  const bool columns = p.inner > 1;  // are what neighbours are
  return {a.data, places(p.inner, a.stride), sums_columns, columns == sums_columns,
          fours_of(a.data, columns ? p.inner : size, a.stride, !columns, p.dtype)};
}

KronOperand operand_of(const KronFactor& w, DType dtype, bool sums_rows) {
  const bool rows = w.column_stride != 1 && w.row_stride == 1;  // are neighbours
  const bool beside = rows || w.column_stride == 1;
  const KronFours fours =
      fours_of(w.data, beside ? (rows ? w.out : w.in) : 1, rows ? w.column_stride : w.row_stride, beside, dtype);
  return {w.data, {w.row_stride, w.column_stride, kron_divisor(1)}, sums_rows, rows == sums_rows, fours};
}

KronProduct along_axis(const KronProductProblem& p, const KronProductArray& to, const KronProductArray& from, const KronFactor& w,
                       bool transposes) {
  const KronOperand state = operand_of(p, from, p.in, false), weight = operand_of(w, p.dtype, transposes);
  const Sizes size = sizes_of(p);
  KronProduct product{};
  product.a = p.inner == 1 ? state : weight;
  product.b = p.inner == 1 ? weight : state;
  product.c = to.data;
  product.places = places(p.inner, to.stride);
  product.splits_rows = p.inner == 1;
  product.fours = fours_of(to.data, p.inner > 1 ? p.inner : p.out, to.stride, p.inner == 1, p.dtype);
  product.bias_lead = 1;
  product.m = static_cast<int>(size.m);
  product.n = static_cast<int>(size.n);
  product.k = static_cast<int>(size.k);
  return product;
}

}  // namespace

KronProductPlan plan_product_bwd(const KronProductProblem& problem, bool needs_dx, bool needs_dw, unsigned most_splits,
                                 const KronDevice& device) {
  KronProductPlan best;
  if (device.tuned != 90 || !fits(problem) || !(needs_dx || needs_dw)) return best;
  const std::int64_t columns = problem.rows * problem.inner;
  for (int log = 0; log == 0 || (needs_dw && 1u << log <= most_splits && columns >> log >= kLeast); ++log) {
    Launch launch{problem.dtype};
    if (needs_dw) launch.add({problem.out, problem.in, columns}, log);
    if (needs_dx) launch.add(sizes_of(transposed(problem)), 0);
    if (launch.nanoseconds(device) < best.nanoseconds) best = {1 << log, launch.nanoseconds(device)};
  }
  return best;
}

KronProduct product_of_y(const KronProductProblem& problem, const KronProductArray& y, const KronProductArray& x,
                         const KronFactor& w) {
  return along_axis(problem, y, x, w, false);
}

KronProduct product_of_dx(const KronProductProblem& problem, const KronProductArray& dx, const KronProductArray& dy,
                          const KronFactor& w) {
  return along_axis(transposed(problem), dx, dy, w, true);
}

KronProduct product_of_dw(const KronProductProblem& p, void* dw, const KronProductArray& dy, const KronProductArray& x) {
  KronProduct product{};
  product.a = operand_of(p, dy, p.out, true);
  product.b = operand_of(p, x, p.in, true);
  product.c = dw;
  product.places = places(1, p.in);
  product.splits_rows = true;
  product.fours = fours_of(dw, p.in, p.in, true, p.dtype);
  product.bias_lead = 1;
  product.m = static_cast<int>(p.out);
  product.n = static_cast<int>(p.in);
  product.k = static_cast<int>(p.rows * p.inner);
  return product;
}

void set_tiles(KronProduct* product, int splits) {
  const std::int64_t column_tiles = ceil_div(product->n, kProductTile);
  product->by_column_tiles = kron_divisor(column_tiles);
  product->splits_log = log_from(splits);
  product->depth = static_cast<int>(round_up(ceil_div(product->k, splits), 4));
  product->blocks = static_cast<int>(ceil_div(product->m, kProductTile) * column_tiles * splits);
}

Kernel& product_kernel(DType dtype) {
  static const KernelTable table("kron_product_", {{"kron_linear_product", {""}}});
  return table.at(dtype, 0);
}

KronGroup plan_product(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  if (group.count != 1 || !problem.linear || device.tuned != 90) return group;
  const KronSize& size = problem.sizes[0];
  const KronProductProblem product{problem.dtype, problem.rows, problem.inner, size.out, size.in};
  if (!fits(product)) return group;
  const Sizes tiles = sizes_of(product);
  Launch launch{problem.dtype};
  launch.add(tiles, 0);
  const bool in_fours = size.in % 4 == 0 && (problem.inner > 1 ? problem.inner : size.out) % 4 == 0;
  group.nanoseconds = launch.nanoseconds(device) + (in_fours ? 0 : kSingles);
  group.fused = true;
  group.kernel = &product_kernel(problem.dtype);
  group.params.emplace<KronOneProduct>();
  const double columns = static_cast<double>(problem.rows) * problem.inner;
  group.bytes = size_of(problem.dtype) * columns * (size.in + size.out);
  group.operations = 2 * columns * size.in * size.out;
  group.shape = {static_cast<unsigned>(ceil_div(tiles.m, kProductTile) * ceil_div(tiles.n, kProductTile)), kProductThreads};
  return group;
}

}  // namespace cuops
