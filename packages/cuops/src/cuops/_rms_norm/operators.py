"""RMSNorm in PyTorch: the operators cuops::rms_norm_fwd and rms_norm_bwd."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _backend, _higher_derivatives, reference
from .._arguments import dtype_name, sums_dtype
from .._transforms import PLAIN, is_transformed, takes_formula
from . import sharding

CHUNK = 1 << 16  # elements that the CPU works on at a time

library = torch.library.Library("cuops", "FRAGMENT")
# PyTorch remembers how a DTensor is divided with all arguments from the first integer on, which a dtype counts as.
library.define(
    "rms_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, ScalarType? out_dtype, "
    "float eps, float weight_offset) -> (Tensor y, Tensor h, Tensor rstd)"
)
library.define(
    "rms_norm_bwd(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, ScalarType? bias_dtype, bool needs_dweight, "
    "float eps, float weight_offset) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def _rows(a: Tensor | None, strides: int = 2) -> Tensor | None:
    """`a`, or a copy of it where the library cannot read its rows."""
    return a if a is None or a.is_contiguous() or _backend.library().rows_are_readable(a, strides) else a.contiguous()


def _parameter(p: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
    """A weight as the library takes it: contiguous, in one of the dtypes of the rows or that of their sums."""
    return p if p is None else (p if p.dtype in dtypes else p.to(sums_dtype(dtypes[0]))).contiguous()


def _empty_fwd(x, residual, out_dtype):  # type: ignore[no-untyped-def]
    """y, h (empty without a residual) and rstd, not yet written."""
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    h = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    return y, h, x.new_empty(x.shape[:-1], dtype=sums_dtype(dtype))


def _fwd_cuda(x, residual, weight, bias, out_dtype, eps, weight_offset):  # type: ignore[no-untyped-def]
    if x.numel() == 0:
        return _fwd_plain(x, residual, weight, bias, out_dtype, eps, weight_offset)
    y, h, rstd = _empty_fwd(x, residual, out_dtype)
    if residual is not None and h.dtype not in (x.dtype, residual.dtype):  # float16 and bfloat16
        x = x.to(h.dtype)
    weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
    h_or_none = None if residual is None else h
    _backend.library().rms_norm_fwd(y, h_or_none, rstd, _rows(x), _rows(residual), weight, bias, eps, weight_offset)
    return y, h, rstd


def _fwd_plain(x, residual, weight, bias, out_dtype, eps, weight_offset):  # type: ignore[no-untyped-def]
    y, h, rstd = reference.rms_norm_torch(x, residual, weight, bias, eps, weight_offset, out_dtype)
    h = x.new_empty(0) if residual is None else h.contiguous()
    return y.contiguous(), h, rstd.clone(memory_format=torch.contiguous_format)  # which in float64 is a view


def _parts(*arrays):  # type: ignore[no-untyped-def]
    """Some rows of each array (of None, None) whose float64 the cache holds, and their place; then the next ones."""
    n = arrays[0].shape[-1]
    rows = arrays[0].numel() // n
    flat = [None if a is None else a.reshape(rows, n) for a in arrays]
    for part in reference.some_rows(rows, n, CHUNK):
        yield part, [None if a is None else a[part] for a in flat]


def _fwd_cpu(x, residual, weight, bias, out_dtype, eps, weight_offset):  # type: ignore[no-untyped-def]
    if x.numel() <= CHUNK:
        return _fwd_plain(x, residual, weight, bias, out_dtype, eps, weight_offset)
    y, h, rstd = _empty_fwd(x, residual, out_dtype)
    flat_y, flat_h, flat_rstd = y.view(-1, x.shape[-1]), h.view(-1, x.shape[-1]), rstd.view(-1)
    for part, (some_x, some_residual) in _parts(x, residual):
        found = reference.rms_norm_torch(some_x, some_residual, weight, bias, eps, weight_offset, out_dtype)
        flat_y[part], some_h, flat_rstd[part] = found
        if residual is not None:
            flat_h[part] = some_h
    return y, h, rstd


def _empty_bwd(h, weight, bias_dtype, needs_dweight):  # type: ignore[no-untyped-def]
    """dx, dweight and dbias (empty where there is none), not yet written."""
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_dweight else h.new_empty(0)
    return dx, dweight, h.new_empty(0 if bias_dtype is None else h.shape[-1], dtype=bias_dtype)


def _bwd_cuda(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset):  # type: ignore[no-untyped-def]
    return bwd_cuda_rounded(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset, False)[:3]


def bwd_cuda_rounded(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset, is_wanted):  # type: ignore[no-untyped-def]
    """dx, dweight and dbias; dx rounded to the dtype of dy if it is wanted and the kernel has it at hand, else None."""
    others = bias_dtype, needs_dweight, eps, weight_offset
    if h.numel() == 0:
        return *bwd_plain(dy, dh, h, weight, *others), None
    if dy.dtype != h.dtype and (wide := torch.promote_types(dy.dtype, h.dtype)) != h.dtype:
        # A float32 gradient of a float16 x may be beyond float16's range, and all of it counts in the sums.
        arrays = dy.to(wide), None if dh is None else dh.to(wide), h.to(wide), weight
        dx, *sums = _bwd_cuda(*arrays, *others)
        return dx.to(h.dtype), *(s if s.numel() else s.to(h.dtype) for s in sums), None
    lib = _backend.library()
    parameter = _parameter(weight, (h.dtype, dy.dtype))
    arrays = _rows(dy, 1), _rows(dh, 1), _rows(h, 1), parameter
    with_bias = bias_dtype is not None
    size = lib.rms_norm_bwd_scratch(*arrays, needs_dweight, with_bias, weight_offset)
    if size < 0:
        return bwd_cuda_rounded(dy.to(h.dtype), dh, h, weight, *others, False)
    dx, dweight, dbias = _empty_bwd(h, parameter, bias_dtype, needs_dweight)
    rounded = torch.empty_like(dx, dtype=dy.dtype) if is_wanted and dy.dtype != h.dtype else None
    sums = dweight if needs_dweight else None, dbias if with_bias else None
    scratch = h.new_empty(size, dtype=sums_dtype(h.dtype))
    lib.rms_norm_bwd(dx, rounded, *sums, scratch, *arrays, eps, weight_offset)
    return dx, dweight if parameter is weight or not needs_dweight else dweight.to(weight.dtype), dbias, rounded


def bwd_plain(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset):  # type: ignore[no-untyped-def]
    dx, dweight, dbias = reference.rms_norm_torch_backward(dy, dh, h, weight, eps, weight_offset)
    dweight = dweight if needs_dweight else h.new_empty(0)
    return dx.contiguous(), dweight, h.new_empty(0) if bias_dtype is None else dbias.to(bias_dtype, copy=True)


def _bwd_cpu(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset):  # type: ignore[no-untyped-def]
    if h.numel() <= CHUNK:
        return bwd_plain(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset)
    dx, dweight, dbias = _empty_bwd(h, weight, bias_dtype, needs_dweight)
    flat, sums = dx.view(-1, h.shape[-1]), h.new_zeros((2, h.shape[-1]), dtype=torch.float64)
    wide = None if weight is None else weight.double()
    for part, (some_h, some_dy, some_dh) in _parts(h, dy, dh):
        flat[part], *found = reference.rms_norm_torch_backward(some_dy, some_dh, some_h, wide, eps, weight_offset)
        for total, more in zip(sums, found, strict=True):
            total += 0 if more is None else more
    for to, total in zip((dweight, dbias), sums, strict=True):
        to.copy_(total[: to.numel()])
    return dx, dweight, dbias


library.impl("rms_norm_fwd", _fwd_cuda, "CUDA")
library.impl("rms_norm_fwd", _fwd_cpu, "CPU")
library.impl("rms_norm_bwd", _bwd_cuda, "CUDA")
library.impl("rms_norm_bwd", _bwd_cpu, "CPU")


@torch.library.register_fake("cuops::rms_norm_fwd", lib=library)
def _fwd_fake(x, residual, weight, bias, out_dtype, eps, weight_offset):  # type: ignore[no-untyped-def]
    return _empty_fwd(x, residual, out_dtype)


@torch.library.register_fake("cuops::rms_norm_bwd", lib=library)
def _bwd_fake(dy, dh, h, weight, bias_dtype, needs_dweight, eps, weight_offset):  # type: ignore[no-untyped-def]
    return _empty_bwd(h, weight, bias_dtype, needs_dweight)


def _save_for_bwd(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, residual, weight, bias, _, ctx.eps, ctx.weight_offset = inputs
    _, h, rstd = output
    ctx.has_residual, ctx.bias_dtype = residual is not None, None if bias is None else bias.dtype
    ctx.dtypes = tuple(None if a is None else a.dtype for a in (x, residual))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h if ctx.has_residual else x, weight, rstd)
    if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
        ctx.mark_non_differentiable(h, rstd)


def _bwd_of_fwd(ctx, dy, dh, drstd):  # type: ignore[no-untyped-def]
    h, weight, rstd = ctx.saved_tensors
    dx = dweight = dbias = None
    _, _, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
    if dy is not None:
        arrays = dy, dh if ctx.has_residual else None, h, weight
        sums = ctx.bias_dtype if needs_dbias else None, needs_dweight
        backward = bwd_plain if takes_formula(dy, dh) else torch.ops.cuops.rms_norm_bwd
        dx, dweight, dbias = backward(*arrays, *sums, ctx.eps, ctx.weight_offset)
    elif dh is not None and ctx.has_residual:
        dx = dh
    if drstd is not None:
        # In float64, and h first: the cube of rstd may be beyond any range where its product with h is not.
        factor, rstd = (-drstd.double() / h.shape[-1]).unsqueeze(-1), rstd.double().unsqueeze(-1)
        through_rstd = factor * (rstd * h) * rstd * rstd
        dx = through_rstd.to(h.dtype) if dx is None else dx + through_rstd.to(h.dtype)
    dweight, dbias = dweight if needs_dweight else None, dbias if needs_dbias else None
    return *summands(dx, ctx.dtypes, ctx.needs_input_grad), dweight, dbias, None, None, None


def summands(dh, dtypes, wanted, rounded=None):  # type: ignore[no-untyped-def]
    """The gradients of x and residual, where wanted, from that of their sum; `rounded` is it in x's dtype."""
    if dh is None:
        return None, None
    if rounded is None and wanted[0]:
        rounded = dh.to(dtypes[0])
    return rounded, dh.to(dtypes[1]) if wanted[1] else None


def _save_for_second(ctx, inputs, output):  # type: ignore[no-untyped-def]
    dy, dh, h, weight, ctx.bias_dtype, ctx.needs_dweight, ctx.eps, ctx.weight_offset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, dh, h, weight)


def _second(ctx, *grads):  # type: ignore[no-untyped-def]
    """The gradient of the gradient, and those that follow, through its formula."""

    def formula(dy, dh, h, weight):  # type: ignore[no-untyped-def]
        return bwd_plain(dy, dh, h, weight, ctx.bias_dtype, ctx.needs_dweight, ctx.eps, ctx.weight_offset)

    return *_higher_derivatives.through(formula, ctx.saved_tensors, grads), None, None, None, None


torch.library.register_autograd("cuops::rms_norm_fwd", _bwd_of_fwd, setup_context=_save_for_bwd, lib=library)
torch.library.register_autograd("cuops::rms_norm_bwd", _second, setup_context=_save_for_second, lib=library)


def forward_torch(x, residual, weight, bias, eps, weight_offset, out_dtype):  # type: ignore[no-untyped-def]
    """The operator, and where transforms are at work its formula, all of whose parts they know."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        out_dtype = getattr(torch, dtype_name(out_dtype))
    for array in (x, residual, weight, bias):
        if array is not None and type(array) not in PLAIN:
            sharding.learn()
    forward = _fwd_plain if is_transformed() else torch.ops.cuops.rms_norm_fwd
    return forward(x, residual, weight, bias, out_dtype, eps, weight_offset)
