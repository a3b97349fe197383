"""Sizes of what lies between the factors of a Kronecker product."""

from __future__ import annotations

import math
from collections.abc import Sequence


def elements_between(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Of a row: elements of x, and of what factors of these sizes make of it, the first one first."""
    between = [math.prod([i for _, i in sizes])]
    for o, i in sizes:
        between.append(between[-1] // max(i, 1) * o)  # of empty factors nobody needs it
    return between
