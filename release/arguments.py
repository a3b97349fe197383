"""The arguments of nox sessions; a check holds the workflows to them."""

from __future__ import annotations

import argparse
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
ENGINES = ("docker", "podman", "buildah")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def _folder(text: str) -> Path:
    """A folder that is there, or is to be made."""
    if "://" in text or Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text}")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def _parser(session: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"nox -s {session} --", description=description, allow_abbrev=False)


def plan() -> argparse.ArgumentParser:
    """Of `nox -s plan`."""
    parser = _parser("plan", "What CI has to do for a change.")
    parser.add_argument(
        "base", nargs="?", default="", help="the commit that the change is made to; without it everything"
    )
    return parser


def commits() -> argparse.ArgumentParser:
    """Of `nox -s commits`."""
    parser = _parser("commits", "Checks that the messages of commits are conventional.")
    parser.add_argument("range", nargs="?", default="origin/main..HEAD", help="A..B; by default what main has not")
    return parser


def wheels() -> argparse.ArgumentParser:
    """Of `nox -s wheels`."""
    parser = _parser("wheels", "Builds the core and backends into dist/, and checks them.")
    parser.add_argument("rows", nargs="*", help="rows of cuda.toml; by default all")
    parser.add_argument("--machine", nargs="+", choices=MACHINES)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--cibuildwheel", action="store_true", help="build backends in the stock manylinux image")
    how.add_argument("--built", action="store_true", help="build nothing: check what is in dist/, and write SHA256SUMS")
    return parser


def sanitize() -> argparse.ArgumentParser:
    """Of `nox -s sanitize`; what it does not know goes to pytest."""
    parser = _parser("sanitize", "Runs the GPU tests under compute-sanitizer.")
    parser.add_argument("--tools", nargs="+", choices=SANITIZERS, default=SANITIZERS)
    parser.add_argument("--workers", type=_count, default=1, metavar="N", help="processes; each has memory of the GPU")
    return parser


def nightly() -> argparse.ArgumentParser:
    """Of `nox -s nightly`."""
    parser = _parser("nightly", "Builds, tries and indexes what is new since the last night.")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows of cuda.toml; by default all")
    parser.add_argument("--machine", nargs="+", choices=MACHINES)
    parser.add_argument("--index", type=_folder, default=Path(".cache/nightly"), help="the folder of the index")
    parser.add_argument("--mirror", metavar="URL", help="where the index is published, to go on from it")
    parser.add_argument("--images", action="store_true", help="build the images too")
    return parser


def release() -> argparse.ArgumentParser:
    """Of `nox -s release`."""
    parser = _parser("release", "Makes the changelog, the release commit and the tag.")
    parser.add_argument("--version", default="", help="a higher version than the commits ask for, such as 1.0.0")
    parser.add_argument("--push", metavar="REMOTE", help="push the commit and the tag there, both or none")
    parser.add_argument("--check", metavar="TAG", help="only see whether a tag made by hand can be released")
    return parser


def publish() -> argparse.ArgumentParser:
    """Of `nox -s publish`."""
    parser = _parser("publish", "Uploads the wheels of one release to a package index, all verified before the first.")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="the folder with the wheels of one release")
    parser.add_argument(
        "--index", default="pypi", help="a name that twine knows (pypi, or of ~/.pypirc), or an upload URL"
    )
    parser.add_argument("--simple", metavar="URL", help="where pip reads that index; of pypi it is known")
    parser.add_argument(
        "--attest", action="store_true", help="sign each file with the identity of the workflow that runs this"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        help="rows of cuda.toml, where a release has not all, or not for both processors",
    )
    return parser


def docker() -> argparse.ArgumentParser:
    """Of `nox -s docker`."""
    parser = _parser("docker", "Builds images, tries them, and pushes them.")
    parser.add_argument("--cuda", nargs="+", default=["cu121"], metavar="ROW", help="rows of cuda.toml")
    parser.add_argument("--image", choices=("runtime", "dev"), default="runtime", help="dev is one for all rows")
    parser.add_argument("--base", help="the base image, instead of the Dockerfile's own")
    parser.add_argument("--index", help="the package index to install from, instead of the wheels in dist/")
    parser.add_argument("--dist", type=Path, default=Path("dist"))
    parser.add_argument("--torch", default="", help="a requirement such as torch==2.13.0, to be installed too")
    parser.add_argument("--push", action="store_true")
    parser.add_argument("--registry", metavar="HOST:PORT[/PATH]", help="where to push")
    parser.add_argument("--date", metavar="YYYYMMDD", help="of a nightly's tag; by default today (UTC)")
    parser.add_argument("--engine", choices=ENGINES, help="by default the first of these that works")
    return parser


def github() -> argparse.ArgumentParser:
    """Of `nox -s github`."""
    parser = _parser("github", "Says on GitHub what was done.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, what in (("release", "tag"), ("comment", "pull_request")):
        sub = kinds.add_parser(kind)
        sub.add_argument(what)
        sub.add_argument("path", type=Path, help="the folder with the wheels, or with the results")
    return parser


def docs() -> argparse.ArgumentParser:
    """Of `nox -s docs`."""
    parser = _parser("docs", "Builds the documentation.")
    parser.add_argument("folder", nargs="?", default="site", help="where to; by default site/")
    return parser


def rehearse() -> argparse.ArgumentParser:
    """Of `nox -s rehearse`."""
    parser = _parser("rehearse", "Runs the whole release train on this machine.")
    parser.add_argument("--base", help="a base image with Python, where mmdebstrap is not to make one")
    return parser


PASSED_ON = ("bench", "gpu_tests", "sanitize", "tests")  # sessions whose arguments another program takes
PARSERS = {
    made.__name__: made for made in (plan, commits, wheels, nightly, release, publish, docker, github, docs, rehearse)
}
