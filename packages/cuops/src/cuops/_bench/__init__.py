"""Measures operators beside their peers: what commands of `cuops` and `python -m benchmarks` share."""

# What a shape is of.
OPERATORS = {
    "rms_norm": "rows (of several sizes their product) and hidden size",
    "kron_linear": "batch size and the size of each factor",
    "sample_normal": "samples and dimension",
}
LETTERS = {"float32": "f", "float64": "d", "float16": "h", "bfloat16": "b"}
SHORT_NAMES = {"kron": "kron_linear"}
