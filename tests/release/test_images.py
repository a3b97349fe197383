"""What images are called, and where they go."""

from __future__ import annotations

import pytest

from release import ReleaseError, arguments, images


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
