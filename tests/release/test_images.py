"""What images are called, and where they go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cuops_build.version import git

from release import ReleaseError, arguments, images

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docker(tmp_path: Path, release, monkeypatch) -> Callable[..., list[str]]:
    """Runs the session in a repository of 0.1.0.dev1, with wheels of that; returns what an engine was told to do."""
    done: list[str] = []

    class Engine(images.Engine):
        def __init__(self, name: str | None) -> None:
            self.name = "docker"

        def run(self, *words: str) -> str:
            done.append(" ".join(words))
            return "0.1.0.dev1"

    tree, dist = tmp_path / "tree", release("0.1.0.dev1")
    (tree / "requirements").mkdir(parents=True)
    for name in ("cuda.toml", "requirements/nox.txt"):
        shutil.copy(ROOT / name, tree / name)
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-m", "feat: a start")
    monkeypatch.chdir(tree)
    monkeypatch.setattr(images, "Engine", Engine)
    monkeypatch.setattr(images, "check_registry", lambda registry: None)

    def run(*words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["docker", "--dist", str(dist), *words])
        done.clear()
        images.main()
        return list(done)

    return run


def pushed(done: list[str]) -> list[str]:
    return [words.removeprefix("push ") for words in done if words.startswith("push ")]


def test_images_of_one_night_have_its_date_whenever_they_are_made(docker):
    there = "127.0.0.1:5000"
    done = docker("--cuda", "cu118", "cu121", "--push", "--registry", there, "--date", "20260102")
    assert {f"{there}/cuops:nightly-20260102-{row}" for row in ("cu118", "cu121")} < set(pushed(done))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.3.0", ["0.3.0-cu121", "latest-cu121"]),
        ("0.2.10", ["0.2.10-cu121", "latest-cu121"]),
        ("0.2.9", ["0.2.9-cu121"]),
        ("0.1.0.dev7", ["0.1.0.dev7-cu121", "nightly-20260102-cu121", "nightly-cu121"]),
    ],
)
def test_latest_never_goes_back_to_an_older_release(version, expected):
    assert images.tags(version, "cu121", "20260102", ["v0.2.9", "v0.2.10", "v1-draft"]) == expected


def test_tags_that_move_go_after_those_of_the_version_of_all_rows(docker):
    """Where a push stops in the middle, what moved already leads to a whole version."""
    there = "127.0.0.1:5000"
    done = docker("--cuda", "cu118", "cu121", "--push", "--registry", there, "--date", "20260102")
    assert pushed(done) == [
        f"{there}/cuops:{tag}"
        for tag in (
            *("0.1.0.dev1-cu118", "0.1.0.dev1-cu121"),
            *("nightly-20260102-cu118", "nightly-cu118", "nightly-20260102-cu121", "nightly-cu121"),
        )
    ]
    after = done[done.index(f"push {there}/cuops:0.1.0.dev1-cu118") :]
    assert not [words for words in after if words.startswith(("buildx", "run"))]  # all are tried before the first push


def test_an_image_names_the_commit_that_it_is_made_from_and_no_other(docker):
    revision = f"--label=org.opencontainers.image.revision={git(Path.cwd(), 'rev-parse', 'HEAD').strip()}"
    assert revision in docker()[0].split()
    Path("cuda.toml").write_text(Path("cuda.toml").read_text() + "\n")
    assert "image.revision" not in docker()[0]
    with pytest.raises(SystemExit, match=r"--push: .* not committed \(cuda\.toml\)"):
        docker("--push", "--registry", "127.0.0.1:5000")


def test_the_image_for_development_is_one_for_all_rows(docker):
    there = "127.0.0.1:5000"
    done = docker("--image", "dev", "--cuda", "cu118", "cu121", "--push", "--registry", there, "--date", "20260102")
    assert len([words for words in done if words.startswith("buildx build")]) == 1
    assert pushed(done) == [f"{there}/cuops-dev:{tag}" for tag in ("0.1.0.dev1", "nightly-20260102", "nightly")]


def test_a_registry_has_no_scheme():
    with pytest.raises(ReleaseError, match=r"--registry: expected HOST:PORT .* got https://ghcr\.io"):
        images.check_registry("https://ghcr.io")


def test_an_image_is_not_begun_without_its_wheels(release, monkeypatch):
    monkeypatch.setattr(images, "works", lambda engine: True)
    monkeypatch.setattr(images.Engine, "_overlays", lambda engine: True)
    monkeypatch.setattr("sys.argv", ["docker", "--cuda", "cu118", "cu130", "--dist", str(release("0.2.0"))])
    with pytest.raises(SystemExit, match="has no wheel of cuops-cu130: nox -s wheels -- cu118 cu130"):
        images.main()


@pytest.mark.parametrize("name", arguments.ENGINES)
def test_a_build_reaches_an_index_on_loopback(name, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(images, "works", lambda engine: True)
    monkeypatch.setattr(images.Engine, "_overlays", lambda engine: True)
    monkeypatch.setattr(images.Engine, "run", lambda engine, *words: said.extend(words))
    images.Engine(name).build(tmp_path / "Dockerfile", tmp_path, "cuops:test", {}, {}, "0")
    assert "--network=host" in said
