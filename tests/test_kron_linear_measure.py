"""kron_linear on the command line and in the benchmark harness, as far as the CPU can run it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuops import _bench
from cuops._bench import kron_linear as operator
from cuops._bench.case import TOLERANCE, Case, available, reference_norms
from cuops.cli import main
from kron_samples import arguments, definition
from safetensors.torch import load_file, save_file
from samples import make
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as benchmarks
from benchmarks import kron_linear as kron_linear_benchmark

QUICK = ["--device", "cpu", "--without", "torch.compile"]


@pytest.mark.parametrize("dtype", ["f", "d", "h", "bfloat16"])
def test_check_compares_the_output_and_every_gradient_of_every_implementation(capsys, dtype):
    assert main(["check", "kron", "--dtype", dtype, "16", "32", "32", "--without", "torch.compile"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in ("cuops", "loop", "transposed"):
        agreeing = [line[1] for line in lines if line[:1] == [name] and line[-1] == "agrees"]
        assert agreeing == ["y", "dx", "dw1", "dw2", "y", "dbias"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right, x, factors, bias: right(x, factors[::-1], bias),
        lambda right, x, factors, bias: right(x, factors, None if bias is None else bias.flip(0)),
    ],
    ids=["factors", "bias"],
)
def test_check_fails_when_cuops_is_wrong(wrong, capsys, monkeypatch):
    import cuops

    monkeypatch.setattr(cuops, "kron_linear", functools.partial(wrong, cuops.kron_linear))
    assert main(["check", "kron", *QUICK, "--", "4", "8", "8"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_check_says_why_an_implementation_fails(capsys, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no kernel for this shape\n\nin a line")

    monkeypatch.setitem(operator.IMPLEMENTATIONS, "loop", lambda: refuse)
    assert main(["check", "kron", *QUICK, "--", "4", "8", "8"]) == 0
    table, below, *_ = capsys.readouterr().out.split("loop fails: ")
    assert re.search("loop +RuntimeError +fails\n", table)
    assert below.startswith("RuntimeError: no kernel for this shape in a line\n\nbackward ")


@pytest.mark.parametrize(("name", "calls"), [("v1", "aten::mm"), ("v2", "aten::bmm"), ("v3", "cuops::kron_linear_fwd")])
def test_profile_traces_the_implementation_of_that_name(tmp_path, capsys, name, calls):
    trace = tmp_path / "trace.json"
    command = ["profile", "kron", "--dtype", "f", "16", "32", "32", "--implementation", name, "--calls", "2"]
    assert main([*command, *QUICK, "--output", str(trace)]) == 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"kron_linear forward", "kron_linear backward", calls} <= names
    assert calls in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "capability", "dtype", "runs"),
    [
        ("1.1.0", 8, "float32", True),
        ("1.1.0", 9, "float32", False),
        ("1.1.0", 9, "float64", False),
        ("1.1.0", 9, "half", True),
        ("1.2.0", 9, "float32", True),
    ],
)
def test_fastkron_is_not_called_where_it_would_end_the_process(monkeypatch, version, capability, dtype, runs):
    fastkron = SimpleNamespace(gemkm=lambda x, factors: x)
    monkeypatch.setitem(sys.modules, "pyfastkron", SimpleNamespace(fastkrontorch=fastkron))
    monkeypatch.setattr(metadata, "version", {"pyfastkron": version}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    function = operator.IMPLEMENTATIONS["FastKron"]()
    with FakeTensorMode():
        x = torch.empty(2, 9, dtype=getattr(torch, dtype), device="cuda")
        with (
            contextlib.nullcontext() if runs else pytest.raises(RuntimeError, match="no kernel of float32 and float64")
        ):
            function(x, [])


def test_profile_names_the_implementations_there_are(capsys):
    assert main(["profile", "kron", "4", "8", "8", *QUICK, "--implementation", "v4"]) == 1
    message = capsys.readouterr().err
    assert re.search("implementation: expected one of cuops, loop, transposed.*v1, v2, v3, got v4", message)


def test_profile_names_no_alias_of_what_was_left_out(capsys):
    command = ["profile", "kron", "4", "8", "8", *QUICK, "--without", "FastKron"]
    assert main([*command, "--implementation", "v3", "--without", "v3"]) == 1
    message = "cuops profile: --implementation: expected one of loop, transposed, v1, v2, got v3\n"
    assert capsys.readouterr().err == message


def test_bench_measures_several_shapes_in_one_go(tmp_path, capsys):
    command = [
        "bench",
        "kron",
        "--dtype",
        "f",
        "32",
        "16",
        "16",
        "--also",
        "5x2x3x4",
        "7x9",
        "--quick",
        "--device",
        "cpu",
    ]
    assert main([*command, "--without", "torch.compile", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "float32 32x16x16: state 256 elements, 1 KiB a sample, 0.03277 MB in all" in printed
    assert "arithmetic intensity 7.8 FLOP/byte" in printed  # 2 * 32 * 256 * 32 FLOP, 4 * (2 * 32 * 256 + 2 * 256) bytes
    assert "v1 is loop, v2 is transposed, v3 is cuops" in printed
    written = json.loads((tmp_path / "kron_linear.json").read_text())
    assert list(written["sections"]) == ["forward", "backward"]
    for records in written["sections"].values():
        assert [record["shape"] for record in records] == [[32, 16, 16], [5, 2, 3, 4], [7, 9]]
        assert all(set(record["results"]) >= {"cuops", "loop", "transposed"} for record in records)
        assert all("us" in record["results"]["cuops"] for record in records)
    assert (tmp_path / "kron_linear.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("shape", "name"),
    [(["4"], "shape"), (["0", "8"], "shape"), (["4", "8", "--also", "3x0"], "--also, of shapes such as 32x32")],
)
def test_a_shape_that_makes_no_sense_is_named(shape, name, capsys):
    assert main(["check", "kron", *shape, *QUICK]) == 1
    assert f"check: {name}: expected at least two sizes" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["check", "rms_norm", "--device", "cuda", "8", "8"]) == 1
    assert capsys.readouterr().err.startswith("cuops check: --device cuda: PyTorch sees no GPU\nTo fix it, run: ")


def test_a_pytorch_that_is_built_for_cpus_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["check", "rms_norm", "--device", "cuda", "8", "8"]) == 1
    assert capsys.readouterr().err.startswith(
        f"cuops check: --device cuda: PyTorch {torch.__version__} is built for CPUs"
    )


def test_the_short_name_and_the_long_one_are_one_operator(capsys):
    for name in ("kron", "kron_linear"):
        assert main(["check", name, "3", "4", *QUICK]) == 0
    first, second = capsys.readouterr().out.split("forward float32 3x4 on cpu")[1:]
    assert re.findall("agrees", first) == re.findall("agrees", second)
    assert set(_bench.SHORT_NAMES.values()) <= set(_bench.OPERATORS)


@pytest.mark.parametrize("kind", operator.CHECKED)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_right_results_pass_the_check_and_a_wrong_row_does_not(kind, dtype, monkeypatch):
    monkeypatch.setattr(operator, "CHUNK", 100)  # several chunks of rows
    case = Case("kron_linear", kind, (7, 6, 8), dtype)
    given = operator.inputs(case, "cpu")
    computed = operator.results(case, available("kron_linear", "cpu")["loop"], given)
    assert max(operator.errors(case, computed, given).values()) <= TOLERANCE[dtype]
    norms = reference_norms(case, given)
    for name, result in computed.items():
        assert torch.linalg.vector_norm(result.double()).item() == pytest.approx(norms[name], rel=2e-2)
        result[-1] = 99
    wrong = operator.errors(case, computed, given)
    assert len(wrong) == len(computed)
    assert min(wrong.values()) > TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(3, 4), (5, 6, 2), (2, 3, 4, 5)], ids=str)
def test_operations_are_those_that_pytorch_counts(shape):
    given = operator.inputs(Case("kron_linear", "backward", shape, torch.float64), "cpu")
    function = available("kron_linear", "cpu", ["torch.compile"])["loop"]
    for kind in operator.KINDS:
        case = Case("kron_linear", kind, shape, torch.float64)
        call = operator.call(case, function, given)
        with FlopCounterMode(display=False) as counter:
            call()
        assert operator.operations(case) == counter.get_total_flops()


def test_tf32_is_judged_by_its_digits():
    case = Case("kron_linear", "forward", (2, 3), torch.float32)
    assert case.tolerance == TOLERANCE[torch.float32]
    torch.set_float32_matmul_precision("high")
    try:
        assert case.tolerance == TOLERANCE[torch.float16]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_benchmark_leaves_a_table_json_and_a_plot(tmp_path, capsys):
    shapes = ["--shapes", "5x6x6", "3x33", "--without", "torch.compile"]
    assert benchmarks.main(["kron_linear", "--device", "cpu", "--quick", *shapes, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "kron_linear.json").read_text())
    assert list(written["sections"]) == ["forward", "tf32", "backward", "host"]
    for record in written["sections"]["backward"]:
        assert all(result["us"] > 0 for result in record["results"].values())
    assert (tmp_path / "kron_linear.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"bfloat16 5x6x6 +\d", capsys.readouterr().out)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_grid_ends_with_the_geometric_mean_and_the_worst_ratios(tmp_path, capsys):
    shapes = ["--shapes", "5x6x6", "3x33", "--without", "torch.compile", "--dtypes", "f", "--output", str(tmp_path)]
    assert benchmarks.main(["kron_linear", "grid", "--device", "cpu", "--quick", *shapes]) == 0
    printed = capsys.readouterr().out
    means = {kind: float(mean) for kind, mean in re.findall(r"(\w+): ([\d.]+) times as fast as the best peer", printed)}
    worst = re.findall(r"([\d.]+)x \S+: (\w+) float32 ", printed.split("the slowest against the best peer:\n")[1])
    assert [float(ratio) for ratio, _ in worst] == sorted(float(ratio) for ratio, _ in worst)
    for kind, mean in means.items():
        ratios = [float(ratio) for ratio, of in worst if of == kind]
        assert mean == pytest.approx(math.prod(ratios) ** (-1 / len(ratios)), abs=0.01)


def test_chains_of_unequal_factors_are_drawn_alike_each_time():
    options = SimpleNamespace(quick=True, device="cuda")
    shapes = kron_linear_benchmark._random_shapes(options)
    assert shapes == kron_linear_benchmark._random_shapes(options)
    assert any(len(set(factors)) > 1 for _, *factors in shapes)
    assert max(map(math.prod, shapes)) <= kron_linear_benchmark.GRID_ELEMENTS


def test_the_plans_section_ends_with_the_predictions_that_are_farthest_off(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kron_linear_benchmark, "kron_plan", lambda rows, *_: SimpleNamespace(microseconds=1e9 / rows))
    shapes = ["--shapes", "5x6x6", "3x33", "--dtypes", "f", "d", "--output", str(tmp_path)]
    assert benchmarks.main(["kron_linear", "plan", "--device", "cpu", "--quick", *shapes]) == 0
    printed = capsys.readouterr().out
    found = [(float(a), float(b)) for a, b in re.findall(r"float(?:32|64) +[\dx]+ +([\d.]+) +([\d.]+)\n", printed)]
    assert {predicted for predicted, _ in found} == {2e8, round(1e9 / 3, 1)}
    assert [a / b for a, b in found] == sorted(a / b for a, b in found)
    assert "0 of 4 predictions are within 1.5 times the time" in printed
    records = json.loads((tmp_path / "kron_linear_plan.json").read_text())["sections"]["plan"]
    assert [record["predicted_us"] for record in records] == [2e8, 1e9 / 3] * 2


def test_run_multiplies_a_file_by_the_product_of_files(tmp_path, device, capsys):
    x, factors, bias = arguments(((5, 7), [(3, 4), (5, 2)]))
    for name, array in {"x": x, "w1": factors[0], "w2": factors[1], "b": bias}.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
    files = [str(tmp_path / f"{name}.npy") for name in ("x", "y", "w1", "w2", "b")]
    command = ["run", "kron", *files[:2], "--factor", files[2], "--factor", files[3]]
    assert main([*command, "--bias", files[4]]) == 0
    y = np.load(files[1])
    assert y.shape == (5, 7, 15)
    np.testing.assert_allclose(y, definition(x, factors, bias), rtol=1e-5, atol=1e-5)
    assert "kron_linear of 5x7x8 float32 on" in capsys.readouterr().out
    assert main([*command[:4], "--factor", files[4]]) == 1
    assert "factors[0]: expected a matrix" in capsys.readouterr().err


def test_run_takes_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr("cuops.cli.operands.CHUNK_BYTES", 100)
    x, factors, _ = arguments(((40,), [(6, 4), (5, 2)]), torch.bfloat16)
    save_file({"x": x, "a": factors[0], "b": factors[1]}, tmp_path / "in.safetensors")
    source, target = str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")
    assert (
        main(["run", "kron_linear", f"{source}:x", target, "--factor", f"{source}:a", "--factor", f"{source}:b"]) == 0
    )
    y = load_file(target)["x"]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), definition(x, factors), rtol=2**-8, atol=0)


@pytest.mark.parametrize("shape", [(8,), (0, 8), (3, 0, 8)])
def test_run_of_one_row_and_of_none(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.ones(shape, np.float32))
    np.save(tmp_path / "w.npy", make((3, 8)).numpy())
    files = [str(tmp_path / f"{name}.npy") for name in ("x", "y", "w")]
    assert main(["run", "kron_linear", *files[:2], "--factor", files[2]]) == 0
    assert np.load(files[1]).shape == (*shape[:-1], 3)


@pytest.mark.parametrize("kind", operator.CHECKED)
def test_references_are_in_float64(kind):
    case = Case("kron_linear", kind, (4, 2, 3), torch.float16)
    for _, exact in operator.references(case, operator.inputs(case, "cpu")):
        assert {a.dtype for a in exact.values()} == {torch.float64}
