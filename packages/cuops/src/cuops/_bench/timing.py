"""Time of kernels, and time of calls on the host, kept apart. All times are in microseconds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


class CudaTimer:
    """CUDA events by triton.testing.do_bench, which empties the L2 cache before each call; the median of many calls.

    Calls are captured in a CUDA graph and replayed, so that Python's time does not count.
    """

    def __init__(self, quick: bool = False) -> None:
        self.milliseconds, self.rounds = (10, 1) if quick else (40, 3)
        gc.freeze()  # each capture collects garbage, which takes long after the imports of all peers

    def kernel(self, make: Callable[[], Call], calls: int = 1) -> float:
        """Time on the GPU of the call that `make` returns; of `calls` in a row, divided by their number."""
        from triton.testing import do_bench

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # autograd runs a backward on the stream of its forward
            call = make()
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        milliseconds = do_bench(
            graph.replay, warmup=self.milliseconds // 4, rep=self.milliseconds, return_mode="median"
        )
        return float(milliseconds) * 1e3 / calls

    def direct(self, make: Callable[[], Call]) -> float:
        """Time between the events around a call from Python: for what cannot be captured, and for comparison."""
        from triton.testing import do_bench

        return float(do_bench(make(), warmup=self.milliseconds // 4, rep=self.milliseconds, return_mode="median")) * 1e3

    def host(self, make: Callable[[], Call], calls: int = 300) -> float:
        """Time that a call takes from its caller, the GPU being idle enough to follow."""
        return self._clock(make(), calls, waits=False)

    def in_a_row(self, make: Callable[[], Call]) -> float:
        """Time of a call among a hundred by the clock: Python's, or the GPU's where that takes longer."""
        return self._clock(make(), 100, waits=True)

    def _clock(self, call: Call, calls: int, waits: bool) -> float:
        batches = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if waits:
                torch.cuda.synchronize()
            batches.append((time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
        return statistics.median(batches) * 1e6

    def copy(self, traffic: int, calls: int = 1) -> float:
        """The device's own copy that reads and writes `traffic` bytes in all."""
        source, target = (torch.empty(max(traffic // 2, 1), dtype=torch.uint8, device="cuda") for _ in range(2))
        captured = self.kernel(lambda: lambda: target.copy_(source), calls)
        # A graph copies half a gigabyte and more at two thirds of the speed of a plain call.
        return captured if calls > 1 else min(captured, self.direct(lambda: lambda: target.copy_(source)))

    def fill(self, traffic: int, calls: int = 1, dtype: torch.dtype = torch.float32) -> float:
        """The device's own fill that writes `traffic` bytes, which takes longer where elements have 16 bits."""
        target = torch.empty(max(traffic // dtype.itemsize, 1), dtype=dtype, device="cuda")
        return self.kernel(lambda: target.zero_, calls)

    def release(self) -> None:
        """Gives memory that earlier cases used back to the GPU."""
        torch.cuda.empty_cache()


class CpuTimer:
    """The clock, for runs without a GPU: the least time of a few calls, to which other programs only add."""

    def __init__(self, quick: bool = False) -> None:
        self.repeats, self.seconds, self.rounds = 5 if quick else 15, 0.02 if quick else 0.2, 1

    def kernel(self, make: Callable[[], Call], calls: int = 1) -> float:
        """Time of the call that `make` returns."""
        call = make()
        call()
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(times) < self.repeats or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times) * 1e6

    direct = kernel
    host = kernel
    in_a_row = kernel

    def copy(self, traffic: int, calls: int = 1) -> float:
        """A copy that reads and writes `traffic` bytes in all."""
        source, target = (torch.empty(max(traffic // 2, 1), dtype=torch.uint8) for _ in range(2))
        return self.kernel(lambda: lambda: target.copy_(source))

    def fill(self, traffic: int, calls: int = 1, dtype: torch.dtype = torch.float32) -> float:
        """A fill that writes `traffic` bytes."""
        target = torch.empty(max(traffic // dtype.itemsize, 1), dtype=dtype)
        return self.kernel(lambda: target.zero_)

    def release(self) -> None:
        """Memory of the CPU needs nothing."""


def timer(device: str, quick: bool = False) -> CudaTimer | CpuTimer:
    """The timer for a kind of device, cuda or cpu."""
    return CudaTimer(quick) if device == "cuda" else CpuTimer(quick)
