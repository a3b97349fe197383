"""RMSNorm of NumPy arrays: through the GPU in chunks where there is one, on the CPU elsewhere."""

import cuops
import numpy as np

x = np.random.default_rng(0).standard_normal((4096, 1024), dtype=np.float32)
weight = np.ones(1024, dtype=np.float32)

y = cuops.rms_norm(x, weight)
cuops.rms_norm_(x, weight)  # in place
print(np.abs(x - y).max(), np.sqrt(np.mean(np.square(x))))
