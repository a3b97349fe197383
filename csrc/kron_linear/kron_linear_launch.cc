#include "kron_linear_launch.h"

#include <algorithm>
#include <type_traits>
#include <variant>

#include "kron_factors.h"
#include "kron_linear/plan/kron_fibers_layout.h"
#include "kron_linear/plan/kron_plan_dots.h"
#include "kron_linear/plan/kron_plan_product.h"
#include "kron_linear/plan/kron_small_layout.h"

namespace cuops {
namespace {

bool is_dense(const KronCall& call) { return call.x.inner >= call.problem.rows && call.x.stride == call.in; }

KronProductArray array_of(const Rows& rows) { return {rows.data, rows.stride}; }

// The only factor, as a problem.
KronProductProblem product_of(const KronCall& call) {
  const KronProblem& problem = call.problem;
  return {problem.dtype, problem.rows, problem.inner, problem.sizes[0].out, problem.sizes[0].in};
}

// complete(): what arrays add to what a plan says.
template <class Params>
Params complete(Params p, const KronCall& call) {
  fill_factors(p.factors, call.factors, call.problem.dtype);
  p.x = call.x;
  p.y = call.y;
  p.bias = call.bias;
  p.bias_lead = call.bias_lead;
  return p;
}

KronFwdParams complete(const KronFwdParams& plan, const KronCall& call) {
  KronFwdParams p = complete<KronFwdParams>(plan, call);
  const DType dtype = p.dtype = call.problem.dtype;
  const int width = width_of(dtype), last = p.axes - 1;
  const bool by_columns = p.columns > 0, scaled = call.problem.arithmetic == kKronScaled, fours = width == 8 && scaled;
  auto moves = [&](const Rows& rows, std::int64_t row, int together) {
    return row % together == 0 && vectors_fit(rows, together, dtype);
  };
  const std::int64_t x_row = by_columns ? p.inner : p.in[last], y_row = by_columns ? p.inner : p.out[last];
  p.x_piece = static_cast<unsigned char>(moves(p.x, x_row, width) ? width : fours && moves(p.x, x_row, 4) ? 4 : 1);
  p.y_piece = static_cast<unsigned char>(moves(p.y, y_row, width) ? 8 : fours && moves(p.y, y_row, 4) ? 4 : 1);
  p.direct = p.step[p.steps - 1].innermost && p.bias == nullptr && vectors_fit(p.y, 2, dtype) && p.out[last] % 2 == 0 && scaled &&
             dtype == kFloat32;
  p.x_linear = !by_columns && is_dense(call) && p.in[last] % 8 == 0;
  p.by_in_pieces = kron_divisor(p.in_chunks * 8 / p.x_piece);
  p.by_out_pieces = kron_divisor(p.y_piece == 1 ? p.out[last] : p.out_chunks * 8 / p.y_piece);
  return p;
}

KronWholeParams complete(const KronWholeParams& plan, const KronCall& call) {
  KronWholeParams p = complete<KronWholeParams>(plan, call);
  p.x_linear = is_dense(call);
  return p;
}

KronSmallParams complete(const KronSmallParams& plan, const KronCall& call) {
  KronSmallParams p = complete<KronSmallParams>(plan, call);
  set_sample_strides(&p);
  return p;
}

KronWideParams complete(const KronWideParams& plan, const KronCall& call) {
  KronWideParams p = complete<KronWideParams>(plan, call);
  if (p.box_rows == 0) return p;
  const int columns = p.columns > 0 ? p.columns : p.factors[1].in;
  p.matrices = matrices_map(p.x, call.problem.dtype, p.as_tf32, p.rows, p.factors[0].in, columns, p.box_rows);
  return p;
}

// Whether there is no bias, and factors come in vectors.
bool is_plain(const KronWideParams& p, int factors) {
  return p.bias == nullptr && std::all_of(p.factors, p.factors + factors, [](const KronFactor& f) { return f.vectors; });
}

KronFibersParams complete(KronFibersParams p, const KronCall& call) {
  fill_factors(p.chain.factors, call.factors, call.problem.dtype);
  p.x = fibers_array(p.x, p.chain, call.x);
  p.y = fibers_array(p.y, p.chain, call.y);
  p.bias = call.bias;
  p.bias_lead = call.bias_lead;
  return p;
}

KronSlicesParams complete(KronSlicesParams p, const KronCall& call) {
  KronFactor factor[kSlicesSteps + 1];
  fill_factors(factor, call.factors, call.problem.dtype);
  p.x = call.x.data;
  p.y = call.y.data;
  p.x_stride = call.x.stride;
  p.y_stride = call.y.stride;
  p.first = factor[0].data;
  p.row_stride = factor[0].row_stride;
  p.column_stride = factor[0].column_stride;
  for (int i = 0; i < p.steps; ++i) {
    p.step[i].data = factor[i + 1].data;
    p.step[i].row_stride = factor[i + 1].row_stride;
    p.step[i].column_stride = factor[i + 1].column_stride;
  }
  p.bias = call.bias;
  p.bias_lead = static_cast<int>(call.bias_lead);
  return p;
}

KronTermsParams complete(const KronTermsParams& plan, const KronCall& call) {
  KronFactor factor[kTermsFactors];
  fill_factors(factor, call.factors, call.problem.dtype);
  KronTermsParams p = terms_of(plan, array_of(call.y), array_of(call.x), factor);
  p.bias = call.bias;
  p.bias_lead = static_cast<int>(call.bias_lead);
  return p;
}

KronDotsParams complete(KronOneDots, const KronCall& call) {
  KronFactor factor[1];
  fill_factors(factor, call.factors, call.problem.dtype);
  KronDotsParams p{};
  p.dots[0] = dots_of_y(product_of(call), array_of(call.y), array_of(call.x), factor[0]);
  p.dots[0].bias = call.bias;
  p.dots[0].bias_lead = static_cast<int>(call.bias_lead);
  return p;
}

KronProductParams complete(KronOneProduct, const KronCall& call) {
  KronFactor factor[1];
  fill_factors(factor, call.factors, call.problem.dtype);
  KronProductParams p{};
  p.product[0] = product_of_y(product_of(call), array_of(call.y), array_of(call.x), factor[0]);
  p.product[0].bias = call.bias;
  p.product[0].bias_lead = static_cast<int>(call.bias_lead);
  set_tiles(&p.product[0], 1);
  return p;
}

}  // namespace

void launch_group(const KronGroup& group, const KronCall& call, int device, CUstream stream) {
  std::visit(
      [&](const auto& plan) {
        auto p = complete(plan, call);
        LaunchShape shape = group.shape;
        shape.overlaps = true;
        // Of which it depends on the arrays how many lanes share a sum.
        if constexpr (std::is_same_v<decltype(p), KronDotsParams>) shape.blocks = static_cast<unsigned>(p.dots[0].blocks);
        Kernel* kernel = group.kernel;
        if constexpr (std::is_same_v<decltype(p), KronWideParams>) {
          if (group.plain != nullptr && is_plain(p, group.count)) kernel = group.plain;
        }
        launch(*kernel, device, stream, shape, &p);
      },
      group.params);
}

}  // namespace cuops
