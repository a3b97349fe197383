"""Which kernels and clusters the plans of operators launch on GPUs of every kind, of which the stand-in driver keeps a log."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from installation import Installation

# Arrays on the stand-in's GPU, whose memory is the host's: aligned, or so many elements further on.
ON_CUDA = textwrap.dedent("""
    import ctypes, numpy, tvm_ffi
    from cuops import _backend

    class OnCuda:
        def __init__(self, array, dtype):
            self.array, self.dtype = array, dtype

        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, **_):
            capsule = self.array.__dlpack__()
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            tensor = pointer(capsule, b"dltensor")
            ctypes.c_int32.from_address(tensor + 8).value = 2  # after the address, the device
            if self.dtype == "bfloat16":
                ctypes.c_uint8.from_address(tensor + 20).value = 4  # of what kind numbers are
            return capsule

    def on_cuda(size, dtype, offset=0):
        count = numpy.prod(size, dtype=int)
        memory = numpy.zeros(count + 64 + offset, "float16" if dtype == "bfloat16" else dtype)
        start = -memory.ctypes.data % 16 // memory.itemsize + offset
        return tvm_ffi.from_dlpack(OnCuda(memory[start:][:count].reshape(size), dtype))
""")


def clusters(log: Path) -> list[int]:
    """How many blocks those of each launch have."""
    return [int(line.rsplit(maxsplit=1)[1]) for line in log.read_text().splitlines() if line.startswith("launch")]


def clusters_on_cuda(installation: Installation, driver: Path, log: Path, code: str, room: int) -> list[int]:
    """Those of code that makes its arrays `on_cuda`, on a part of a GPU that has room for clusters of so many."""
    settings = {"STAND_IN_CAPABILITY": 90, "STAND_IN_ROOM": room, "STAND_IN_LOG": log}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    return clusters(log)


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


@pytest.mark.parametrize(
    ("capability", "room", "asked", "largest"),
    [
        (80, 16, {}, 1),
        (90, 16, {}, 16),
        (90, 8, {}, 8),
        (90, 16, {"CUOPS_PORTABLE_CLUSTERS": 1}, 8),
        (103, 16, {}, 16),
        (110, 16, {}, 8),
        (120, 16, {}, 8),
    ],
    ids=str,
)
def test_clusters_are_no_larger_than_a_gpu_has_room_for_or_is_asked_for(
    cu121: Installation, driver: Path, tmp_path: Path, capability: int, room: int, asked, largest: int
):
    log = tmp_path / "log"
    code = """
        import cuops, numpy
        for dtype in ("float32", "float64"):
            for lead in (0, 1):  # rows that are whole vectors, and rows that are not
                cuops.rms_norm(numpy.ones((2, (1 << 20) + lead), dtype))
        cuops.rms_norm(numpy.ones((2, 65536)), numpy.ones(65536))
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_ROOM": room, "STAND_IN_LOG": log, **asked}
    cu121.output(code, LIBRARIES=driver, **settings)
    assert {*clusters(log)} == {largest}


@pytest.mark.parametrize("room", [16, 8])
@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        ((4, 16384), "float16", True),
        ((64, 8192), "float32", True),
        ((1, 200000), "float64", True),
        ((1, 71416), "float16", False),
    ],
    ids=str,
)
def test_clusters_of_gradients_are_no_larger_than_a_gpu_has_room_for(
    installation: Installation, driver: Path, tmp_path: Path, shape, dtype, wanted: bool, room: int
):
    code = f"""
        shape, dtype, wanted = {shape}, {dtype!r}, {wanted}
        library = _backend.library()
        dx, dy, h = (on_cuda(shape, dtype) for _ in range(3))
        dweight, weight = (on_cuda(shape[-1:], dtype) if wanted else None for _ in range(2))
        size = library.rms_norm_bwd_scratch(dy, None, h, weight, wanted, False, 0.0)
        scratch = on_cuda((size,), "float64" if dtype == "float64" else "float32")
        library.rms_norm_bwd(dx, None, dweight, None, scratch, dy, None, h, weight, 1e-6, 0.0)
    """
    largest = max(clusters_on_cuda(installation, driver, tmp_path / "log", code, room))
    assert largest == 16 if room == 16 else largest <= 8


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 86, 90, 103, 120])
def test_rows_that_have_kernels_of_their_own_on_some_gpus_have_one_on_each(
    installation: Installation, driver: Path, tmp_path: Path, capability: int, half: str
):
    """Those with 3 or 5 vectors a thread, and of rows that fill their threads; the driver refuses names that an image lacks."""
    code = f"""
        half = {half!r}
        library = _backend.library()
        for n in (72, 192, 264, 384, 520, 768, 1032, 4104, 10248):
            x, y, h = (on_cuda(((1 << 22) // n + 1, n), half) for _ in range(3))
            weights = None, on_cuda((n,), half), on_cuda((n,), "float32")
            stream, out = (on_cuda(((1 << 22) // n + 1, n), "float32") for _ in range(2))
            for weight in weights:
                library.rms_norm_fwd(y, None, None, x, None, weight, None, 1e-6, 0.0)
                library.rms_norm_fwd(y, out, None, x, stream, weight, None, 1e-6, 0.0)
                scratch = on_cuda((library.rms_norm_bwd_scratch(x, None, h, weight, False, False, 0.0),), "float32")
                library.rms_norm_bwd(y, None, None, None, scratch, x, None, h, weight, 1e-6, 0.0)
            library.rms_norm_fwd(y, h, None, x, x, weights[1], None, 1e-6, 0.0)
        for shape in ((8, 256), (16384, 256), (131072, 256), (2048, 1024), (64, 2048), (1024, 4096)):
            x, y = (on_cuda(shape, half) for _ in range(2))
            for weight in (None, on_cuda(shape[-1:], half), on_cuda(shape[-1:], "float32")):
                library.rms_norm_fwd(y, None, None, x, None, weight, None, 1e-6, 0.0)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) >= 9 * (3 * 3 + 1) + 6 * 3


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 86, 90, 103, 120])
def test_gradients_beside_other_dtypes_have_a_kernel_on_each_gpu(
    installation: Installation, driver: Path, tmp_path: Path, capability: int, half: str
):
    """Of few rows and many that start at a vector and between vectors, with a gradient for h and without."""
    code = f"""
        library, capability, half = _backend.library(), {capability}, {half!r}
        for rows, n in ((m, n) for n in (33, 264, 1023, 2048, 4097, 16384, 40001) for m in (20, (1 << 20) // n + 1)):
            launched = 0
            for h_dtype, weight_dtype in ((half, half), (half, "float32"), ("float32", half), ("float32", None)):
                dy, rounded = (on_cuda((rows, n), half) for _ in range(2))
                h, dh, dx = (on_cuda((rows, n), h_dtype) for _ in range(3))
                weight, dweight = (weight_dtype and on_cuda((n,), weight_dtype) for _ in range(2))
                rounded = rounded if h_dtype == "float32" else None
                for of_h in (dh, None):
                    size = library.rms_norm_bwd_scratch(dy, of_h, h, weight, weight is not None, False, 0.0)
                    if size < 0:  # dy is converted first
                        assert rounded is not None and capability != 90
                        continue
                    scratch = on_cuda((size,), "float32")
                    library.rms_norm_bwd(dx, rounded, dweight, None, scratch, dy, of_h, h, weight, 1e-6, 0.0)
                    launched += 1
            assert launched >= 4
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) >= 2 * 7 * 4


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_gradients_ask_for_no_more_shared_memory_than_there_is(
    installation: Installation, driver: Path, tmp_path: Path, capability: int, half: str
):
    """The longest rows of each kind of kernel that keeps a gradient for h there; the driver refuses what is too much."""
    code = f"""
        half = {half!r}
        library = _backend.library()
        for n in (640, 4096, 8192, 10240, 14344, 16384):
            for h_dtype, weight_dtype in ((half, half), (half, "float32"), ("float32", "float32")):
                for lead in (0, 1):
                    dy, h, dh, dx = (on_cuda((2112, n - lead), h_dtype) for _ in range(4))
                    weight, dweight = (on_cuda((n - lead,), weight_dtype) for _ in range(2))
                    for sum in (dweight, None):
                        size = library.rms_norm_bwd_scratch(dy, dh, h, weight, sum is not None, False, 0.0)
                        scratch = on_cuda((size,), "float32")
                        library.rms_norm_bwd(dx, None, sum, None, scratch, dy, dh, h, weight, 1e-6, 0.0)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) >= 6 * 3 * 2 * 2


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_partial_sums_of_gradients_do_not_grow_with_the_rows(installation: Installation, driver: Path, capability: int):
    """Of each parameter 8 a multiprocessor at most, and three numbers a row from one launch to the next."""
    code = """
        library = _backend.library()
        for n in (100, 256, 1000, 1024, 4096):
            for rows in (1 << 10, 1 << 14, 1 << 18):
                dy, h, weight = (on_cuda(size, "bfloat16") for size in ((rows, n), (rows, n), (n,)))
                for parameters in (1, 2):
                    scratch = library.rms_norm_bwd_scratch(dy, None, h, weight, True, parameters == 2, 0.0)
                    assert scratch <= 3 * rows + parameters * 8 * 132 * n, (n, rows, scratch)
    """
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, STAND_IN_CAPABILITY=capability)


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


def test_the_plan_that_docs_show_is_printed_for_the_gpu_that_they_name(installation: Installation, driver: Path):
    page = (Path(__file__).parents[1] / "docs" / "ops" / "kron_linear.md").read_text()
    call, shown = re.search(r"^>>> (print\(cuops\.kron_plan.+)\n((?:.+\n)+?)```", page, re.MULTILINE).groups()
    printed = installation.output(f"import cuops\n{call}", LIBRARIES=driver, STAND_IN_CAPABILITY=90)
    assert printed.split() == shown.split()


def test_scratch_that_pytorch_has_no_memory_for_is_a_runtime_error(installation: Installation, driver: Path):
    """As it is where PyTorch's own operators find none; its allocator says MemoryError."""
    code = """
        from tvm_ffi.libinfo import find_libtvm_ffi
        Report = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
        Allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, Report)

        @Allocate
        def refuse(prototype, out, context, report):
            report(context, b"MemoryError", b"there is no room")
            return -1

        ffi, library = ctypes.CDLL(find_libtvm_ffi()), _backend.library()
        assert ffi.TVMFFIEnvSetDLPackManagedTensorAllocator(refuse, 1, None) == 0
        x, y, weight = on_cuda((1, 1 << 20), "float32"), on_cuda((1, 1 << 20), "float32"), on_cuda((1 << 20,), "float32")
        try:
            library.rms_norm_fwd(y, None, None, x, None, weight, None, 1e-6, 0.0)
        except RuntimeError as error:
            print(error)
    """
    assert "there is no room" in installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver)


def test_distributions_of_few_samples_are_drawn_together(installation: Installation, driver: Path, tmp_path: Path):
    code = "import cuops, numpy; cuops.sample_normal(numpy.zeros((20_000, 3)), numpy.ones((20_000, 3)), 2)"
    installation.output(code, LIBRARIES=driver, STAND_IN_LOG=tmp_path / "log")
    launches = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")]
    assert 0 < len(launches) <= 3 * 12  # of each of a few chunks the first distribution, whole ones, the last


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_gradients_of_few_samples_take_one_launch(
    installation: Installation, driver: Path, tmp_path: Path, capability: int
):
    code = """
        library = _backend.library()
        for few, shapes in (True, [(1024, 10), (300, 30), (1, 1), (9, 3, 7), (4096, 1, 20)]), (False, [(100_000, 9)]):
            for shape in shapes:
                for dtype in "float32", "float16", "bfloat16":
                    grad = on_cuda(shape, dtype)
                    chunks = library.sample_normal_bwd_chunks(grad, None, 0, 0, False)
                    assert (chunks == 0) == few, (shape, dtype)
                    sizes = (*shape[:-2], shape[-1])
                    partial = on_cuda((chunks, 2, numpy.prod(sizes)), "float32")
                    gradients = on_cuda(sizes, "float64"), on_cuda(sizes, dtype)
                    library.sample_normal_bwd(*gradients, partial, grad, None, 1, 0, 0, 0, False, False)
        partial = on_cuda((0, *partial.shape[1:]), "float32")
        try:
            library.sample_normal_bwd(*gradients, partial, grad, None, 1, 0, 0, 0, False, False)
        except ValueError as error:
            print(error)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    said = installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert said.strip() == "partial: expected as many chunks as sample_normal_bwd_chunks says"
    assert len(clusters(tmp_path / "log")) == 3 * (5 * 1 + 1 * 2)


@pytest.mark.parametrize("capability", [60, 75, 80, 86, 90, 120])
def test_every_draw_and_its_gradient_have_kernels(cu121: Installation, driver: Path, tmp_path: Path, capability: int):
    code = """
        import itertools
        library, kinds = _backend.library(), itertools.product((0, -1), (False, True), (False, True), (False, True))
        for (sample_dim, shared, antithetic, on_device), dim, n in itertools.product(kinds, (8, 6, 7), (1, 37, 50_000)):
            state = on_cuda((1,), "int64") if on_device else None
            for dtype in "float64", "float32", "float16", "bfloat16":
                x = on_cuda((n, dim) if sample_dim == 0 else (dim, n), dtype)
                mu, sigma, dmu, dsigma = (on_cuda((dim,), dtype) for _ in range(4))
                layout = 1, 0, 0, sample_dim, shared, antithetic
                library.sample_normal_fwd(x, mu, sigma, 0.0, None, None, state, 0, *layout)
                chunks = library.sample_normal_bwd_chunks(x, state, 0, sample_dim, antithetic)
                partial = on_cuda((chunks, 2, dim), "float64" if dtype == "float64" else "float32")
                library.sample_normal_bwd(dmu, dsigma, partial, x, state, *layout)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    cu121.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) > 2 * 16 * 9 * 4


KRON_SIZES = [
    [(128, 128)] * 2, [(127, 127)] * 2, [(96, 96)] * 2, [(64, 64)] * 2, [(65, 63)] * 2, [(33, 40)] * 2, [(17, 96), (128, 4)],
    [(32, 32)] * 3, [(31, 30)] * 3, [(20, 24)] * 3, [(16, 16)] * 4, [(8, 8)] * 5, [(2, 2)] * 12, [(5, 7)] * 4, [(3, 3)] * 8,
    [(12, 16)] * 3, [(256, 256)], [(200, 96)], [(86, 86), (128, 128)], [(4, 4), (64, 64), (8, 8)], [(100, 2), (2, 100)],
]  # fmt: skip


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
            if max(size for product in products for size in product.shape) <= 1 << 15:
                library.kron_linear_merge(products, None, w, len(halves[0]))
                library.kron_linear_unmerge(dw, products, None, w, len(halves[0]))

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
