"""The command cuops: its subcommands that compare and measure, and how it fails."""

import errno
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import cuops
import numpy as np
import pytest
import torch
from cuops._bench import rms_norm
from cuops.cli import cases, doctor, main, selftest
from matplotlib.figure import Figure
from torch._dynamo.testing import CompileCounter

QUICK = ["--device", "cpu", "--without", "torch.compile"]


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"cuops {metadata.version('cuops')}\n"


def test_python_m_cuops_is_the_command():
    done = subprocess.run([sys.executable, "-m", "cuops", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"cuops {metadata.version('cuops')}\n")


def test_help_names_every_subcommand(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in ("doctor", "run", "check", "profile", "bench"))


@pytest.mark.parametrize("letter", "fdhb")
def test_check_compares_forward_and_gradients_of_every_implementation(capsys, letter):
    assert main(["check", "rms_norm", "--dtype", letter, *QUICK, "--", "3", "5", "65"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in ("cuops", "torch"):
        agreeing = [line[1] for line in lines if line[:1] == [name] and line[-1] == "agrees"]
        assert agreeing == ["y", "y", "h", "dx", "dweight", "dx", "dresidual", "dweight", "dx", "dweight", "dbias"]
    assert all(float(line[3]) < 0.05 for line in lines if line[:1] == ["cuops"])
    norms = {}  # of the table that a line is in
    for line in lines:
        if line[:1] == ["reference"]:
            norms[line[1]] = float(line[2])
        elif line[:1] == ["cuops"]:
            assert float(line[2]) == pytest.approx(norms[line[1]], rel=1e-2)


def test_a_seed_means_the_same_numbers_whatever_peers_draw(capsys):
    norms = []
    for without in ([], ["--without", "torch"]):
        assert main(["check", "sample_normal", *QUICK, *without, "--seed", "3", "--", "64", "8"]) == 0
        norms.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("reference")])
    assert norms[0] == norms[1] != []


def test_check_fails_when_cuops_is_wrong(capsys, monkeypatch):
    import cuops

    monkeypatch.setattr(
        cuops, "rms_norm", lambda x, weight, bias, eps, residual: torch.nn.functional.rms_norm(x, x.shape[-1:])
    )
    assert main(["check", "rms_norm", *QUICK, "--", "4", "64"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_check_finds_cuops_right_in_float16_for_many_factors_of_which_none_is_small():
    assert main(["check", "kron", "--dtype", "h", *QUICK, "--", "16", *["1"] * 40]) == 0


@pytest.mark.parametrize("error", [float("inf"), float("nan")])
def test_self_tests_have_errors_that_json_has(error):
    assert json.loads(json.dumps(selftest._rounded(error), allow_nan=False)) > selftest.LIMIT


@pytest.mark.parametrize("dtype", "fdhb")
def test_check_fails_when_samples_are_of_another_seed(dtype, capsys, monkeypatch):
    drawn = cuops.sample_normal
    check = ["check", "sample_normal", *QUICK, "--dtype", dtype, "--", "64", "32"]
    assert main(check) == 0
    monkeypatch.setattr(
        cuops, "sample_normal", lambda *arguments, seed, **options: drawn(*arguments, seed=seed + 1, **options)
    )
    capsys.readouterr()
    assert main(check) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["cuops"] and line[-1] == "DIFFERS"] == ["x", "x", "x", "dsigma"]
    assert [line[1] for line in lines if line[:1] == ["torch"]] == ["own", "own", "own", "dmu", "dsigma"]


def test_check_draws_the_inputs_of_its_seed(capsys):
    def norms(*seed):
        assert main(["check", "rms_norm", *QUICK, *seed, "--", "4", "64"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("reference")]

    assert norms() == norms("--seed", "0") == norms(f"--seed={2**64}")
    assert norms("--seed=-1") == norms("--seed=-1") != norms()


@pytest.mark.parametrize("command", [["check"], ["bench", "--quick"]], ids=" ".join)
def test_each_shape_is_compiled(command, monkeypatch):
    counter = CompileCounter()
    monkeypatch.setitem(
        rms_norm.IMPLEMENTATIONS,
        "torch.compile",
        lambda: torch.compile(rms_norm._torch(), dynamic=False, backend=counter),
    )
    shapes = [f"2x{n}" for n in range(4, 14)]
    also = ["--also", *shapes[:7], "--also", *shapes[7:]]
    assert main([command[0], "rms_norm", *command[1:], "--device", "cpu", *also, "--", "2", "64"]) == 0
    kinds = rms_norm.CHECKED if command[0] == "check" else rms_norm.KINDS
    assert counter.frame_count == len(kinds) * (len(shapes) + 1)


def test_profile_writes_a_chrome_trace_and_prints_the_kernels(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert main(["profile", "rms_norm", *QUICK, "--calls", "2", "--output", str(trace), "--", "4", "64"]) == 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"rms_norm forward", "rms_norm backward", "cuops::rms_norm_fwd"} <= names
    assert "cuops::rms_norm_fwd" in capsys.readouterr().out


def test_profile_says_when_the_trace_was_not_written(tmp_path, capsys, monkeypatch):
    """PyTorch does not: it leaves an empty file."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(f"{path}.tmp").touch())
    output = tmp_path / "trace.json"
    output.write_text("of before")
    assert main(["profile", "rms_norm", "4", "8", "--device", "cpu", "--output", str(output)]) == 1
    assert "trace.json: the trace could not be written" in capsys.readouterr().err
    assert output.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("needs", ["numpy.ones(1 << 58, 'int8')", "import tqdm_of_no_kind"], ids=["memory", "module"])
def test_what_is_not_there_is_a_line(needs, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "main", lambda options: exec(needs, {"numpy": np}))
    assert main(["doctor"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_profile_leaves_what_is_no_file_alone(tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    for name, says in (("folder.json", "expected the name of a file"), ("x.npy", "a name that ends in .json, got")):
        arguments = ["profile", "rms_norm", *QUICK, "--calls", "1", "--output", str(tmp_path / name), "--", "4", "64"]
        assert main(arguments) == 1
        assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_profile_of_no_calls_is_refused(capsys):
    assert main(["profile", "rms_norm", *QUICK, "--calls", "0", "--", "4", "64"]) == 1
    assert "--calls: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("run kron_linear", ["run", "kron", "x.npy", "y.npy", "--factor", "a.npy", "b.npy"]),
        ("check", ["check", "rms_norm", "4", "64", "--dtype", "b", "h"]),
    ],
)
def test_what_is_not_understood_is_answered_with_the_usage_of_its_command(command, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert (stopped.value.code, said.startswith(f"usage: cuops {command} ")) == (2, True)
    assert f"unrecognized arguments: {arguments[-1]}" in said


@pytest.mark.parametrize(("operator", "option"), [("kron", "--factor"), ("sample_normal", "--num-samples")])
def test_some_options_are_required(operator, option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["run", operator, "x.npy", "y.npy"])
    assert stopped.value.code == 2
    assert f"the following arguments are required: {option}" in capsys.readouterr().err


def test_an_operator_that_there_is_not_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "layer_norm", "4", "64"])
    assert stopped.value.code == 2
    assert "argument operator: invalid choice: 'layer_norm'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "shape"), [("--also", ["4", "64", "--also", "3xa"]), ("shape", ["3xa"])])
def test_shapes_that_are_none_are_named(name, shape, capsys):
    with pytest.raises(SystemExit):
        main(["check", "rms_norm", *shape])
    assert f"{name}: expected sizes such as 16x32x32, got 3xa" in capsys.readouterr().err


def test_sizes_may_be_one_word(capsys):
    assert main(["check", "rms_norm", *QUICK, "--", "4x64"]) == 0
    joined = capsys.readouterr().out
    assert main(["check", "rms_norm", *QUICK, "--", "4", "64"]) == 0
    assert joined.splitlines()[0] == capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("arguments", [["doctor"], ["--version"], ["run", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_failure(arguments, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-m", "cuops", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode in (0, 141)  # argparse passes over it where it prints help


@pytest.mark.parametrize(
    "few", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}]
)
def test_a_terminal_that_knows_few_letters_is_no_failure(few):
    command = [sys.executable, "-m", "cuops", "profile", "--help"]
    environment = os.environ | {"PYTHONCOERCECLOCALE": "0"} | few
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"implementation" in done.stdout


def test_output_that_goes_nowhere_is_no_failure():
    command = [sys.executable, "-m", "cuops", "--version"]
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")
    full = subprocess.run(["sh", "-c", '"$@" >/dev/full', "sh", *command], capture_output=True, text=True, check=False)
    assert (full.returncode, full.stderr) == (1, "cuops: [Errno 28] No space left on device\n")


def test_profile_refuses_an_implementation_that_is_not_there(capsys):
    assert main(["profile", "rms_norm", *QUICK, "--implementation", "abacus", "--", "4", "64"]) == 1
    assert "implementation: expected one of cuops, torch, got abacus" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "profile", "bench"])
def test_leaving_out_what_is_no_implementation_names_those_that_are(command, capsys):
    assert main([command, "kron", *QUICK, "--without", "abacus", "--", "4", "8", "8"]) == 1
    shown = capsys.readouterr()
    names = "cuops, loop, transposed, torch.compile, FastKron, v1, v2, v3"
    assert f"--without: expected one of {names}, got abacus\n" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "command",
    [
        "check kron --with=cuops 4 8 8",
        "profile kron --with=cuops 4 8 8",
        "bench kron --qui 4 8 8",
        "run rms_norm --ep=1 x.npy y.npy",
        "doctor --allow",
        "--versio doctor",
    ],
)
def test_the_beginning_of_an_option_is_none(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    assert stopped.value.code == 2
    option = next(word for word in command.split() if word.startswith("--"))
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "profile", "bench"])
def test_leaving_out_every_implementation_is_refused(command, capsys):
    everything = [f"--without={name}" for name in ("cuops", "loop", "transposed", "torch.compile", "FastKron")]
    assert main([command, "kron", "--device", "cpu", *everything, "--", "4", "8", "8"]) == 1
    shown = capsys.readouterr()
    assert "--without: expected an implementation to be left" in shown.err
    assert shown.out == ""


def test_without_a_command_all_of_them_are_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    said = capsys.readouterr().err
    assert (stopped.value.code, said.count("{doctor,run,check,profile,bench}")) == (2, 1)


def test_check_of_everything_but_cuops_is_refused(capsys):
    assert main(["check", "rms_norm", *QUICK, "--without", "cuops", "--", "4", "64"]) == 1
    assert "--without: expected another implementation than the one that is checked" in capsys.readouterr().err


def test_a_dtype_that_there_is_not_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "rms_norm", "--dtype", "float8", "4", "64"])
    assert stopped.value.code == 2
    said = "argument --dtype: expected f, d, h, b, or float32, float64, float16, bfloat16, got float8"
    assert said in capsys.readouterr().err


def test_results_want_a_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["bench", "rms_norm", *QUICK, "--quick", "--output", str(tmp_path / "file"), "--", "4", "64"]) == 1
    assert "file: expected a folder: File exists" in capsys.readouterr().err


@pytest.mark.parametrize("written", [(Path, "write_text"), (Figure, "savefig")], ids=["JSON", "plot"])
def test_results_that_the_disk_does_not_hold_are_named(written, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*written, full)
    assert main(["bench", "rms_norm", *QUICK, "--quick", "--output", str(tmp_path), "--", "4", "64"]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(rf"cuops bench: {tmp_path}/rms_norm.(json|png): No space left on device\n", said)


@pytest.mark.parametrize("command", ["profile", "bench"])
def test_an_empty_output_is_not_the_current_folder(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "rms_norm", "4", "64", "--device", "cpu", "--output", ""])
    assert stopped.value.code == 2
    assert "argument --output: expected a path, got an empty one" in capsys.readouterr().err


def test_bench_prints_the_comparison_and_writes_json_and_a_plot(tmp_path, capsys):
    assert main(["bench", "rms_norm", *QUICK, "--quick", "--output", str(tmp_path), "--", "4", "64"]) == 0
    written = json.loads((tmp_path / "rms_norm.json").read_text())
    assert list(written["sections"]) == ["forward", "residual", "backward"]
    asked = {"quick": True, "without": ["torch.compile"], "shapes": ["4x64"], "dtypes": ["f"]}
    assert written["provenance"].items() >= asked.items()
    assert (tmp_path / "rms_norm.png").read_bytes().startswith(b"\x89PNG")
    assert "float32 4x64" in capsys.readouterr().out


def test_bench_writes_nothing_that_was_not_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "rms_norm", *QUICK, "--quick", "--", "4", "64"]) == 0
    printed = capsys.readouterr().out
    assert "float32 4x64" in printed
    assert "wrote" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["check", "profile", "bench"])
def test_without_torch_the_command_to_run_is_printed(command, capsys, monkeypatch):
    monkeypatch.setattr(cases, "torch", None)
    assert main([command, "rms_norm", "4", "64"]) == 1
    assert "pip install torch" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "profile", "bench"])
def test_arrays_that_memory_does_not_hold_are_a_line(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, "rms_norm", *QUICK, "--", "9999999", "9999999"]) == 1
    assert re.fullmatch(rf"cuops {command}: not enough memory for \d[\d.]* \w+\n", capsys.readouterr().err)
    monkeypatch.setattr(torch, "randn", torch.empty)  # x has 8 GB, which need not be drawn
    assert main([command, "kron", *QUICK, "--", "1", "2147483648"]) == 1
    assert re.fullmatch(
        rf"cuops {command}: (Storage size calculation overflowed|not enough memory).*\n", capsys.readouterr().err
    )
    monkeypatch.undo()
    assert main([command, "rms_norm", *QUICK, "--", "99999999999999999999", "4"]) == 1
    assert "shape: expected sizes of arrays that memory holds" in capsys.readouterr().err


def test_a_torch_that_does_not_import_is_told_from_none(capsys, monkeypatch):
    monkeypatch.setattr(cases, "failure", "ImportError('libtorch.so: no such file')")
    assert main(["check", "rms_norm", "4", "64"]) == 1
    assert "libtorch.so" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [["64"], ["0", "64"], ["4", "-1"], ["1"] * 61])
def test_a_shape_that_makes_no_sense_is_named(shape, capsys):
    assert main(["check", "rms_norm", *QUICK, "--", *shape]) == 1
    assert "shape: expected at least two sizes" in capsys.readouterr().err


def test_another_shape_of_one_size_is_said_to_be_so(capsys):
    assert main(["check", "rms_norm", *QUICK, "--also", "32", "32", "--", "4", "64"]) == 1
    assert "--also, of shapes such as 32x32: expected at least two sizes" in capsys.readouterr().err
