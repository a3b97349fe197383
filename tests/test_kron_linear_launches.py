"""Which kernels and clusters the plans of kron_linear launch on GPUs of every kind: the stand-in for the driver keeps a log."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from installation import Installation
from on_cuda import ON_CUDA, clusters, clusters_on_cuda


def test_a_bias_without_elements_is_refused(installation: Installation, driver: Path):
    code = """
        x, y, w = (on_cuda(size, "float32") for size in ((4, 9), (4, 9), (9, 9)))
        try:
            _backend.library().kron_linear_fwd(y, x, [w], 1, on_cuda((0,), "float32"), False)
        except ValueError as error:
            print(error)
    """
    said = installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver)
    assert "bias: expected one contiguous element an output" in said


@pytest.mark.parametrize("room", [16, 8])
def test_clusters_of_sums_over_columns_are_no_larger_than_a_gpu_has_room_for(
    installation: Installation, driver: Path, tmp_path: Path, room: int
):
    code = """
        x, dy = (on_cuda((4096, 16, 1), "float32") for _ in range(2))
        w, dw = (on_cuda((16, 16), "float32") for _ in range(2))
        _backend.library().kron_linear_product_bwd(None, dw, dy, x, w)
    """
    assert clusters_on_cuda(installation, driver, tmp_path / "log", code, room) == [room]


@pytest.mark.parametrize(("capability", "cluster"), [(80, 1), (90, 8), (120, 8)])
def test_long_sums_over_a_product_are_shared_by_the_blocks_of_a_cluster(
    cu121: Installation, driver: Path, tmp_path: Path, capability: int, cluster: int
):
    """Also beside short ones; the driver refuses blocks that are no whole clusters."""
    code = """
        w, dw = ([on_cuda(size, "float32") for size in ((5, 5), (90, 130))] for _ in range(2))
        _backend.library().kron_linear_unmerge(dw, [on_cuda((450, 650), "float32")], None, w, [2])
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    cu121.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert clusters(tmp_path / "log") == [cluster]


def test_the_plan_that_docs_show_is_printed_for_the_gpu_that_they_name(installation: Installation, driver: Path):
    page = (Path(__file__).parents[1] / "docs" / "ops" / "kron_linear.md").read_text()
    call, shown = re.search(r"^>>> (print\(cuops\.kron_plan.+)\n((?:.+\n)+?)```", page, re.MULTILINE).groups()
    printed = installation.output(f"import cuops\n{call}", LIBRARIES=driver, STAND_IN_CAPABILITY=90)
    assert printed.split() == shown.split()


KRON_SIZES = [
    [(128, 128)] * 2, [(127, 127)] * 2, [(96, 96)] * 2, [(64, 64)] * 2, [(65, 63)] * 2, [(33, 40)] * 2, [(17, 96), (128, 4)],
    [(32, 32)] * 3, [(31, 30)] * 3, [(20, 24)] * 3, [(16, 16)] * 4, [(8, 8)] * 5, [(2, 2)] * 12, [(5, 7)] * 4, [(3, 3)] * 8,
    [(12, 16)] * 3, [(256, 256)], [(200, 96)], [(86, 86), (128, 128)], [(4, 4), (64, 64), (8, 8)], [(100, 2), (2, 100)],
    [(4, 4), (128, 128)],
]  # fmt: skip


def test_factors_that_are_too_large_for_one_kernel_are_left_to_numpy(installation: Installation, driver: Path):
    code = """
        import cuops
        draw = numpy.random.default_rng(0).standard_normal
        x, w, v, bias = (draw(size) for size in ((2, 1500), (500, 500), (3, 3), (1500,)))
        y = cuops.kron_linear(x, [w, v], bias)
        assert numpy.allclose(y, x @ numpy.kron(w, v).T + bias)
        try:
            _backend.library().kron_linear_fwd(on_cuda((2, 1500), "float64"), on_cuda((2, 1500), "float64"), [
                on_cuda((500, 500), "float64"), on_cuda((3, 3), "float64")], 1, None, False)
        except NotImplementedError as error:
            assert "too large for one kernel" in str(error)
        else:
            raise SystemExit("no error")
    """
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver)


def test_kronecker_products_have_plans_for_a_part_of_a_gpu(installation: Installation, driver: Path):
    code = f"""
        for sizes in {KRON_SIZES}:
            _backend.library().kron_linear_plan(1, 1000, [size for pair in sizes for size in pair], 1, False, 0)
    """
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, STAND_IN_MULTIPROCESSORS=1)


@pytest.mark.parametrize("capability", [61, 75, 80, 86, 90, 120])
def test_kronecker_products_ask_for_no_more_shared_memory_than_there_is(
    cu121: Installation, driver: Path, tmp_path: Path, capability: int
):
    """Forwards, and each kernel that has gradients of these sizes; the driver refuses what is too much."""
    code = f"""
        from math import prod
        library = _backend.library()

        def forward(number, dtype, rows, sizes, w, tf32):
            for first, count, kernel, *_ in library.kron_linear_plan(number, rows, flat(sizes), 1, tf32, 0):
                part, after = slice(first, first + count), prod(o for o, _ in sizes[first + count:])
                before = rows * prod(i for _, i in sizes[:first])
                y, x = (on_cuda((before, prod(s[k] for s in sizes[part]) * after), dtype) for k in (0, 1))
                if kernel != "GEMM":
                    library.kron_linear_fwd(y, x, w[part], after, None, tf32)

        def gradients_at_once(number, dtype, rows, sizes, w, dw):
            n, m = (prod(s[k] for s in sizes) for k in (1, 0))
            x, dx, dy = (on_cuda((rows, size), dtype) for size in (n, n, m))
            if library.kron_linear_slices_bwd_time(number, rows, flat(sizes), 0) > 0:
                library.kron_linear_slices_bwd(dw, dx, dy, x, w)
            for size in (32, 64, 96, 128) if len(sizes) == 2 else ():
                is_odd = any(s * x.dtype.itemsize % 16 for s in sizes[1])
                if max(flat(sizes)) <= size:
                    blocks = library.kron_linear_squares_bwd_blocks(number, rows, size, 7, is_odd, 0)
                    partial = on_cuda((2 * blocks, size * size), sums(dtype))
                    blocks and library.kron_linear_squares_bwd(dw, dx, partial, dy, x, w, 7, size)

        def gradients_of_groups(number, dtype, rows, sizes, w, dw):
            for first, count, scratch, _ in library.kron_linear_fibers_bwd_plan(number, rows, flat(sizes), 1, 0):
                part, after = slice(first, first + count), prod(i for _, i in sizes[first + count:])
                before = rows * prod(o for o, _ in sizes[:first])
                dx, x, dy = (on_cuda((before, prod(s[k] for s in sizes[part]) * after), dtype) for k in (1, 1, 0))
                partial = on_cuda((scratch,), sums(dtype))
                library.kron_linear_fibers_bwd(dw[part], dx, partial, dy, x, w[part], after)

        def merged(w, dw):
            halves = (w[:len(w) // 2], w[len(w) // 2:]) if len(w) > 1 else (w,)
            products = [on_cuda([prod(t.shape[k] for t in half) for k in (0, 1)], str(w[0].dtype)) for half in halves]
            counts = [len(half) for half in halves]
            if max(size for product in products for size in product.shape) <= 1 << 15:
                library.kron_linear_merge(products, None, w, counts)
                library.kron_linear_unmerge(dw, products, None, w, counts)

        def gradients_of_one(number, dtype, rows, size, inner, w, dw):
            o, i = size
            dx, x, dy = (on_cuda((rows, k, inner), dtype) for k in (i, i, o))
            if library.kron_linear_product_bwd_time(number, rows, inner, o, i, 0) > 0:
                library.kron_linear_product_bwd(dx, dw, dy, x, w)
            for both in (True, False):
                across = 2 * (inner == 1,)
                parts = library.kron_linear_factor_bwd_partial_rows(number, rows, inner, o, i, *across, both, 0)
                partial = on_cuda((parts, -(-o * i // 4) * 4), sums(dtype))
                of_x, by = (dx, w) if both else (None, None)
                parts and library.kron_linear_factor_bwd(dw, of_x, partial, dy, x, by, False)

        def flat(sizes):
            return tuple(size for pair in sizes for size in pair)

        def sums(dtype):
            return "float64" if dtype == "float64" else "float32"

        for sizes in {KRON_SIZES}:
            elements = prod(flat(sizes))
            for number, dtype in enumerate(("float64", "float32", "float16", "bfloat16")):
                w, dw = ([on_cuda(pair, dtype) for pair in sizes] for _ in range(2))
                merged(w, dw)
                for rows in (1, 40, 2000 if elements <= 1 << 24 else 100):
                    forward(number, dtype, rows, sizes, w, False)
                    forward(number, dtype, rows, sizes, w, dtype == "float32")
                    gradients_at_once(number, dtype, rows, sizes, w, dw)
                    gradients_of_groups(number, dtype, rows, sizes, w, dw)
                    for k, size in enumerate(sizes):
                        before = rows * prod(i for _, i in sizes[:k])
                        gradients_of_one(number, dtype, before, size, prod(o for o, _ in sizes[k + 1:]), w[k], dw[k])
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    cu121.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    kernels = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")}
    assert len(kernels) >= {80: 15, 90: 90, 120: 60}.get(capability, 2)
