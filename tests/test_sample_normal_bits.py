"""Samples have the same bits in every run, on every GPU and by every backend: those that are written here."""

import os
import subprocess
import sys

import pytest
from cuops import _backend, _driver

DRAWS = """
import hashlib
import cuops, torch

for bounds in ({}, {"low": -0.5, "high": 2.0}, {"low": 6.0}, {"high": -20.0}, {"low": 1e3}):
    for dtype in ("float64", "float32") if bounds else ("float64", "float32", "float16", "bfloat16"):
        mu = torch.zeros(512, dtype=getattr(torch, dtype), device="cuda")
        x = cuops.sample_normal(mu, 1.0, 4000, seed=7, **bounds)
        print(dtype, bounds, hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16])
"""
DIGESTS = """\
float64 {} 4ab24606884d6359
float32 {} 9da315ca59473db5
float16 {} 048dc3b75ca8c14e
bfloat16 {} ca25b84cc9637090
float64 {'low': -0.5, 'high': 2.0} a06fd4c13f645bff
float32 {'low': -0.5, 'high': 2.0} 892954c6cecd9db6
float64 {'low': 6.0} a8c778c93cd96553
float32 {'low': 6.0} df893bf38af6ed04
float64 {'high': -20.0} d7118a7554da0585
float32 {'high': -20.0} fdb07b35fdeb05df
float64 {'low': 1000.0} 9cd0a4783a3a3d92
float32 {'low': 1000.0} 9886f33b92e9e4af
"""


@pytest.mark.gpu
def test_every_backend_draws_the_bits_of_all():
    usable = [backend.name for backend in _backend.installed() if backend.least_driver <= _driver.cuda_version()]
    assert usable
    for name in usable:
        environment = os.environ | {"CUOPS_BACKEND": name}
        run = subprocess.run(
            [sys.executable, "-c", DRAWS], env=environment, capture_output=True, text=True, check=False
        )
        assert run.stdout == DIGESTS, (name, run.stderr)
