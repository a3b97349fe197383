"""What a run leaves: a table on the terminal, JSON that says where the figures are from, and a plot."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import _backend, _driver, errors

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "cuops",
    "quack-kernels",
    "pyfastkron",
    "evotorch",
    "liger-kernel",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


def _commit() -> str | None:
    """CUOPS_COMMIT, or that of cuops's checkout in the working directory; a + says that it has uncommitted changes."""
    given = os.environ.get("CUOPS_COMMIT")
    if given:
        return given
    top = _git("rev-parse", "--show-toplevel")
    if top is None or not Path(top, "packages/cuops").is_dir():
        return None  # that of another project says nothing of cuops
    commit = _git("rev-parse", "--verify", "HEAD")
    sources = (":(top)", ":(top,exclude)benchmarks/results")  # an earlier run's results change no measurement
    return commit and commit + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", *sources) else "")


def _git(*command: str) -> str | None:
    """What git prints, if it is there and succeeds."""
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    """The name of this machine's processor, where it says one."""
    try:
        said = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        said = ""
    named = re.search(r"^model name\s*:\s*(.+)$", said, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def provenance(
    device: str,
    quick: bool,
    without: Sequence[str] = (),
    shapes: Iterable[Sequence[int]] | None = None,
    dtypes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Device, driver, versions and commit of a run, and what it was asked for; None are standard shapes and dtypes."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "quick": quick,
        "without": sorted(without),
        "shapes": None if shapes is None else ["x".join(map(str, shape)) for shape in shapes],
        "dtypes": None if dtypes is None else list(dtypes),
    }
    if device == "cpu":
        facts["threads"] = torch.get_num_threads()
    if device == "cuda":
        facts["driver"] = _driver.release()
        facts["driver_cuda"] = ".".join(str(part) for part in _driver.cuda_version())
        facts["torch_cuda"] = torch.version.cuda
        try:
            facts["backend"] = _backend.choose().name
        except errors.CuopsError as error:
            facts["backend"] = f"none: {error}".splitlines()[0]
    return facts


def headline(facts: dict[str, Any]) -> str:
    """Where something was measured, and of which versions."""
    versions = (f"{name} {version}" for name, version in facts["versions"].items())
    return ", ".join([facts["device"], *versions, *([f"commit {facts['commit']}"] if facts["commit"] else [])])


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, the first to the left and the others to the right."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


BEYOND_ROOF = 2  # times the speed of memory, which no kernel has
DOUBT = (
    "these times are not to be relied on, as some are beyond the roof: something else kept the device busy; "
    "on a CPU, OMP_NUM_THREADS=1 helps"
)
FOOTNOTE = (
    "roof: this device's own copy, or fill, of as many bytes; "
    "to best peer: cuops's time / the fastest other's, below 1 is faster"
)


def comparison(records: Sequence[dict[str, Any]]) -> str:
    """Microseconds and the fraction of the roof, a row a case and a column an implementation."""
    names = list(dict.fromkeys(name for record in records for name in record["results"]))
    rows = []
    for record in records:
        row = [f"{record['dtype']} {'x'.join(map(str, record['shape']))}", f"{record['roof_us']:.1f}"]
        for name in names:
            result = record["results"].get(name, {})
            row.append(f"{result['us']:.1f} {result['of_roof']:.2f}" if "us" in result else "fails" if result else "")
        rows.append([*row, f"{record['to_best_peer']:.3f}" if "to_best_peer" in record else ""])
    text = table(["µs, fraction of the roof", "roof", *names, "to best peer"], rows)
    failures = {(name, r["failure"]) for record in records for name, r in record["results"].items() if "failure" in r}
    ratios = [result["of_roof"] for r in records for result in r["results"].values() if "of_roof" in result]
    doubts = [DOUBT] if max(ratios, default=0) > BEYOND_ROOF else []
    return "\n".join([text, FOOTNOTE, *doubts, *(f"{name} fails: {why}" for name, why in sorted(failures))])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` so that readers see the old file or the new one whole; what is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.part")
    try:
        with _naming(path):
            scratch.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Has errors name the file, which those of a full disk do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _finite(content: Any) -> Any:
    """The content with None for each number that JSON does not have."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def earlier_sections(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run left there, if it was of the same commit, versions and arguments on the same device.

    Two runs with uncommitted changes, or of unknown commits, may be of different sources.
    """
    if not path.exists() or (facts["commit"] or "+").endswith("+"):
        return {}
    content = json.loads(path.read_text())
    then, now = ({**provenance, "date": None} for provenance in (content["provenance"], facts))
    return dict(content["sections"]) if then == now else {}


def plot(path: Path, sections: dict[str, Sequence[dict[str, Any]]], title: str, roof: str) -> None:
    """Bars of the fraction of the roof, a panel a section; `roof` names it: copy or fill."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tallest = max(len(records) for records in sections.values())
    figure, axes = plt.subplots(
        1, len(sections), figsize=(7.5 * len(sections), 1.5 + 0.62 * tallest), squeeze=False, layout="constrained"
    )
    for axis, (name, records) in zip(axes[0], sections.items(), strict=True):
        names = list(dict.fromkeys(n for record in records for n in record["results"]))
        height = 0.84 / len(names)
        for i, implementation in enumerate(names):
            values = [record["results"].get(implementation, {}).get("of_roof", 0) for record in records]
            places = [row + (i - (len(names) - 1) / 2) * height for row in range(len(records))]
            color = "#76b900" if implementation == "cuops" else plt.get_cmap("Greys")(0.75 - 0.5 * i / len(names))
            axis.barh(places, values, height, label=implementation, color=color)
        axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(
            range(len(records)), [f"{record['dtype']} {'x'.join(map(str, record['shape']))}" for record in records]
        )
        axis.margins(y=0.01)
        axis.invert_yaxis()
        axis.set(title=name, xlabel=f"time of a device {roof} of the same bytes / time (1 = as fast as memory)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
