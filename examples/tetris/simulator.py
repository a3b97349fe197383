"""Many games of Tetris at once on a GPU, each to its end, by the kernel in tetris.cu."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import game
import torch
from torch.utils import cpp_extension


@functools.cache
def kernel(width: int, height: int) -> Any:
    """Compiled when it is needed, by the NVRTC that PyTorch brings along: no toolkit, and nothing to install."""
    # PyTorch asks for the toolkit's headers, of which the kernel needs none: any folder will do.
    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or str(Path(__file__).parent)
    source = (Path(__file__).parent / "tetris.cu").read_text()
    options = ["-std=c++17", f"-DWIDTH={width}", f"-DHEIGHT={height}"]
    return torch.cuda._compile_kernel(source, "play", nvcc_options=options)


@functools.cache
def placement_table(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(7, 34, 2): rows of 16 bits and height of each placement; (7,): how many a piece has."""
    table = torch.zeros(7, game.MOST_PLACEMENTS, 2, dtype=torch.int64)
    counts = torch.zeros(7, dtype=torch.int32)
    for piece in range(7):
        choices = game.placements(piece, width)
        counts[piece] = len(choices)
        for i, rows in enumerate(choices):
            table[piece, i, 0] = sum(row << 16 * r for r, row in enumerate(rows))
            table[piece, i, 1] = len(rows)
    return table.cuda(), counts.cuda()


class Games:
    """Games of several policies; those of one policy are together."""

    def __init__(self, policies: int, games_each: int, width: int = 10, height: int = 10, seed: int = 0) -> None:
        if not 4 <= width <= 10 or not 4 <= height <= 31:
            raise ValueError(f"expected a width from 4 to 10 and a height from 4 to 31, got {width} and {height}")
        games = policies * games_each
        self.policies, self.games_each, self.width, self.height, self.seed = policies, games_each, width, height, seed
        self.boards = torch.zeros(games, height, dtype=torch.int16, device="cuda")
        self.lines = torch.zeros(games, dtype=torch.int32, device="cuda")
        self.pieces = torch.zeros(games, dtype=torch.int32, device="cuda")
        self.over = torch.zeros(games, dtype=torch.uint8, device="cuda")

    def play(self, weights: torch.Tensor, pieces: int = 2**31 - 1) -> torch.Tensor:
        """Goes on to the ends, or for so many pieces; returns the lines by then, (policies, games_each).

        weights: (policies, 8), the policies' values of game.FEATURES.
        """
        weights = weights.to("cuda", torch.float32).reshape(self.policies, len(game.FEATURES)).contiguous()
        games = len(self.lines)
        arguments = [
            weights, *placement_table(self.width), self.boards, self.lines, self.pieces, self.over, games,
            self.games_each, pieces, self.seed,
        ]  # fmt: skip
        kernel(self.width, self.height)(grid=(-(-games // 4), 1, 1), block=(128, 1, 1), args=arguments)
        return self.lines.reshape(self.policies, self.games_each)
