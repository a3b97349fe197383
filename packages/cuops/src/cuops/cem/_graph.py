"""A step of the Cross-Entropy Method as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._arguments import is_tensor
from .._torch import torch
from ._library import mark_written


def capture(method: Any, function: Callable[[Any], Any]) -> Callable[[], None]:
    """What `CrossEntropyMethod.capture` documents."""
    if not is_tensor(method.mu) or not method.mu.is_cuda:
        raise ValueError("capture: expected a method of CUDA tensors")
    if method._population_decay != 1:
        raise ValueError("capture: expected population_decay=1, as a graph has samples of one number")
    with torch.cuda.device(method.mu.device):
        saved = method.state_dict()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    method.tell(function(method.ask()))
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, stream=stream):
                method.tell(function(method.ask()))
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            method.load_state_dict(saved)

    def replay() -> None:
        graph.replay()
        mark_written(method._memory, *method._state.handed_out)
        method._steps += 1
        method._asked, method._evaluated = 0, method.num_samples

    return replay
