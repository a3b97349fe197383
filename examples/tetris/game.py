"""Tetris in plain Python: the rules, the features, and policies that are linear in them. The kernel plays the same games.

Pieces come uniformly at random. One may be put into any column in any rotation, and falls straight down from there. Where
none of these places it wholly on the board, the game is over. Features are those of Thiery and Scherrer, Building
Controllers for Tetris, 2009, of the board after the piece has come to rest and complete lines are gone.
"""

from __future__ import annotations

import dataclasses

FEATURES = (
    "landing height",  # of the middle of the piece; 1 on the floor for a piece of height 1
    "eroded cells",  # complete lines, times the cells of the piece in them
    "row transitions",  # between full and empty neighbours of a row; walls are full
    "column transitions",  # likewise of a column; the floor is full, and empty is what is above
    "holes",  # empty cells with a full one above
    "cumulative wells",  # 1 + 2 + ... down each column of open cells between full neighbours
    "hole depth",  # full cells above each hole
    "rows with holes",
)
# The weights of Thiery and Scherrer's BCTS, which won the Reinforcement Learning Competition of 2008.
BCTS = (-12.63, 6.60, -9.22, -19.77, -13.08, -10.49, -1.61, -24.04)

SHAPES = (("####",), ("##", "##"), (".#.", "###"), (".##", "##."), ("##.", ".##"), ("#..", "###"), ("..#", "###"))
COLORS = ("#00b8d4", "#ffd600", "#aa00ff", "#00c853", "#d50000", "#2962ff", "#ff6d00")
MOST_PLACEMENTS = 34


def rotations(shape: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The different rotations of a shape."""
    found: list[tuple[str, ...]] = []
    for _ in range(4):
        if shape not in found:
            found.append(shape)
        shape = tuple("".join(column) for column in zip(*shape[::-1], strict=True))
    return found


def placements(piece: int, width: int) -> list[tuple[int, ...]]:
    """Every way to put a piece into the columns: its rows from the bottom up, as bit masks."""
    return [
        tuple(sum(1 << (column + i) for i, cell in enumerate(row) if cell == "#") for row in reversed(shape))
        for shape in rotations(SHAPES[piece])
        for column in range(width - len(shape[0]) + 1)
    ]


def mix(z: int) -> int:
    """SplitMix64's way to scatter 64 bits."""
    mask = (1 << 64) - 1
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def piece_of(seed: int, game: int, turn: int) -> int:
    """The piece of a game that comes after `turn` others."""
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15
    return (mix((mix((seed + game * step) & mask) + turn * step) & mask) >> 32) * 7 >> 32


@dataclasses.dataclass
class Game:
    """A board, as bit masks of its rows from the floor up, and what has happened on it."""

    width: int
    height: int
    rows: list[int] = dataclasses.field(default_factory=list)
    lines: int = 0
    pieces: int = 0

    def __post_init__(self) -> None:
        self.rows = self.rows or [0] * self.height

    def rest(self, placement: tuple[int, ...]) -> int | None:
        """The row that the bottom of the piece comes to rest in; None where the piece is not wholly on the board then."""
        y = self.height
        while y > 0 and not any(
            self.rows[y - 1 + i] & mask for i, mask in enumerate(placement) if y - 1 + i < self.height
        ):
            y -= 1
        return y if y + len(placement) <= self.height else None

    def after(self, placement: tuple[int, ...], y: int) -> tuple[list[int], int, int]:
        """The rows once the piece has come to rest, the complete lines among them, the cells of the piece in these."""
        full = (1 << self.width) - 1
        rows = list(self.rows)
        for i, mask in enumerate(placement):
            rows[y + i] |= mask
        lines = [r for r, row in enumerate(rows) if row == full]
        eroded = sum(placement[r - y].bit_count() for r in lines)
        rows = [row for row in rows if row != full]
        return rows + [0] * len(lines), len(lines), eroded

    def features(self, placement: tuple[int, ...], y: int) -> list[float]:
        """The features in the order of FEATURES."""
        rows, lines, eroded = self.after(placement, y)
        columns = range(self.width)

        def cell(r: int, c: int) -> bool:
            if r < 0 or c < 0 or c >= self.width:
                return True
            return r < self.height and bool(rows[r] >> c & 1)

        row_transitions = sum(cell(r, c) != cell(r, c - 1) for r in range(self.height) for c in range(self.width + 1))
        column_transitions = sum(cell(r, c) != cell(r - 1, c) for r in range(self.height + 1) for c in columns)
        above = {
            (r, c): sum(cell(i, c) for i in range(r + 1, self.height)) for r in range(self.height) for c in columns
        }
        holes = [(r, c) for r, c in above if not cell(r, c) and above[r, c]]
        wells = 0
        for c in columns:
            deep = 0
            for r in reversed(range(self.height)):
                is_well = not cell(r, c) and not above[r, c] and cell(r, c - 1) and cell(r, c + 1)
                deep = deep + 1 if is_well else 0
                wells += deep
        return [
            y + (len(placement) + 1) / 2, lines * eroded, row_transitions, column_transitions, len(holes), wells,
            sum(above[hole] for hole in holes), len({r for r, _ in holes}),
        ]  # fmt: skip

    def play(self, piece: int, weights: tuple[float, ...]) -> tuple[tuple[int, ...], int] | None:
        """Makes the best placement of the piece, the first of equals, and returns it; None where the game is over."""
        best, chosen = -float("inf"), None
        for placement in placements(piece, self.width):
            y = self.rest(placement)
            if y is None:
                continue
            value = sum(w * f for w, f in zip(weights, self.features(placement, y), strict=True))
            if chosen is None or value > best:
                best, chosen = value, (placement, y)
        if chosen is not None:
            self.rows, lines, _ = self.after(*chosen)
            self.lines += lines
            self.pieces += 1
        return chosen
