"""The release train, from merged commits to wheels on an index and images in a registry; nox sessions call it."""

from __future__ import annotations


class ReleaseError(Exception):
    """The train stops before it does harm; the message says why and what to do."""
