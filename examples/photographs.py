"""Photographs through `cuops run`: every line of pixels is a row. Checks the result against the definition."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_sample_images

photographs = np.stack(load_sample_images().images)
rows = photographs.reshape(-1, photographs.shape[2] * 3).astype(np.float32)
with tempfile.TemporaryDirectory() as folder:
    source, target = Path(folder, "photographs.npy"), Path(folder, "normed.npy")
    np.save(source, rows)
    subprocess.run([sys.executable, "-m", "cuops", "run", "rms_norm", source, target], check=True)
    y = np.load(target)

wide = rows.astype(np.float64)
exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
error = np.abs(y - exact).max() / np.abs(exact).max()
print(f"{len(rows)} rows of {rows.shape[1]} values from {len(photographs)} photographs: error {error:.1e}")
sys.exit(int(error > 1e-6))
