"""cuops run sample_normal: samples of the means in a file."""

import cuops
import numpy as np
import pytest
import torch
from cuops.cli import main, operands
from safetensors.torch import load_file, save_file


def test_samples_of_the_means_in_a_file(tmp_path, capsys, monkeypatch):
    mu, sigma = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.full((3, 4), 0.5, np.float32)
    np.save(tmp_path / "mu.npy", mu)
    np.save(tmp_path / "sigma.npy", sigma)
    monkeypatch.setattr(operands, "CHUNK_BYTES", 5 * mu.nbytes)
    command = ["run", "sample_normal", str(tmp_path / "mu.npy"), str(tmp_path / "x.npy"), "--num-samples", "17"]
    assert main([*command, "--sigma", str(tmp_path / "sigma.npy"), "--seed", "3", "--low", "-2", "--start", "2"]) == 0
    expected = cuops.sample_normal(mu, sigma, 17, seed=3, low=-2.0, start=2)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), expected)
    assert "sample_normal of 3x17x4 float32 on" in capsys.readouterr().out
    np.save(tmp_path / "low.npy", mu - 0.1)
    assert main([*command, "--low", str(tmp_path / "low.npy"), "--high=-1e-1", "--seed", "3"]) == 1
    assert "low: " in capsys.readouterr().err
    assert main([*command, "--low", str(tmp_path / "low.npy"), "--high", "2", "--seed", "3"]) == 0
    np.testing.assert_array_equal(
        np.load(tmp_path / "x.npy"), cuops.sample_normal(mu, 1.0, 17, seed=3, low=mu - 0.1, high=2.0)
    )
    np.save(tmp_path / "sigma.npy", np.stack([sigma, 2 * sigma]))
    assert main([*command, "--sigma", str(tmp_path / "sigma.npy"), "--seed", "3"]) == 0
    np.testing.assert_array_equal(
        np.load(tmp_path / "x.npy"), cuops.sample_normal(mu, np.stack([sigma, 2 * sigma]), 17, seed=3)
    )
    assert main([*command, "--start", str(2**44 - 5)]) == 1
    assert "start: expected an integer from 0 to" in capsys.readouterr().err
    for sigma, says in (("-1", "sigma: "), ("1,5", "--sigma: expected a number or the name of a file, got 1,5")):
        assert main([*command, "--sigma", sigma]) == 1
        assert says in capsys.readouterr().err
    assert main([*command, "--num-samples", "-1"]) == 1
    assert "--num-samples: expected at least 0, got -1" in capsys.readouterr().err


def test_noise_is_shared_where_that_is_asked_for(tmp_path):
    np.save(tmp_path / "mu.npy", np.zeros(5))
    files = [str(tmp_path / name) for name in ("mu.npy", "x.npy")]
    assert main(["run", "sample_normal", *files, "--num-samples", "4", "--shared-noise"]) == 0
    x = np.load(tmp_path / "x.npy")
    assert (x == x[:, :1]).all()


def test_more_samples_than_there_are_counters_are_refused(tmp_path, capsys):
    np.save(tmp_path / "mu.npy", np.zeros(1))
    files = [str(tmp_path / name) for name in ("mu.npy", "x.npy")]
    assert main(["run", "sample_normal", *files, f"--num-samples={1 << 45}"]) == 1
    assert "num_samples: expected an integer from 0 to" in capsys.readouterr().err


def test_means_of_bfloat16(tmp_path):
    mu, sigma = torch.linspace(-1, 1, 8, dtype=torch.bfloat16), np.full(8, 0.5, np.float32)
    save_file({"mu": mu}, tmp_path / "mu.safetensors")
    np.save(tmp_path / "sigma.npy", sigma)
    files = [str(tmp_path / name) for name in ("mu.safetensors", "x.safetensors", "sigma.npy")]
    assert main(["run", "sample_normal", *files[:2], "--num-samples", "6", "--sigma", files[2]]) == 0
    want = cuops.sample_normal(mu, torch.from_numpy(sigma), 6, seed=0)
    torch.testing.assert_close(load_file(files[1])["mu"], want)


@pytest.mark.parametrize(
    ("options", "chunk", "counts"),
    [
        ([], 40, [4, 4, 2]),
        (["--antithetic"], 80, [8, 2]),
        (["--start", "3"], 40, [1, 4, 4, 1]),
        ([], 30, [1] * 10),  # four are more than four chunks
    ],
    ids=str,
)
def test_chunks_are_of_whole_groups_of_samples(tmp_path, monkeypatch, options, chunk, counts):
    np.save(tmp_path / "mu.npy", np.zeros(5))
    monkeypatch.setattr(operands, "CHUNK_BYTES", chunk)
    drawn, draw = [], cuops.sample_normal
    monkeypatch.setattr(
        cuops, "sample_normal", lambda mu, **given: drawn.append(given["num_samples"]) or draw(mu, **given)
    )
    files = [str(tmp_path / name) for name in ("mu.npy", "x.npy")]
    assert main(["run", "sample_normal", *files, "--num-samples", "10", *options]) == 0
    assert drawn == [0, *counts]
    given = {"antithetic": "--antithetic" in options, "start": 3 if "--start" in options else 0}
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), draw(np.zeros(5), 1.0, 10, seed=0, **given))
