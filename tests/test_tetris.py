"""The Tetris of the examples: rules and features against boards drawn by hand, the kernel against plain Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples/tetris"
WEIGHTS = (-12.5, 6.5, -9.25, -19.75, -13.0, -10.5, -1.5, -24.0)  # sums of which float32 holds exactly


@pytest.fixture
def game(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import game

    return game


@pytest.fixture
def simulator(game):
    import simulator

    return simulator


def board(game, *rows):
    """A game at this board, drawn from the top."""
    masks = [sum(1 << c for c, cell in enumerate(row) if cell == "#") for row in reversed(rows)]
    return game.Game(len(rows[0]), len(rows), masks)


def test_pieces_have_their_rotations_and_columns(game):
    assert [len(game.rotations(shape)) for shape in game.SHAPES] == [2, 1, 4, 2, 2, 4, 4]
    assert [len(game.placements(piece, 10)) for piece in range(7)] == [17, 9, 34, 17, 17, 34, 34]
    for piece in range(7):
        for placement in game.placements(piece, 10):
            assert sum(row.bit_count() for row in placement) == 4
            assert max(placement) < 1 << 10


def test_pieces_are_uniform_and_differ_between_games_and_seeds(game):
    drawn = [game.piece_of(1, 0, turn) for turn in range(7000)]
    # Binomial counts of mean 1000 have a standard deviation of 29.
    assert all(abs(drawn.count(piece) - 1000) < 5 * 29 for piece in range(7))
    for other in (
        [game.piece_of(1, 1, turn) for turn in range(7000)],
        [game.piece_of(2, 0, turn) for turn in range(7000)],
    ):
        same = sum(a == b for a, b in zip(drawn, other, strict=True))
        assert abs(same - 1000) < 5 * 29


def test_a_piece_falls_until_something_is_below_it(game):
    at = board(game, "....", "....", "#...", "##..")
    assert at.rest((0b0011,)) == 2
    assert at.rest((0b1100,)) == 0
    assert at.rest((0b0110,)) == 1
    assert at.rest((0b0001, 0b0011)) == 2  # two high, on a pile of two
    assert at.rest((0b0001, 0b0001, 0b0001)) is None  # not wholly on the board
    assert at.rest((0b0110, 0b0011)) == 1  # overhangs the pile


def test_complete_lines_go_and_what_is_above_comes_down(game):
    at = board(game, "....", "#...", "##.#", "##.#")
    rows, lines, eroded = at.after((0b0100, 0b0100), 0)
    assert rows == board(game, "....", "....", "....", "#...").rows
    assert (lines, eroded) == (2, 2)


def test_features_of_a_board_drawn_by_hand(game):
    at = board(game, ".....", ".....", "##..#", "#.#.#", "#.#.#")
    # An upright bar of two in the fourth column makes:  .....  .....  ##..#  #.###  #.###
    features = dict(zip(game.FEATURES, at.features((0b01000, 0b01000), 0), strict=True))
    assert features["landing height"] == 1.5
    assert features["eroded cells"] == 0
    assert features["row transitions"] == 2 + 2 + 2 + 2 + 2  # two empty rows; one gap in each of the others
    assert features["column transitions"] == 1 + 3 + 1 + 1 + 1  # five tops, and the floor and the lid of a hole
    assert features["holes"] == 2
    assert features["hole depth"] == 2
    assert features["rows with holes"] == 2
    assert features["cumulative wells"] == 0
    deep = dict(zip(game.FEATURES, at.features((0b00001,), 3), strict=True))
    assert deep["cumulative wells"] == 1 + 2  # the fourth column, between full cells in two rows
    assert deep["landing height"] == 4


def test_eroded_cells_are_lines_times_the_piece_s_cells_in_them(game):
    at = board(game, "....", "....", "##.#", "##.#")
    features = dict(zip(game.FEATURES, at.features((0b0100, 0b0100, 0b0110), 0), strict=True))
    assert features["eroded cells"] == 2 * 2
    assert features["row transitions"] == 3 * 2 + 4  # three empty rows, and .##.


def test_the_first_of_equal_placements_is_made_and_a_full_board_ends_the_game(game):
    empty = game.Game(10, 10)
    placement, y = empty.play(0, (0.0,) * 8)
    assert (placement, y) == (game.placements(0, 10)[0], 0)
    assert board(game, "#.##", "#.##", ".###", "#.##").play(1, WEIGHTS) is None


def test_a_game_is_drawn(game, tmp_path):
    import draw
    from PIL import Image

    played = draw.animate(tmp_path / "game.gif", game.BCTS, 6, 8, pieces=12, seed=3)
    with Image.open(tmp_path / "game.gif") as picture:
        assert picture.size == (6 * draw.CELL, 8 * draw.CELL)
        assert picture.n_frames > 12
    assert played.pieces == 12


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "height"), [(10, 10), (10, 20), (6, 8), (4, 12)])
def test_the_kernel_plays_the_games_of_plain_python(game, simulator, width, height):
    import torch

    games = simulator.Games(2, 3, width, height, seed=5)
    policies = (WEIGHTS, tuple(0.5 * w for w in game.BCTS[::-1]))
    policies = (policies[0], tuple(round(4 * w) / 4 for w in policies[1]))
    games.play(torch.tensor(policies), 60)
    lines = games.play(torch.tensor(policies), 60).reshape(-1)  # goes on where it stopped
    for k in range(6):
        plain = game.Game(width, height)
        while plain.pieces < 120 and plain.play(game.piece_of(5, k, plain.pieces), policies[k // 3]) is not None:
            pass
        assert [int(row) for row in games.boards[k]] == plain.rows
        assert (int(lines[k]), int(games.pieces[k]), bool(games.over[k])) == (
            plain.lines,
            plain.pieces,
            plain.pieces < 120,
        )


@pytest.mark.gpu
def test_bcts_reaches_what_is_known_of_it(game, simulator):
    import torch

    lines = simulator.Games(1, 8192, seed=11).play(torch.tensor(game.BCTS)).double()
    # Lengths of games have nearly their mean for a standard deviation, so 8192 games give it to 1.1 %.
    assert abs(lines.mean().item() / 3930 - 1) < 0.05 + 3 * 0.011


@pytest.mark.gpu
def test_training_learns_and_leaves_its_files(game, tmp_path):
    command = [
        sys.executable,
        FOLDER / "train.py",
        "--height=8",
        "--policies=64",
        "--games=16",
        "--steps=12",
        "--output",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    learned, bcts = (
        float(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines() if "fresh games" in line
    )
    assert learned > bcts / 10  # where random weights clear hardly a line
    assert set(json.loads((tmp_path / "weights.json").read_text())) == set(game.FEATURES)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "game.gif").read_bytes().startswith(b"GIF")
