"""The faults of a rehearsal that take neither wheels nor images."""

from __future__ import annotations

import shutil
from pathlib import Path

from cuops_build.version import git

from release import faults, rehearse

ROOT = Path(__file__).parents[2]


def test_faults_of_a_release_are_rehearsed_where_git_has_no_identity(tmp_path, monkeypatch):
    (tmp_path / "config").write_text("[user]\n  useConfigOnly = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        for what in ("NAME", "EMAIL"):
            monkeypatch.delenv(f"GIT_{who}_{what}", raising=False)
    r = rehearse.Rehearsal(tmp_path)
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", str(r.origin))
    git(tmp_path, "clone", "--quiet", str(r.origin), str(r.clone))
    for name in ("release", "build_backend", "cuda.toml", "cliff.toml", ".gitignore"):
        source = ROOT / name
        shutil.copytree(source, r.clone / name) if source.is_dir() else shutil.copy(source, r.clone)
    r.run("git", "checkout", "--quiet", "-B", "main")
    r.run("git", "add", "--all")
    r.run("git", "commit", "--quiet", "-m", "feat: a start")
    r.run("git", "push", "--quiet", "origin", "main")
    r.run("git", "commit", "--quiet", "--allow-empty", "-m", "fix: a fault")
    faults.of_release(r)
    assert r.table.row_count == 4
