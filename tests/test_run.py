"""cuops run: operators on files."""

import errno
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import types

import ml_dtypes
import numpy as np
import pytest
import torch
from cuops.cli import main, operands, run
from safetensors.torch import load_file, save_file


def reference(x, weight=1.0, eps=1e-6):
    x = x.astype(np.longdouble)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


@pytest.fixture
def x(tmp_path):
    x = np.random.default_rng().standard_normal((5, 7, 33)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return x


def test_an_array_with_a_weight(tmp_path, x, device, capsys):
    weight = np.random.default_rng().standard_normal(33).astype(np.float32)
    np.save(tmp_path / "w.npy", weight)
    files = [str(tmp_path / name) for name in ("x.npy", "y.npy", "w.npy")]
    assert main(["run", "rms_norm", *files[:2], "--weight", files[2], "--eps", "1e-3", "--weight-offset", "1"]) == 0
    y = np.load(tmp_path / "y.npy")
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, reference(x, weight + 1, 1e-3), rtol=1e-5, atol=1e-6)
    assert "rms_norm of 5x7x33 float32 on" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_many_chunks(tmp_path, monkeypatch, dtype, order):
    monkeypatch.setattr(operands, "CHUNK_BYTES", 1000)
    x = np.random.default_rng().standard_normal((101, 17)).astype(dtype, order=order)
    np.save(tmp_path / "x.npy", x)
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]) == 0
    tolerance = 2e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), reference(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(9,), (0, 4), (3, 0)])
def test_one_row_and_no_rows(tmp_path, shape):
    x = np.ones(shape, np.float32)
    np.save(tmp_path / "x.npy", x)
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), x, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_of_a_safetensors_file(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(operands, "CHUNK_BYTES", 1000)
    tensors = {"x": torch.randn(40, 32, dtype=dtype), "model.norm.weight": torch.randn(32, dtype=dtype)}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    location = str(tmp_path / "in.safetensors")
    command = ["run", "rms_norm", f"{location}:x", str(tmp_path / "out.safetensors")]
    assert main([*command, "--weight", f"{location}:model.norm.weight"]) == 0
    y = load_file(tmp_path / "out.safetensors")["x"]
    assert y.dtype == dtype
    exact = reference(tensors["x"].double().numpy(), tensors["model.norm.weight"].double().numpy())
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("torch_there", [True, False])
def test_a_weight_of_bfloat16_serves_x_of_any_dtype(tmp_path, monkeypatch, x, torch_there):
    weight = torch.randn(x.shape[-1], dtype=torch.bfloat16)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    if not torch_there:
        monkeypatch.setattr(operands, "torch", None)
    y = tmp_path / "y.npy"
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(y), "--weight", str(tmp_path / "w.safetensors")]) == 0
    np.testing.assert_allclose(np.load(y), reference(x, weight.double().numpy()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("b", "w.safetensors:b: expected the dtype of x.npy, float32, got bfloat16"),
        ("d", "w.safetensors:d: expected the dtype of x.npy, float32, got float64"),
        ("s", "factors[0]: expected a matrix, got shape ()"),
    ],
)
def test_factors_that_do_not_fit_are_named(tmp_path, monkeypatch, capsys, x, name, says):
    monkeypatch.chdir(tmp_path)
    tensors = {"b": torch.ones(33, 33, dtype=torch.bfloat16), "d": torch.ones(33, 33, dtype=torch.float64)}
    save_file(tensors | {"s": torch.ones(())}, "w.safetensors")
    assert main(["run", "kron", "x.npy", "y.npy", "--factor", f"w.safetensors:{name}"]) == 1
    assert says in capsys.readouterr().err


def test_x_of_bfloat16_without_torch_names_what_to_install(tmp_path, monkeypatch, capsys):
    save_file({"x": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(operands, "torch", None)
    assert main(["run", "rms_norm", str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors")]) == 1
    assert "pip install torch" in capsys.readouterr().err


def test_the_input_may_be_the_output(tmp_path, x):
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "x.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.npy", "y.npy"], "missing.npy"),
        (["x.npy", "y.npy", "--eps", "-1"], "eps: expected a finite number of at least 0"),
        (["x.npy", "y.npy", "--weight-offset", "1"], "--weight-offset: expected --weight as well"),
        (["x.npy", "y.npy", "--weight", "x.npy"], "weight: expected an array of 1 dimension, got 3"),
        (["x.npy", "y.npy", "--weight", "one.safetensors"], "weight: expected an array of 1 dimension, got 0"),
        (["x.npy", "y.npy", "--weight", ""], "No such file"),  # as of a variable that is not set
        (
            ["two.safetensors:a", "y.safetensors", "--weight", "swapped.npy"],
            "weight: expected this machine's byte order",
        ),
        (["x.npy", "y.csv"], "expected a name that ends in .npy or .safetensors"),
        (["swapped.npy", "y.npy"], "swapped.npy: expected this machine's byte order"),
        (["halves.npy", "y.npy"], "halves.npy: .npy has no bfloat16"),
        (["ints.npy", "y.npy"], "ints.npy: expected float64, float32, float16 or bfloat16, got int64"),
        (["x.npy", "y.npy", "--weight", "w9.npy"], "weight: expected the last of x's dimensions, (33,), got (9,)"),
        (["x.npy", "w33.npy", "--weight", "w33.npy"], "w33.npy: is read here, too; name another file"),
        (["two.safetensors:a", "two.safetensors"], "two.safetensors: holds 2 tensors, of which one would be left"),
        (["x.npy", "two.safetensors"], "two.safetensors: holds 2 tensors, of which one would be left"),
        (["two.safetensors", "y.npy"], "has 2 tensors; name one as two.safetensors:NAME, of 'a', 'b'"),
        (["two.safetensors:", "y.npy"], "has no tensor ''"),
        (["none.safetensors", "y.npy"], "none.safetensors: has no tensors"),
        (["two.safetensors:c", "y.npy"], "has no tensor 'c'"),
        (["two.safetensors:a", "y.npy"], ".npy has no bfloat16"),
        (["x.npy", "nowhere/y.npy"], "nowhere/y.npy: there is no folder nowhere"),
        (["text.npy", "y.npy"], "text.npy: expected one array, as numpy.save writes it"),
        (["empty.npy", "y.npy"], "empty.npy: expected one array, as numpy.save writes it"),
        (["zip.npy", "y.npy"], "zip.npy: expected one array, as numpy.save writes it"),
        (["x.npy", "folder.npy"], "folder.npy: expected the name of a file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_output(tmp_path, monkeypatch, capsys, x, arguments, says):
    monkeypatch.chdir(tmp_path)
    np.save("ints.npy", np.arange(6).reshape(2, 3))
    np.save("halves.npy", np.ones((2, 3), ml_dtypes.bfloat16))
    save_file({name: torch.ones(2, 3, dtype=torch.bfloat16) for name in "ab"}, "two.safetensors")
    save_file({}, "none.safetensors")
    save_file({"w": torch.ones((), dtype=torch.bfloat16)}, "one.safetensors")
    np.save("swapped.npy", np.ones(3, np.float32).astype(np.dtype(np.float32).newbyteorder()))
    for size in (9, 33):
        np.save(f"w{size}.npy", np.ones(size, np.float32))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04")
    (tmp_path / "folder.npy").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["run", "rms_norm", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("cuops run: ")
    assert says in message
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["y.npy", "y.safetensors"])
def test_a_disk_that_cannot_hold_the_output_is_one_line(tmp_path, monkeypatch, capsys, x, name):
    monkeypatch.chdir(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(["run", "rms_norm", "x.npy", name]) == 1
    says = f"cuops run: {name}: no file of float32 [5, 7, 33] there: No space left on device\n"
    assert capsys.readouterr().err == says
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_a_file_system_that_cannot_reserve_is_written_to(tmp_path, monkeypatch, x):
    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), reference(x), rtol=1e-5, atol=1e-6)


def test_a_new_file_has_the_mode_that_umask_leaves(tmp_path, x):
    before = os.umask(0o026)
    try:
        assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]) == 0
    finally:
        assert os.umask(before) == 0o026
    assert (tmp_path / "y.npy").stat().st_mode & 0o777 == 0o640


def test_what_is_no_safetensors_file_is_replaced(tmp_path, x):
    (tmp_path / "y.safetensors").write_bytes(b"")
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.safetensors")]) == 0
    np.testing.assert_allclose(load_file(tmp_path / "y.safetensors")["x"], reference(x), rtol=1e-5, atol=1e-6)


def test_a_single_number_has_no_rows(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.float32(1))
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]) == 1
    assert "x.npy: expected at least 1 dimension, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "said"), [(0.25, "250 ms, 8 MB/s"), (2.0, "2.00 s, 1 MB/s")])
def test_times_are_in_seconds_from_one_on(seconds, said, capsys):
    operands.report("rms_norm", (2, 3), "float32", "the CPU", seconds, 2_000_000, "y.npy")
    assert f": {said} of files, wrote y.npy\n" in capsys.readouterr().out


def test_what_a_link_names_is_written_and_keeps_its_mode(tmp_path, x):
    (tmp_path / "private.npy").touch(0o600)
    (tmp_path / "link.npy").symlink_to("private.npy")
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "link.npy")]) == 0
    assert (tmp_path / "link.npy").is_symlink()
    assert (tmp_path / "private.npy").stat().st_mode & 0o777 == 0o600
    np.testing.assert_allclose(np.load(tmp_path / "private.npy"), reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_leaves_no_unfinished_output(tmp_path, x, number):
    code = f"""
        import os, signal, sys
        from cuops.cli import command, run

        signal.signal({number:d}, signal.SIG_DFL)  # whatever this test was started with

        def killed(part, **_):
            os.kill(os.getpid(), {number:d} if len(part) else 0)
            return part

        run.OPERATORS["rms_norm"] = run.RowOperator(killed)
        sys.exit(command())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), "run", "rms_norm", "x.npy", "y.npy"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_a_failure_in_the_middle_leaves_the_old_output(tmp_path, monkeypatch, x):
    monkeypatch.setattr(operands, "CHUNK_BYTES", 1000)
    (tmp_path / "y.npy").write_bytes(b"old")
    calls = []

    def fails(part, **_):
        calls.append(part)
        if len(calls) == 3:
            raise OSError("the disk is full")
        return part

    monkeypatch.setitem(run.OPERATORS, "rms_norm", run.RowOperator(fails))
    assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]) == 1
    assert (tmp_path / "y.npy").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_a_parameter_without_a_default_is_asked_for(tmp_path, monkeypatch, capsys, x):
    def scaled(x, factor, power, bias=None, eps=0.5):
        return x

    operator = run.RowOperator(scaled, ("factor", "bias"), numbers={"power": "of x", "eps": "added to x"})
    monkeypatch.setitem(run.OPERATORS, "rms_norm", operator)
    with pytest.raises(SystemExit, match="2"):
        main(["run", "rms_norm", str(tmp_path / "x.npy"), str(tmp_path / "y.npy")])
    assert "the following arguments are required: --factor, --power\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, of in run.OPERATORS.items() if isinstance(of, run.RowOperator)])
def test_every_number_that_an_operator_takes_is_an_option(name):
    operator = run.OPERATORS[name]
    taken = inspect.signature(operator.function, eval_str=True).parameters
    assert [*operator.numbers] == [parameter for parameter, of in taken.items() if of.annotation is float]


@pytest.mark.parametrize(
    ("gpu", "with_tensors", "dtype", "device", "words"),
    [
        (None, True, "float32", "cpu", "the CPU"),
        (0, False, "float32", "cuda", "A GPU (cuops-cu000)"),
        (0, False, "bfloat16", "cpu", "the CPU (PyTorch reaches no GPU)"),
        (0, True, "bfloat16", "cuda", "A GPU (cuops-cu000)"),
    ],
)
def test_files_are_computed_where_arrays_and_tensors_are(monkeypatch, gpu, with_tensors, dtype, device, words):
    named = types.SimpleNamespace
    monkeypatch.setattr(operands._backend, "gpu_for_host_arrays", lambda: gpu)
    monkeypatch.setattr(operands._backend, "choose", lambda: named(name="cu000"))
    monkeypatch.setattr(operands._driver, "gpus", lambda: [named(name="A GPU")])
    monkeypatch.setattr(operands, "cuda_tensors", lambda: with_tensors)
    assert operands.place(dtype) == (device, words)


@pytest.mark.parametrize(
    ("operator", "option", "more"),
    [("kron_linear", "--factor", []), ("sample_normal", "--sigma", ["--num-samples", "4"])],
)
def test_no_file_that_is_read_is_written(tmp_path, capsys, operator, option, more):
    for name in ("x", "other"):
        np.save(tmp_path / f"{name}.npy", np.eye(4) if operator == "kron_linear" else np.ones(4))
    other = str(tmp_path / "other.npy")
    assert main(["run", operator, str(tmp_path / "x.npy"), other, option, other, *more]) == 1
    assert "is read here, too" in capsys.readouterr().err


def test_of_many_tensors_a_message_has_the_nearest_names_or_the_first(tmp_path, capsys):
    save_file({f"layers.{k}.\x1b[2Jweight": torch.ones(1) for k in range(300)}, tmp_path / "many.safetensors")
    for name, says in (
        ("layers.7.weight", "but 'layers.7.\\x1b[2Jweight'"),
        ("other", "'layers.0.\\x1b[2Jweight', "),
    ):
        given = f"{tmp_path / 'many.safetensors'}:{name}"
        assert main(["run", "rms_norm", given, str(tmp_path / "y.npy")]) == 1
        said = capsys.readouterr().err
        assert says in said
        assert len(said) < 600
    assert "and 292 more" in said
