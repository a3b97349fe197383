"""Learns to play Tetris: the Cross-Entropy Method on the weights of eight features, each policy judged by whole games.

python examples/tetris/train.py             10x10, less than a minute on an H200
python examples/tetris/train.py --height 20 --pieces 100000

It needs a CUDA GPU and PyTorch 2.8 or newer. Source: Szita and Lőrincz, Learning Tetris Using the Noisy Cross-Entropy Method,
2006; Thiery and Scherrer, Improvements on Learning Tetris with Cross Entropy, 2009.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import draw
import game
import matplotlib.pyplot as plt
import torch
from cuops import cem
from simulator import Games
from tqdm import tqdm

FRESH = 1 << 24  # seeds of games that no training sees start here


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--height", type=int, default=10)
    parser.add_argument("--policies", type=int, default=100, help="in each step")
    parser.add_argument("--games", type=int, default=64, help="of each policy in each step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pieces", type=int, default=20_000, help="after which a game of the training ends")
    parser.add_argument("--evaluate", type=int, default=1000, help="how many fresh games judge the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="play with the weights of this file instead of learning some")
    parser.add_argument("--output", type=Path, default=Path("tetris"), help="a folder for weights, plot and picture")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA GPU, which the games need")
    return options


def fresh_games(weights: torch.Tensor, options: argparse.Namespace, games: int) -> torch.Tensor:
    """The lines of games that are new to the policy."""
    return Games(1, games, options.width, options.height, FRESH + options.seed).play(weights).double()[0]


def train(options: argparse.Namespace) -> torch.Tensor:
    """The weights that the search ends with: the mean of its distribution, which no lucky game has chosen."""
    curve: list[tuple[float, float]] = []

    def score(weights: torch.Tensor) -> torch.Tensor:
        seed = options.seed + (len(curve) + 1) * 7919  # other games in each step
        games = Games(options.policies, options.games, options.width, options.height, seed)
        return games.play(weights, options.pieces).double().mean(1)

    def report(method: cem.CrossEntropyMethod, history: cem.History) -> None:
        mean = fresh_games(method.mu, options, 512).mean().item()
        curve.append((float(history.elite_mean[-1]), mean))
        if len(curve) % 5 == 0:
            tqdm.write(f"step {len(curve):3d}: elites {curve[-1][0]:7.0f} lines, mean policy {mean:7.0f} lines")

    found = cem.maximize(
        score,
        torch.zeros(len(game.FEATURES), device="cuda"),
        10.0,
        options.policies,
        steps=options.steps,
        elites=0.15,
        smoothing=(1.0, 0.7),
        noise=4.0,
        noise_decrease=4.0 / (0.6 * options.steps),
        seed=options.seed,
        callbacks=report,
        progress=True,
    )
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([mean for _, mean in curve], label="mean policy, 512 fresh games")
    axes.plot([elites for elites, _ in curve], label="mean of the elites, as they were judged")
    axes.set(xlabel="step", ylabel="lines", yscale="symlog")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(options.output / "curve.png")
    return found.mu


def main() -> None:
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if options.weights:
        weights = torch.tensor(list(json.loads(options.weights.read_text()).values()))
    else:
        weights = train(options)
        print(f"learned in {time.perf_counter() - started:.0f} s")
        named = dict(zip(game.FEATURES, weights.tolist(), strict=True))
        (options.output / "weights.json").write_text(json.dumps(named, indent=2) + "\n")
    for name, policy in (("learned", weights), ("BCTS", torch.tensor(game.BCTS))):
        lines = fresh_games(policy, options, options.evaluate)
        error = lines.std().item() / options.evaluate**0.5
        print(f"{name}: {lines.mean().item():.0f} ± {error:.0f} lines, the mean of {options.evaluate} fresh games")
    shown = draw.animate(options.output / "game.gif", weights.tolist(), options.width, options.height)
    print(f"wrote {options.output}: weights, curve, and a game of {shown.pieces} pieces and {shown.lines} lines")


if __name__ == "__main__":
    main()
