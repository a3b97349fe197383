"""What images are called, and where they go."""

from __future__ import annotations

import pytest

from release import ReleaseError, images


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
