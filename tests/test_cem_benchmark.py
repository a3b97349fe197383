"""The benchmark of the Cross-Entropy Method, as far as the CPU can run it."""

import json
import re

import torch

from benchmarks import cem
from benchmarks.__main__ import main


def test_a_run_leaves_a_table_and_json_and_names_what_failed(tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise RuntimeError("not of this size")

    monkeypatch.setattr(cem, "CASES", [(1, 40, 3), (2, 40, 3)])
    monkeypatch.setattr(cem, "IMPLEMENTATIONS", {"cuops": cem.ours, "torch": cem.plain, "EvoTorch": fails})
    assert main(["cem", "--device", "cpu", "--quick", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "cem.json").read_text())
    assert written["provenance"]["quick"] is True
    records = written["sections"]["step"]
    assert [record["shape"] for record in records] == [[1, 40, 3], [2, 40, 3]]
    for record in records:
        assert record["results"]["cuops"]["us"] > 0
        assert record["results"]["EvoTorch"] == {"failure": "RuntimeError: not of this size"}
    printed = capsys.readouterr().out
    assert re.search(r"^2x40x3 +cuops +[\d.]+ +1.0x +[\d.]+ +1.0x$", printed, re.MULTILINE)
    assert "EvoTorch at 2x40x3: RuntimeError: not of this size" in printed


def test_the_plain_step_is_that_of_cuops():
    """So that both are measured at the same work."""
    torch.manual_seed(0)
    mu, sigma = torch.zeros(1, 3), torch.ones(1, 3)
    cem.advance(mu, sigma, 50)
    torch.manual_seed(0)
    x = torch.randn(1, 50, 3)
    method = cem.CrossEntropyMethod(torch.zeros(1, 3), 1.0, 50, elites=cem.FRACTION, smoothing=(1.0, 0.6))
    method.ask()[...] = x
    method.tell(cem.norm(x))
    assert torch.allclose(method.mu, mu, atol=1e-6)
    assert torch.allclose(method.sigma, sigma, atol=1e-6)
