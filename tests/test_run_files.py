"""The files of cuops run: formats, names, links, and what is damaged or protected."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from cuops.cli import main
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"", "expected a safetensors file"),
        (b"{no json", "expected a safetensors file"),
        (b"\x80\x81", "expected a safetensors file"),
        (b"[1, 2]", "expected a safetensors file"),
        (b"{}", "has no tensors"),
        (b'{"x": "text"}', "expected dtype, shape and data_offsets"),
        (b'{"x": {"shape": [2, 3], "data_offsets": [0, 24]}}', "expected dtype, shape and data_offsets"),
        (
            b'{"x": {"dtype": "F32", "shape": ["ab"], "data_offsets": [0, 24]}}',
            "expected dtype, shape and data_offsets",
        ),
        (
            b'{"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [-30, -6]}}',
            "expected dtype, shape and data_offsets",
        ),
        (b'{"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 8]}}', "are not those of F32"),
        (b'{"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}}', "are not those of F32"),
        (b"[" * 200000, "expected a safetensors file"),
        (
            b'{"x": {"dtype": ["F32"], "shape": [2, 3], "data_offsets": [0, 24]}}',
            "expected dtype, shape and data_offsets",
        ),
        (b'{"x": {"dtype": "F32", "shape": [true, 6], "data_offsets": [0, 24]}}', "expected dtype, shape"),
        (
            b'{"x": {"dtype": "F32", "shape": [' + b"1, " * 99 + b'6], "data_offsets": [0, 24]}}',
            "maximum supported dimension",
        ),
        (b'{"x": {"dtype": "I32", "shape": [2, 3], "data_offsets": [0, 24]}}', "expected F64, F32, F16, BF16, got I32"),
    ],
)
def test_a_safetensors_file_that_is_damaged_is_named(tmp_path, capsys, header, says):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    assert main(["run", "rms_norm", str(path), str(tmp_path / "y.npy")]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"cuops run: {path}")
    assert says in message


def test_safetensors_with_metadata_are_read_and_written_over(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.full((3, 4), 2.0)}, path, metadata={"format": "pt"})
    assert main(["run", "rms_norm", str(path), str(path), "--eps", "0"]) == 0
    assert load_file(path)["a"].eq(1).all()


def test_numbers_in_safetensors_are_aligned(tmp_path):
    for digits in range(1, 5):  # the header before them grows with the shape
        np.save(tmp_path / "x.npy", np.ones((10 ** (digits - 1), 4)))
        path = tmp_path / "y.safetensors"
        assert main(["run", "rms_norm", str(tmp_path / "x.npy"), str(path)]) == 0
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_a_pipe_is_said_to_be_no_file(name, tmp_path, capsys):
    os.mkfifo(tmp_path / name)
    assert main(["run", "rms_norm", str(tmp_path / name), str(tmp_path / "y.npy")]) == 1
    assert f"{name}: expected a file that can be read from anywhere, got a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none.npy", "none.safetensors", "folder.npy", ""])
def test_a_file_that_cannot_be_read_comes_first_in_the_message(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.npy").mkdir()
    assert main(["run", "rms_norm", name, "y.npy"]) == 1
    why = "Is a directory" if name == "folder.npy" else "No such file or directory"
    assert capsys.readouterr().err == f"cuops run: {name or 'an empty name'}: {why}\n"


def test_a_file_that_is_write_protected_stays_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((2, 4)))
    np.save("y.npy", np.zeros(3))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # which root may nearly always
    assert main(["run", "rms_norm", "x.npy", "y.npy"]) == 1
    assert "y.npy: is write-protected" in capsys.readouterr().err
    assert (np.load("y.npy") == np.zeros(3)).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_names_as_long_as_a_folder_holds_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((2, 4)))
    name = "y" * 251 + ".npy"
    assert main(["run", "rms_norm", "x.npy", name]) == 0
    assert np.load(name).shape == (2, 4)


def test_a_link_that_leads_nowhere_but_to_itself_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((2, 4)))
    (tmp_path / "y.npy").symlink_to("y.npy")
    assert main(["run", "rms_norm", "x.npy", "y.npy"]) == 0
    assert np.load("y.npy").shape == (2, 4)


@pytest.mark.parametrize(
    ("damaged", "is_npy"),
    [
        (lambda npy: npy[:-20], True),
        (lambda npy: npy[:60], True),
        (lambda npy: npy.replace(b"}", b"("), True),
        (lambda npy: npy.replace(b"<f8", b",f8"), True),
        (lambda npy: b"text", False),
        (lambda npy: b"", False),
    ],
    ids=["data cut", "header cut", "no dictionary", "no dtype", "text", "nothing"],
)
def test_an_npy_file_that_is_damaged_is_told_from_another_file(damaged, is_npy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((2, 4)))
    (tmp_path / "x.npy").write_bytes(damaged((tmp_path / "x.npy").read_bytes()))
    assert main(["run", "rms_norm", "x.npy", "y.npy"]) == 1
    more = "; this .npy is cut short, damaged, or of Python's objects" if is_npy else ""
    assert capsys.readouterr().err == f"cuops run: x.npy: expected one array, as numpy.save writes it{more}\n"


def test_a_header_with_a_size_that_no_array_has_is_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1180591620717411303424, 16), }"
    header += b" " * (117 - len(header)) + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert main(["run", "rms_norm", "x.npy", "y.npy"]) == 1
    assert "x.npy: expected one array, as numpy.save writes it" in capsys.readouterr().err
