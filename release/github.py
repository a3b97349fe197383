"""Says on GitHub what was done, by its own command line: a release with its files, or results as a comment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from . import ReleaseError, arguments, cut, wheels

MOST_CHARACTERS = 125_000  # that GitHub takes as the text of a release


def gh(*words: str, text: str = "") -> None:
    """Runs GitHub's command line, which reads GH_TOKEN; `text` goes to its input."""
    try:
        done = subprocess.run(["gh", *words], input=text, text=True, check=False)
    except FileNotFoundError:
        raise ReleaseError("GitHub's command line is not here: apt-get install gh") from None
    if done.returncode:
        raise ReleaseError(f"gh {' '.join(words[:2])} failed")


def exists(tag: str) -> bool:
    """Whether GitHub has a release of the tag."""
    return (
        shutil.which("gh") is not None
        and not subprocess.run(["gh", "release", "view", tag], capture_output=True, check=False).returncode
    )


def shortened(text: str, tag: str) -> str:
    """The text of a release, or as many of its lines as GitHub takes."""
    if len(text) <= MOST_CHARACTERS:
        return text
    end = text.rfind("\n", 0, MOST_CHARACTERS - 100)
    return f"{text[:end]}\n\nThe rest is in CHANGELOG.md of {tag}.\n"


def release(tag: str, folder: Path) -> None:
    """A GitHub release of a tag, with its part of the changelog, the wheels and their digests."""
    wheels.check_sums(folder)
    if wheels.one_version(folder) != tag.removeprefix("v"):
        raise ReleaseError(f"{folder} has the wheels of {wheels.one_version(folder)}, not of {tag}")
    text = shortened(cut.notes(Path(cut.CHANGELOG).read_text(), tag.removeprefix("v")), tag)
    files = [str(path) for path in (*wheels.files(folder), folder / wheels.SUMS)]
    if exists(tag):  # by an earlier run, which may have ended in the middle
        gh("release", "upload", tag, "--clobber", *files)
        gh("release", "edit", tag, "--draft=false", "--notes-file", "-", text=text)
    else:
        gh("release", "create", tag, "--verify-tag", "--title", tag, "--notes-file", "-", *files, text=text)


def comparison(folder: Path) -> str:
    """What the benchmarks in a folder measured, as Markdown."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not content.keys() >= {"operator", "provenance", "sections"}:
            raise ReleaseError(f"{path} is no result of a benchmark")
        measured = [record for section in content["sections"].values() for record in section if "results" in record]
        names = list(dict.fromkeys(name for record in measured for name in record["results"]))
        facts = content["provenance"]
        lines += [f"### {path.stem} on {facts['device']}, commit {facts['commit']}", ""]
        lines += [f"| microseconds | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
        for record in measured:
            case = f"{record['kind']} {record['dtype']} {'x'.join(map(str, record['shape']))}"
            times = (record["results"].get(name, {}).get("us") for name in names)
            lines.append(f"| {case} | {' | '.join('-' if time is None else f'{time:.1f}' for time in times)} |")
        lines.append("")
    if not lines:
        raise ReleaseError(f"{folder} has no results")
    return "\n".join(lines)


def main() -> None:
    """The command line of `nox -s github`."""
    options = arguments.github().parse_args()
    try:
        if options.kind == "release":
            release(options.tag, options.path)
        else:
            text = comparison(options.path)
            gh("pr", "comment", options.pull_request, "--edit-last", "--create-if-none", "--body-file", "-", text=text)
    except ReleaseError as error:
        sys.exit(f"github: {error}")


if __name__ == "__main__":
    main()
