"""What CI does for a change, and what is said on GitHub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuops_build.version import git

from release import ReleaseError, cut, github, plan

ROOT = Path(__file__).parents[2]
RESULTS = {
    "operator": "rms_norm",
    "provenance": {"device": "A GPU", "commit": "abc"},
    "sections": {
        "forward": [
            {"kind": "fwd", "shape": [8, 4096], "dtype": "bfloat16", "results": {"cuops": {"us": 1.25}, "peer": {"failure": "no"}}},
        ],
        "host": [{"implementation": "cuops", "without_gradient_us": 3.5}],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["CHANGELOG.md", ".github/picture.svg"], True),
        (["CHANGELOG.md", "csrc/rms_norm.cu"], False),
        (["README.md"], False),
        (["CONTRIBUTING.md"], False),
        (["docs/release/making.md"], False),
        (["packages/cuops/README.md"], False),
        (["tests/data.md"], False),
        (["benchmarks/results/figure.svg"], False),
        ([], False),
    ],
)
def test_only_prose_spares_the_wheels(paths, expected):
    assert plan.only_prose(paths) is expected


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("mv", "build_backend/cuops_build/table.py", "notes.md"), "true"),
        (("mv", "CHANGELOG.md", "notes.md"), "true"),  # which pages link to
        (("rm", "CHANGELOG.md"), "true"),
        (("mv", "notes/a.md", "notes/b.md"), "true"),
        (("add", "more.md"), "false"),
    ],
)
def test_files_that_are_gone_do_not_spare_the_wheels(tmp_path, change, code):
    for path in ("cuda.toml", "build_backend/cuops_build/table.py", "CHANGELOG.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.md").write_text("a note\n")
    for arguments in (
        ("init", "--quiet"),
        ("config", "user.name", "A test"),
        ("config", "user.email", "test@localhost"),
        ("add", "."),
        ("commit", "--quiet", "-m", "chore: start"),
    ):
        git(tmp_path, *arguments)
    (tmp_path / "more.md").write_text("more\n")
    git(tmp_path, *change)
    git(tmp_path, "commit", "--quiet", "-m", "docs: a change")
    assert plan.plan(tmp_path, "HEAD~1")["code"] == code


@pytest.mark.parametrize("base", ["", "0" * 40, "no-such-commit"])
def test_everything_is_done_where_the_base_is_not_known(base):
    outputs = plan.plan(ROOT, base)
    assert outputs["code"] == "true"
    assert json.loads(outputs["rows"])[0] == "cu118"


def test_results_become_a_table(tmp_path):
    (tmp_path / "rms_norm.json").write_text(json.dumps(RESULTS))
    text = github.comparison(tmp_path)
    assert "| fwd bfloat16 8x4096 | 1.2 | - |" in text
    assert text.startswith("### rms_norm on A GPU, commit abc")
    with pytest.raises(ReleaseError, match="no results"):
        github.comparison(tmp_path / "none")
    (tmp_path / "other.json").write_text('{"name": "other"}')
    with pytest.raises(ReleaseError, match=r"other\.json is no result of a benchmark"):
        github.comparison(tmp_path)


def test_results_of_every_benchmark_become_tables():
    text = github.comparison(ROOT / "benchmarks/results")
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        assert f"### {path.stem} on " in text


def test_a_release_on_github_is_made_once_then_mended_and_no_draft_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(github.wheels, "check_sums", lambda folder: None)
    monkeypatch.setattr(github.wheels, "one_version", lambda folder: "0.3.1")
    log, made, command = tmp_path / "log", tmp_path / "made", tmp_path / "bin/gh"
    for folder in (tmp_path / "bin", tmp_path / "dist"):
        folder.mkdir()
    command.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase $2 in view) test -e {made};; create) touch {made};; esac\n'
    )
    command.chmod(0o755)
    (tmp_path / "CHANGELOG.md").write_text("## 0.3.1 - today\n\n- a fault\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    for name in ("cuops-0.3.1-py3-none-any.whl", "cuops-0.3.1.tar.gz", "SHA256SUMS", "notes.txt"):
        (tmp_path / "dist" / name).write_text("")
    for _ in range(2):
        github.release("v0.3.1", tmp_path / "dist")
    calls = log.read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["view", "create", "view", "upload", "edit"]
    files = ["cuops-0.3.1-py3-none-any.whl", "cuops-0.3.1.tar.gz", "SHA256SUMS"]
    for call in calls[1], calls[3]:
        assert [Path(word).name for word in call.split() if str(tmp_path) in word] == files
    assert "--draft=false" in calls[-1]  # as what a run that was killed leaves is one


def test_notes_are_one_section_of_the_changelog():
    text = "# Changelog\n\n## 0.2.0 (2026-01-02)\n\n- two\n\n## 0.1.0 (2026-01-01)\n\n- one\n"
    assert cut.notes(text, "0.2.0").split() == ["##", "0.2.0", "(2026-01-02)", "-", "two"]
    assert cut.notes(text, "0.1.0").endswith("- one\n")
    with pytest.raises(ReleaseError, match=r"no section 0\.3\.0"):
        cut.notes(text, "0.3.0")


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ("feat: a thing", True), ("fix(rms_norm)!: a thing", True), ("perf: faster\n\nBREAKING CHANGE: b", True),
        ("Merge branch 'x'", True), ("A thing", False), ("feat a thing", False), ("feet: a thing", False), ("feat:", False),
        ("feat(rms_norm())!: a thing", False), ("feat(nn)(cem): a thing", False), ("feat(nn, cem): a thing", False),
    ],
)  # fmt: skip
def test_commit_messages_that_are_not_conventional_are_refused(message, accepted, tmp_path):
    (tmp_path / "message").write_text(message)
    command = ["cz", "check", "--allow-abort", "--commit-msg-file", str(tmp_path / "message")]
    assert (subprocess.run(command, capture_output=True, check=False).returncode == 0) is accepted
