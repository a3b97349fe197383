"""A game of Tetris as an animated picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import game
from PIL import Image, ImageDraw

CELL = 16
EMPTY, FIXED, GRID = "#101418", "#78909c", "#1c2329"


def picture(rows: Sequence[int], width: int, piece: int | None, placement: tuple[int, ...], y: int) -> Image.Image:
    """One frame: the board, and the piece at rest on it."""
    image = Image.new("RGB", (width * CELL, len(rows) * CELL), EMPTY)
    draw = ImageDraw.Draw(image)
    for r, row in enumerate(rows):
        mine = placement[r - y] if 0 <= r - y < len(placement) else 0
        for c in range(width):
            color = game.COLORS[piece] if mine >> c & 1 and piece is not None else FIXED if row >> c & 1 else GRID
            left, top = c * CELL, (len(rows) - 1 - r) * CELL
            draw.rectangle((left + 1, top + 1, left + CELL - 2, top + CELL - 2), fill=color)
    return image


def animate(
    path: Path, weights: Sequence[float], width: int, height: int, pieces: int = 300, seed: int = 0
) -> game.Game:
    """Plays a game of at most so many pieces and writes it to `path`, two frames a piece; returns it."""
    played = game.Game(width, height)
    frames = []
    for turn in range(pieces):
        piece = game.piece_of(seed, 0, turn)
        before = list(played.rows)
        move = played.play(piece, tuple(weights))
        if move is None:
            break
        frames.append(picture(before, width, piece, *move))
        frames.append(picture(played.rows, width, None, (), 0))
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[120, 60] * (len(frames) // 2), loop=0)
    return played
