"""Runs the release train in a scratch clone, with a package index and an image registry on loopback, and faults."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from cuops_build.version import VersionError, git, read
from rich.console import Console
from rich.table import Table

from . import ReleaseError, arguments, faults, images, index, serve, servers, wheels

ROWS = ("cu118", "cu121")
VERSION_OF = "import cuops; print(cuops.__version__)"
MANIFEST = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"


class Rehearsal:
    """The scratch folder, and the table of what was verified in it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.clone, self.origin = scratch, scratch / "clone", scratch / "origin.git"
        self.table = Table("What", "Seen", "Seconds", title="The release train, rehearsed")
        self.environment = {
            **os.environ, "PYTHONPATH": "build_backend", "TWINE_USERNAME": "rehearsal", "TWINE_PASSWORD": "rehearsal",
            "CONTAINERS_STORAGE_CONF": str(scratch / "storage.conf"),
            **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
               (("NAME", "A rehearsal"), ("EMAIL", "rehearsal@localhost"))},
        }  # fmt: skip
        store = f'[storage]\ndriver = "overlay"\ngraphroot = "{scratch}/images"\nrunroot = "{scratch}/containers"\n'
        (scratch / "storage.conf").write_text(store)

    def run(self, *command: str | Path, fails: bool = False, alone: Path | None = None, index: str = "") -> str:
        """What a command prints, which has to end well, or (fails) badly; in the clone, or in a folder away from it."""
        away = {"PYTHONPATH": "", **({"PIP_EXTRA_INDEX_URL": index} if index else {})} if alone else {}
        done = subprocess.run(
            list(map(str, command)), cwd=alone or self.clone, env={**self.environment, **away},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if (done.returncode != 0) != fails:
            raise ReleaseError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout.strip()

    def nox(self, session: str, *arguments: str | Path) -> str:
        """A nox session in the clone."""
        return self.run(sys.executable, "-m", "nox", "-s", session, "--", *arguments)

    def tool(self, module: str, *arguments: str | Path, fails: bool = False) -> str:
        """A step of the train without its nox session: faults are many, and the session is the same."""
        return self.run(sys.executable, "-m", f"release.{module}", *arguments, fails=fails)

    @contextlib.contextmanager
    def station(self, what: str) -> Iterator[list[str]]:
        """A row of the table; what is appended to the list is what was seen."""
        started, seen = time.monotonic(), list[str]()
        print(f"{what} …", end="", flush=True)
        yield seen
        seconds = f"{time.monotonic() - started:.0f}"
        print(f" {seconds} s", flush=True)
        self.table.add_row(what, "\n".join(seen), seconds)

    def install(self, *arguments: str, index: str = "") -> str:
        """The version that `import cuops` has in a fresh environment after `pip install` of these."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            venv.create(folder, with_pip=True)
            python = Path(folder, "bin", "python")
            self.run(python, "-m", "pip", "install", "-q", *arguments, alone=Path(folder), index=index)
            return self.run(python, "-c", VERSION_OF, alone=Path(folder)).splitlines()[-1]


def agree(what: str, *values: str) -> None:
    """Raises where values that should be one are several."""
    if len(set(values)) != 1:
        raise ReleaseError(f"{what} do not agree: {', '.join(values)}")


def commit_and_compare(r: Rehearsal) -> None:
    """Commits of each kind, and the version that each leads to."""
    major, minor, patch = read(r.clone).next
    git(r.clone, "tag", f"v{major}.{minor}.{patch}")
    git(r.clone, "push", "--quiet", "origin", f"v{major}.{minor}.{patch}")
    breaking = f"0.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"
    expected = {
        "fix: a fault": f"{major}.{minor}.{patch + 1}",
        "perf(rms_norm): a faster kernel": f"{major}.{minor}.{patch + 1}",
        "feature: an older word": f"{major}.{minor + 1}.0",
        "docs: a page": f"{major}.{minor + 1}.0",
        "feat!: another argument\n\nBREAKING CHANGE: the old one is gone": breaking,
    }
    with r.station("versions from commit messages") as seen:
        for distance, (message, release) in enumerate(expected.items(), 1):
            r.run("git", "-c", "core.hooksPath=/dev/null", "commit", "--quiet", "--allow-empty", "-m", message)
            agree("the versions after a commit", read(r.clone).version, f"{release}.dev{distance}")
            seen.append(f"{message.splitlines()[0]} → {release}.dev{distance}")
        with tempfile.TemporaryDirectory(dir=r.scratch) as shallow:
            r.run("git", "clone", "--quiet", "--depth=1", r.clone.as_uri(), shallow)
            said = r.run(
                sys.executable, str(r.clone / "build_backend/cuops_build/version.py"), fails=True, alone=Path(shallow)
            )
            seen.append("a shallow clone → " + said.splitlines()[-1])


def nightly(r: Rehearsal) -> str:
    """Two nights, of which the second has nothing to do; returns the version of the first."""
    version, folder = read(r.clone).version, r.scratch / "nightly"
    with r.station("nightly: first night") as seen:
        r.nox("nightly", "--index", folder, "--rows", *ROWS)
        agree("the nightly versions", version, *map(str, index.versions(folder)))
        seen.append(f"{version} built, tried in clean environments, added to the index")
    with r.station("nightly: pip install --pre --extra-index-url … cuops-cu121") as seen:
        server = serve.server(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        installed = r.install("--pre", "--extra-index-url", f"{url}/simple/", "cuops-cu121")
        index.mirror(url, r.scratch / "mirror")
        server.shutdown()
        server.server_close()
        agree("the versions that pip found", version, installed, *map(str, index.versions(r.scratch / "mirror")))
        seen.append(f"cuops.__version__ is {installed}; a mirror has the same files")
    with r.station("nightly: second night") as seen:
        said = r.nox("nightly", "--index", folder, "--rows", *ROWS)
        if "nothing is new" not in said:
            raise ReleaseError(f"the second night built again:\n{said}")
        seen.append("nothing is new since the last nightly: not built")
    return version


def release(r: Rehearsal) -> str:
    """Version, changelog, commit and tag, and the wheels of it; returns the version."""
    version = "{}.{}.{}".format(*read(r.clone).next)
    with r.station("release: version, changelog, tag, pushed at once") as seen:
        r.nox("release", "--push", "origin")
        pushed = git(r.origin, "rev-list", "-n1", f"v{version}").strip()
        agree(
            "tag, branch and clone", pushed, *(git(where, "rev-parse", "HEAD").strip() for where in (r.clone, r.origin))
        )
        agree("version and tag", version, read(r.clone).version)
        changes = (r.clone / "CHANGELOG.md").read_text()
        if f"## {version} " not in changes or "another argument" not in changes:
            raise ReleaseError(f"CHANGELOG.md does not tell of {version}")
        seen.append(f"v{version} at {pushed[:12]}; CHANGELOG.md has its section")
    with r.station("release: wheels of the tag, and their contract") as seen:
        r.nox("wheels", *ROWS)
        for wheel in wheels.read_set(r.clone / "dist", list(ROWS)):
            agree("tag and wheel", version, wheel.version)
            seen.append(f"{wheel.path.name} ({wheel.path.stat().st_size / 1e6:.2f} MB)")
    return version


def publish(r: Rehearsal, version: str, url: str) -> None:
    """The upload, after the one that broke in the middle, and what users type."""
    with r.station("publish: twine to the index, finishing what broke") as seen:
        options = ("--index", url, "--simple", f"{url}/simple/", "--only", *ROWS)
        said = r.nox("publish", *options), r.tool("publish", *options)
        seen += [re.findall(r"published cuops.*|everything was published already", words)[-1] for words in said]
    with r.station("users: pip install cuops-cu121") as seen:
        installed = r.install("cuops-cu121", index=f"{url}/simple/")
        agree("version and cuops.__version__", version, installed)
        seen.append(f"cuops.__version__ is {installed}")


def engine(r: Rehearsal) -> images.Engine:
    """The container engine, with its images in the scratch folder where it can."""
    return images.Engine(environment=r.environment)


def push(r: Rehearsal, registry: str, options: list[str]) -> dict[str, Any]:
    """Builds, tries and pushes an image; returns what the registry says of it."""
    said = r.nox("docker", "--cuda", "cu121", "--push", "--registry", registry, *options)
    tags = [line.rpartition(":")[2] for line in said.splitlines() if line.startswith("pushed ")]
    repository, accept = f"http://{registry}/v2/cuops", {"Accept": MANIFEST}
    answers = [requests.get(f"{repository}/manifests/{tag}", headers=accept, timeout=30) for tag in tags]
    agree("the digests of the tags", *(answer.headers["Docker-Content-Digest"] for answer in answers))
    config = requests.get(f"{repository}/blobs/{answers[0].json()['config']['digest']}", timeout=30).json()
    size = sum(layer["size"] for layer in answers[0].json()["layers"])
    return {"tags": tags, "digest": answers[0].headers["Docker-Content-Digest"], "size": size, **config}


def pull(r: Rehearsal, registry: str, pushed: dict[str, Any], version: str, commit: str) -> str:
    """Pulls an image back by digest and by tag, after forgetting it, and runs the doctor; returns what was seen."""
    labels = pushed["config"]["Labels"]
    agree("version and label", version, labels["org.opencontainers.image.version"])
    agree("commit and label", commit, labels["org.opencontainers.image.revision"])
    here = engine(r)
    here.forget(f"cuops:{version}-cu121", *(f"{registry}/cuops:{tag}" for tag in pushed["tags"]))
    for remote in (f"{registry}/cuops@{pushed['digest']}", f"{registry}/cuops:{pushed['tags'][-1]}"):
        here.pull(remote)
        here.inside(remote, *images.DOCTOR)
        agree("version and image", version, here.inside(remote, *images.TRIAL).splitlines()[-1])
        here.forget(remote)
    tags = ", ".join(pushed["tags"])
    return f"{tags}: {pushed['size'] / 1e6:.0f} MB, {pushed['digest'][:19]}…, the doctor is content"


def all_images(r: Rehearsal, nightly_version: str, version: str, url: str, base: str | None) -> None:
    """The nightly's image from dist/ and the release's from the index, each through the registry and back."""
    if base is None and shutil.which("mmdebstrap"):
        with r.station("images: a slim base of Debian's packages") as seen:
            base = engine(r).debian(r.scratch)
            seen.append(base)
    options = ["--base", base] if base else []
    with servers.image_registry(r.scratch / "registry") as registry:
        with r.station("images: nightly, pushed, pulled back by digest and by tag") as seen:
            git(r.clone, "checkout", "--quiet", "HEAD~")
            pushed = push(r, registry, [*options, "--dist", str(r.scratch / "nightly/files")])
            seen.append(pull(r, registry, pushed, nightly_version, git(r.clone, "rev-parse", "HEAD").strip()))
            git(r.clone, "checkout", "--quiet", "-")
        with r.station("images: release, from the index") as seen:
            options += ["--index", f"{url}/simple/"]
            pushed = push(r, registry, options)
            seen.append(pull(r, registry, pushed, version, git(r.clone, "rev-parse", "HEAD").strip()))
        with r.station("images: release, built again") as seen:
            again = push(r, registry, options)
            agree("the layers of both builds", *(str(image["rootfs"]["diff_ids"]) for image in (pushed, again)))
            seen.append(f"the {len(again['rootfs']['diff_ids'])} layers are the same, timestamps included")


def rehearse(r: Rehearsal, base: str | None) -> None:
    """The whole train."""
    git(Path.cwd(), "clone", "--quiet", "--bare", str(Path.cwd()), str(r.origin))
    git(r.origin, "update-ref", "refs/heads/main", git(Path.cwd(), "rev-parse", "HEAD").strip())
    git(r.origin, "symbolic-ref", "HEAD", "refs/heads/main")
    for later in git(r.origin, "tag", "--no-merged", "refs/heads/main").split():  # than an older branch
        git(r.origin, "tag", "-d", later)
    git(r.origin, "clone", "--quiet", str(r.origin), str(r.clone))
    commit_and_compare(r)
    nightly_version = nightly(r)
    faults.of_release(r)
    version = release(r)
    with servers.package_index(r.scratch / "index") as url:
        faults.of_publish(r, version, url)
        publish(r, version, url)
        faults.of_images(r)
        all_images(r, nightly_version, version, url, base)


def main() -> None:
    """The command line of `nox -s rehearse`."""
    options = arguments.rehearse().parse_args()
    started, failure = time.monotonic(), ""
    if git(Path.cwd(), "status", "--porcelain"):
        print("what is not committed is not rehearsed")
    with tempfile.TemporaryDirectory(prefix="cuops-rehearsal-", ignore_cleanup_errors=True) as scratch:
        r = Rehearsal(Path(scratch))
        try:
            servers.registry_binary()  # which the last stations would miss, as an engine
            containers = engine(r)
            try:
                rehearse(r, options.base)
            finally:
                containers.let_go(r.scratch / "images")
        except (ReleaseError, VersionError) as error:
            failure = str(error)
        except KeyboardInterrupt:
            failure = "interrupted"
    if Path(scratch).exists():
        print(f"{scratch} could not be removed: what is mounted there, mount tells")
    if failure:
        sys.exit(f"rehearse: {failure}")
    Console(width=None if sys.stdout.isatty() else 150).print(r.table)
    print(f"everything agrees, after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
