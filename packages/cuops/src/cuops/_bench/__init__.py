"""Measures operators beside their peers: what `cuops bench`, `cuops check` and `python -m benchmarks` share."""

OPERATORS = ("rms_norm", "kron_linear")
SHORT_NAMES = {"kron": "kron_linear"}
