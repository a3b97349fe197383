"""Derived from cuda.toml; change that, then run `nox -s regenerate`."""

# The CUDA version that a driver must know to run a backend, from the oldest to the newest backend.
LEAST_DRIVER = {
    "cu118": (11, 0),
    "cu121": (12, 0),
    "cu128": (12, 0),
    "cu130": (13, 0),
}

# The compute capabilities that it has machine code for (75 is 7.5), and that of its PTX.
CODE = {
    "cu118": ((50, 60, 70, 75, 80, 86, 89, 90), 90),
    "cu121": ((50, 60, 70, 75, 80, 86, 89, 90), 90),
    "cu128": ((70, 75, 80, 86, 89, 90, 100, 120), 120),
    "cu130": ((75, 80, 86, 89, 90, 100, 110, 120), 120),
}
