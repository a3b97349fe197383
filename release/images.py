"""Builds, tries and pushes the images, with docker, podman or buildah, whichever there is."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import requests
from cuops_build import host, table
from cuops_build.version import TAG, VersionError, git, read
from packaging.version import Version

from . import ReleaseError, arguments, wheels

ASK = {"docker": ["version", "buildx version"], "podman": ["info"], "buildah": ["version"]}  # whether an engine works
NEEDS = {
    "docker": "Docker with buildx, and its daemon",
    "podman": "apt-get install podman",
    "buildah": "apt-get install buildah",
}
DOCTOR = ("cuops", "doctor", "--allow-no-gpu")
TRIAL = ("python", "-c", "import cuops; print(cuops.__version__)")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
DEBIAN = (
    "--quiet", "--variant=essential", "--include=python3,python3-venv,ca-certificates,libstdc++6",
    *(f"--dpkgopt=path-exclude=/usr/share/{unused}/*" for unused in ("doc", "man", "locale", "info")),
    f"--customize-hook=upload {CERTIFICATES} {CERTIFICATES}",
)  # fmt: skip
NAMES = {"runtime": "cuops", "dev": "cuops-dev"}
FILES = {"runtime": "docker/runtime.Dockerfile", "dev": "docker/dev.Dockerfile"}


def works(engine: str) -> bool:
    """Whether an engine is here, with its daemon where it needs one."""
    return bool(shutil.which(engine)) and all(
        subprocess.run([engine, *words.split()], capture_output=True, check=False).returncode == 0
        for words in ASK[engine]
    )


class Engine:
    """One of docker, podman and buildah, with what they do differently."""

    def __init__(self, name: str | None = None, environment: dict[str, str] | None = None) -> None:
        self.name = name or next((engine for engine in arguments.ENGINES if works(engine)), "")
        if name and not works(name):
            raise ReleaseError(f"{name} does not work here, which takes {NEEDS[name]}")
        if not self.name:
            raise ReleaseError(f"none of {', '.join(arguments.ENGINES)} works here: apt-get install buildah")
        self.environment = dict(os.environ) if environment is None else dict(environment)
        if self.name == "buildah":  # which alone can do without a container runtime, and without overlay file systems
            self.environment.setdefault("BUILDAH_ISOLATION", "chroot")
            self.environment.setdefault("STORAGE_DRIVER", "overlay" if self._overlays() else "vfs")

    def _overlays(self) -> bool:
        environment = {**self.environment, "STORAGE_DRIVER": "overlay"}
        made = subprocess.run(
            [self.name, "from", "scratch"], env=environment, capture_output=True, text=True, check=False
        )
        if made.returncode == 0:
            subprocess.run([self.name, "rm", made.stdout.strip()], env=environment, capture_output=True, check=True)
        return made.returncode == 0

    def run(self, *words: str) -> str:
        """What the engine prints; its messages go to the terminal."""
        done = subprocess.run([self.name, *words], env=self.environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            said = f":\n{done.stdout.strip()}" if done.stdout.strip() else ""
            raise ReleaseError(f"{self.name} {words[0]} failed with {done.returncode}{said}")
        return done.stdout.strip()

    def build(
        self, file: Path, context: Path, tag: str, values: dict[str, str], labels: dict[str, str], epoch: str
    ) -> None:
        """Builds an image whose files and history carry the time `epoch`, as far as the engine can."""
        options = [f"--build-arg={name}={value}" for name, value in values.items()]
        options += [f"--label={name}={value}" for name, value in labels.items()]
        common = ("--network=host", *options, "-f", str(file), "-t", tag, str(context))  # an index may be on loopback
        if self.name == "docker":  # which cannot set the times of files
            self.run("buildx", "build", "--load", f"--build-arg=SOURCE_DATE_EPOCH={epoch}", *common)
        else:
            self.run("build", f"--timestamp={epoch}", *common)

    def inside(self, tag: str, *command: str) -> str:
        """What a command prints inside an image."""
        if self.name != "buildah":
            return self.run("run", "--rm", tag, *command)
        container = self.run("from", "--pull-never", tag)
        try:
            return self.run("run", container, "--", *command)
        finally:
            self.run("rm", container)

    def push(self, tag: str, remote: str) -> None:
        """Pushes an image; a registry on loopback speaks plain HTTP."""
        self.run("tag", tag, remote)
        plain = ["--tls-verify=false"] if self.name != "docker" and is_loopback(remote) else []
        self.run("push", *plain, remote)

    def pull(self, remote: str) -> None:
        """Pulls an image."""
        plain = ["--tls-verify=false"] if self.name != "docker" and is_loopback(remote) else []
        self.run("pull", "--quiet", *plain, remote)

    def forget(self, *tags: str) -> None:
        """Removes images from this machine."""
        self.run("rmi", "--force", *tags)

    def let_go(self, store: Path) -> None:
        """Unmounts what builds that were interrupted have in a store that is about to be removed, and in no other."""
        if self.name == "buildah":
            there = ("--root", str(store), "rm", "--all")
            subprocess.run([self.name, *there], env=self.environment, capture_output=True, check=False)
            subprocess.run(["umount", str(store / "overlay")], capture_output=True, check=False)

    def debian(self, folder: Path) -> str:
        """Makes a slim image of Debian's packages with Python, without any registry; returns its name."""
        archive, name = folder / "base.tar", "localhost/cuops-base"
        done = subprocess.run(
            ["mmdebstrap", *DEBIAN, "trixie", str(archive)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ReleaseError(f"mmdebstrap failed:\n{done.stderr}")
        if self.name != "buildah":
            self.run("import", f"--change=ENV PIP_CERT={CERTIFICATES}", str(archive), name)
            return name
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, str(archive), "/")
        self.run("config", "--env", f"PIP_CERT={CERTIFICATES}", container)
        self.run("commit", "--quiet", "--rm", container, name)
        return name


def is_loopback(remote: str) -> bool:
    """Whether a registry or an image in it is on this machine."""
    return remote.split("/")[0].split(":")[0] in ("localhost", "127.0.0.1")


def tags(version: str, row: str, date: str, releases: Sequence[str]) -> list[str]:
    """The tags of an image: the one of its version first, then those that move, never back to an older release."""
    if "dev" in version:
        names = [version, f"nightly-{date}", "nightly"]
    else:
        newer = [tag for tag in releases if TAG.fullmatch(tag) and Version(tag) > Version(version)]
        names = [version, *(() if newer else ("latest",))]
    return [f"{name}-{row}" if row else name for name in names]


def check_registry(registry: str) -> None:
    """Raises where the registry does not answer, before anything is built."""
    if "://" in registry:
        raise ReleaseError(f"--registry: expected HOST:PORT or HOST/OWNER without a scheme, got {registry}")
    url = f"{'http' if is_loopback(registry) else 'https'}://{registry.split('/')[0]}/v2/"
    try:
        answer = requests.get(url, timeout=30)
    except requests.RequestException as error:
        raise ReleaseError(
            f"the registry {registry} does not answer, so nothing is built or pushed: {error}"
        ) from error
    if answer.status_code not in (requests.codes.ok, requests.codes.unauthorized):
        raise ReleaseError(f"the registry {registry} answers {answer.status_code}, so nothing is built or pushed")


def build(engine: Engine, options: argparse.Namespace, row: str, version: str, of_head: bool) -> str:
    """Builds the image of a row of cuda.toml, or of none, and runs the doctor in it; returns its local tag.

    `of_head`: it is made from the commit that is checked out, as that is, and names it.
    """
    root = Path.cwd()
    tag = f"{NAMES[options.image]}:{version}-{row}".removesuffix("-")
    commit, epoch = git(root, "log", "-1", "--format=%H %ct").split()
    labels = {"org.opencontainers.image.version": version}
    if of_head:
        labels["org.opencontainers.image.revision"] = commit
    values = {"CUDA": row, "VERSION": version, "TORCH": options.torch, "INDEX": options.index or ""}
    if options.base:
        values["BASE"] = options.base
    with tempfile.TemporaryDirectory() as context:
        shutil.copytree(root / "requirements", Path(context, "requirements"))
        Path(context, "dist").mkdir()
        for path in options.dist.glob("*.whl") if not options.index and options.image == "runtime" else ():
            shutil.copy2(path, Path(context, "dist"))
        engine.build(root / FILES[options.image], Path(context), tag, values, labels, epoch)
    if options.image == "dev":
        print(engine.inside(tag, "nox", "--version"))
    else:
        print(engine.inside(tag, *DOCTOR))
        said = engine.inside(tag, *TRIAL).splitlines()[-1]
        if said != version:
            raise ReleaseError(f"{tag} says that it is {said}")
    return tag


def expect_wheels(folder: Path, rows: Sequence[str]) -> None:
    """The core and the backends of these rows, for this machine."""
    named = [wheels.named(path) for path in folder.glob("*.whl")]
    fit = ("any", host.platform_tag(platform.machine()))
    there = {name for name, _, tags in named if any(tag.platform in fit for tag in tags)}
    if missing := {"cuops", *(f"cuops-{row}" for row in rows)} - there:
        raise ReleaseError(f"{folder}/ has no wheel of {', '.join(sorted(missing))}: nox -s wheels -- {' '.join(rows)}")


def main() -> None:
    """The command line of `nox -s docker`."""
    options = arguments.docker().parse_args()
    date = options.date or datetime.now(timezone.utc).strftime("%Y%m%d")
    try:
        known = table.read(Path.cwd() / "cuda.toml")
        if unknown := set(options.cuda) - known.keys():
            raise ReleaseError(f"--cuda: {', '.join(sorted(unknown))} not in cuda.toml, which has {', '.join(known)}")
        if options.push and not options.registry:
            raise ReleaseError("--push needs --registry HOST:PORT")
        if options.push:
            check_registry(options.registry)
            options.registry = options.registry.lower()  # an owner's capitals are none of an image's name
        engine, history = Engine(options.engine), read(Path.cwd())
        if options.push and history.changed:
            raise ReleaseError(
                f"--push: the tree has changes that are not committed ({', '.join(history.changed[:3])})"
            )
        head = history.version
        version = head if options.index or options.image == "dev" else wheels.one_version(options.dist)
        if not options.index and options.image == "runtime":
            expect_wheels(options.dist, options.cuda)
        rows = options.cuda if options.image == "runtime" else [""]  # as the other image is the same for all
        built = {row: build(engine, options, row, version, version == head and not history.changed) for row in rows}
        # All images are built and tried before the first is pushed, and the tags that move go last.
        releases = git(Path.cwd(), "tag", "--list").split()
        names = [(built[row], tag) for row in built for tag in tags(version, row, date, releases)]
        for local, tag in sorted(names, key=lambda name: not name[1].startswith(version)) if options.push else ():
            remote = f"{options.registry}/{local.split(':')[0]}:{tag}"
            try:
                engine.push(local, remote)
            except ReleaseError as error:
                raise ReleaseError(f"the push stopped at {remote}; run the same command again. {error}") from None
            print(f"pushed {remote}")
    except (ReleaseError, VersionError) as error:
        sys.exit(f"docker: {error}")


if __name__ == "__main__":
    main()
