"""Compilers of device code that fail, or end without a word."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from cuops_build import cache, nvrtc


@pytest.mark.parametrize(
    ("script", "said"),
    [("kill -SEGV $$", "it ended with -11"), ("echo expected a ';' >&2; exit 1", "expected a ;")],
    ids=["crash", "error"],
)
def test_a_compiler_that_fails_is_an_error_that_names_the_source(script, said, tmp_path, monkeypatch):
    program, source = tmp_path / "compiler", tmp_path / "twice.cu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    source.write_text("")
    tools = nvrtc.Toolchain(Path("nvrtc"), Path("builtins"), program, tmp_path)
    with pytest.raises(nvrtc.BuildError, match=rf"^twice.cu does not assemble for sm_90:\n{re.escape(said)}"):
        tools.cubin(b"", source.name, "90")
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(nvrtc.BuildError, match=rf"^twice.cu does not compile with -x:\n{re.escape(said)}"):
        tools.ptx(source, ("-x",))


def test_products_that_no_build_asks_for_any_more_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("CUOPS_BUILD_CACHE", str(tmp_path))
    (tmp_path / "zig").mkdir()
    for name in ("used", "unused", "zig.lock"):
        cache.store(name, b"product")
        os.utime(tmp_path / name, (0, 0))
    assert cache.load("used") == b"product"
    cache.prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used", "zig", "zig.lock"]
