"""Measures operators beside their peers: what `cuops bench`, `cuops check` and `python -m benchmarks` share."""

OPERATORS = ("rms_norm", "kron_linear", "sample_normal")
SHORT_NAMES = {"kron": "kron_linear"}
