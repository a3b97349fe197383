"""Derived from cuda.toml; change that, then run `nox -s regenerate`."""

# The CUDA version that a driver must know to run a backend, from the oldest to the newest backend.
LEAST_DRIVER = {
    "cu118": (11, 0),
    "cu121": (12, 0),
    "cu128": (12, 0),
    "cu130": (13, 0),
}
