"""Measures operators beside their peers: what commands of `cuops` and `python -m benchmarks` share."""

OPERATORS = ("rms_norm", "kron_linear", "sample_normal")
LETTERS = {"float32": "f", "float64": "d", "float16": "h", "bfloat16": "b"}
SHORT_NAMES = {"kron": "kron_linear"}
