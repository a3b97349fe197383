"""The project's benchmarks, a module an operator: `python -m benchmarks rms_norm`."""
