// Products of neighbouring factors, and the factors' gradients from those of products: checks, the launches.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "kron_linear/kron_factors.h"
#include "kron_merge.h"

namespace cuops {
namespace {

using Tensors = tvm::ffi::Array<tvm::ffi::Tensor>;
using Optionals = tvm::ffi::Array<tvm::ffi::Optional<tvm::ffi::Tensor>>;
using Counts = tvm::ffi::Array<int64_t>;  // of neighbouring factors that each product is of

Kernel& kernel_of(DType dtype, bool merges) {
  static Kernel kernels[][2] = {{{"kron_linear_merge", "kron_unmerge_f64"}, {"kron_linear_merge", "kron_merge_f64"}},
                                {{"kron_linear_merge", "kron_unmerge_f32"}, {"kron_linear_merge", "kron_merge_f32"}}};
  return kernels[dtype != kFloat64][merges];
}

// The factors, and their products.
KronMergeParams params_of(const Tensors& factors, const Counts& counts, const OptionalTensor& scales, const char* products,
                          const Optionals& arrays) {
  if (counts.empty() || counts.size() > kMergeProducts) raise("ValueError", "counts: expected 1 to 8 products");
  std::int64_t counted = 0;
  for (const std::int64_t count : counts) {
    if (count < 1 || count > kKronFactors) raise("ValueError", "counts: expected 1 to 16 factors of each product");
    counted += count;
  }
  if (counted != static_cast<std::int64_t>(factors.size()) || counted > kMergeFactors)
    raise("ValueError", "counts: expected as many as there are factors, at most 32");
  KronMergeParams p{};
  p.dtype = dtype_of(factors[0], "factors");
  const DLDevice device = factors[0].device();
  expect_cuda(factors[0], "factors");
  const std::vector<KronSize> sizes = sizes_of(factors, p.dtype, device);
  for (const KronSize& size : sizes)
    if (std::min(size.out, size.in) < 1) raise("ValueError", "factors: expected no empty one");
  fill_factors(p.factors, factors, p.dtype);
  p.factor_count = static_cast<int>(counted);
  p.product_count = static_cast<int>(counts.size());
  if (static_cast<int>(arrays.size()) != p.product_count)
    raise("ValueError", std::string(products) + ": expected one for each product");
  for (int which = 0, first = 0; which < p.product_count; first += p.products[which++].count) {
    KronMergeProduct& product = p.products[which];
    product.first = first;
    product.count = static_cast<int>(counts[which]);
    std::int64_t rows = 1, columns = 1;
    for (int k = product.first; k < product.first + product.count; ++k) {
      rows *= sizes[k].out;
      columns *= sizes[k].in;
      if (std::max(rows, columns) > kMergeLargest)
        raise("ValueError", "factors: expected products of up to " + std::to_string(kMergeLargest) + " rows and columns");
    }
    product.rows = static_cast<int>(rows);
    product.columns = static_cast<int>(columns);
    product.dtype = p.dtype;
    if (!arrays[which].has_value()) continue;
    const tvm::ffi::Tensor array = *arrays[which];
    product.dtype = dtype_of(array, products);
    if (product.dtype != p.dtype && product.dtype != accumulator_of(p.dtype))
      raise("TypeError", std::string(products) + ": expected the factors' dtype or that of their sums");
    expect_matrix(array, products, product.dtype, device, rows, columns);
    product.data = data_of(TensorView(array));
  }
  if (scales.has_value()) {
    for (const KronSize& size : sizes)  // of which kernels find the largest element, by `divide`
      if (size.out * size.in * size.in >> 32 > 0) raise("ValueError", "factors: expected smaller ones beside scales");
    const TensorView powers = *scales;
    if (p.dtype == kFloat64) raise("TypeError", "scales: expected none of float64, whose range is wide");
    expect_device(powers, "scales", device);
    if (dtype_of(powers, "scales") != kFloat32 || powers.numel() != p.product_count || !powers.is_contiguous())
      raise("ValueError", "scales: expected a float32 for each product");
    p.scales = reinterpret_cast<float*>(data_of(powers));
  }
  return p;
}

void launch_blocks(KronMergeParams& p, std::int64_t blocks, bool merges, DLDevice on, unsigned cluster = 1) {
  const ContextGuard context(on.device_id);
  LaunchShape shape{static_cast<unsigned>(blocks), kMergeThreads, 1, cluster};
  shape.overlaps = true;
  launch(kernel_of(p.dtype, merges), on.device_id, current_stream(on), shape, &p);
}

// products: the Kronecker products of the first factors, of the next ones, and so on, so many each. With `scales`, of an element a
// product, each is multiplied by a power of two, so that their largest elements are about alike; the product of all powers is 1.
void kron_linear_merge(Optionals products, OptionalTensor scales, Tensors factors, Counts counts) {
  KronMergeParams p = params_of(factors, counts, scales, "products", products);
  std::int64_t blocks = 0;
  for (int which = 0; which < p.product_count; ++which) {
    KronMergeProduct& product = p.products[which];
    if (product.data == nullptr) raise("ValueError", "products: expected an array for each");
    product.blocks = static_cast<int>(ceil_div(std::int64_t{product.rows} * product.columns, kMergeThreads));
    if (p.scales) product.blocks = std::min(product.blocks, kMergeBalanced);
    blocks += product.blocks;
  }
  launch_blocks(p, blocks, true, factors[0].device());
}

// gradients: of each factor, where one is wanted, from those of the products that kron_linear_merge made.
void kron_linear_unmerge(Optionals gradients, Optionals dproducts, OptionalTensor scales, Tensors factors, Counts counts) {
  KronMergeParams p = params_of(factors, counts, scales, "dproducts", dproducts);
  if (gradients.size() != factors.size()) raise("ValueError", "gradients: expected one for each factor");
  const DLDevice on = factors[0].device();
  const int most_lanes = kMergeThreads * std::min<int>(kMergeCluster, hardware("kron_linear_merge", on.device_id).largest_cluster);
  int cluster = 1;
  for (int k = 0, which = 0; k < p.factor_count; ++k) {
    if (k == p.products[which].first + p.products[which].count) ++which;
    if (!gradients[k].has_value()) continue;
    const KronMergeProduct& product = p.products[which];
    if (product.data == nullptr) raise("ValueError", "dproducts: expected that of each factor whose gradient is wanted");
    const tvm::ffi::Tensor gradient = *gradients[k];
    const KronFactor& f = p.factors[k];
    expect_matrix(gradient, "gradients", p.dtype, on, f.out, f.in);
    const std::int64_t terms = std::int64_t{product.rows} * product.columns / (std::int64_t{f.out} * f.in);
    KronMergeGradient& to = p.gradients[k];
    to.data = data_of(TensorView(gradient));
    to.log_lanes = std::min(log_from(ceil_div(terms, kMergeTerms)), log_from(most_lanes));
    cluster = std::max(cluster, (1 << to.log_lanes) / kMergeThreads);
  }
  std::int64_t blocks = 0;
  for (int k = 0; k < p.factor_count; ++k) {
    KronMergeGradient& to = p.gradients[k];
    if (to.data == nullptr) continue;
    const std::int64_t threads = std::int64_t{p.factors[k].out} * p.factors[k].in << to.log_lanes;
    // A cluster's blocks are all of one gradient: all of them meet at its barriers, or none.
    to.blocks = static_cast<int>(round_up(ceil_div(threads, kMergeThreads), cluster));
    blocks += to.blocks;
  }
  if (blocks > 0) launch_blocks(p, blocks, false, on, static_cast<unsigned>(cluster));
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_merge, cuops::kron_linear_merge);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_unmerge, cuops::kron_linear_unmerge);
