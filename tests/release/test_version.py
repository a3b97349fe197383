"""Versions over scratch repositories, by the tool that releases use, by `python -m build`, and by git-cliff."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cuops_build import version

ROOT = Path(__file__).parents[2]
FIX, FEAT, BREAKING = "fix: a fault", "feat: a thing", "feat!: another argument"
MESSAGES = {
    "fix: a": "patch", "fix(rms_norm): a": "patch", "perf: a": "patch", "docs: a": "patch", "chore(deps): a": "patch",
    'Revert "feat: a"': "patch", "Merge branch 'x'": "patch", "no convention at all": "patch", "feature-like: a": "patch",
    'Revert "feat!: a"': "patch", "fixup! feat!: a": "patch", 'fix: handle "error!: a"': "patch",
    "fixup! feat: a": "patch", "feat : a": "patch", "fix: a\n\nno BREAKING CHANGE: here": "patch", "fix: BREAKING CHANGE": "patch",
    "feat: a": "minor", "feat(cem): a": "minor", "feature: a": "minor", "feature(cem): a": "minor", "FEAT: a": "minor",
    "feat:a": "minor", "feat:  a": "minor", "feat: a!: b": "minor",
    "feat!: a": "major", "fix(rms_norm)!: a": "major", "chore!: a": "major", "feature!: a": "major",
    "feat!:  a": "major", "fix(rms_norm)!:a": "major",
    "Breaking changes: a": "major", "breaking change: a": "major", "Breaking changes(nn): a": "major",
    "fix: a\n\nBREAKING CHANGE: b": "major", "fix: a\n\nBREAKING-CHANGE: b": "major", "docs: a\n\nBreaking changes: b": "major",
    "fix: a\n\nWhy so.\n\nReviewed-by: Z\nBREAKING CHANGE: b": "major", "fix: a\n\nWhy so.\nBREAKING CHANGE: b\nand more": "major",
    "fix: a\n\nBREAKING CHANGE:\nb": "major", "fix: a\n\nBREAKING CHANGE:\n\n- b\n- c": "major", "fix: a\n\nBREAKING CHANGE:b": "major",
    "fix: a\n\nBREAKING CHANGES: b": "major", "fix: a\n\nBREAKING-CHANGES #b": "major", "fix: a\n\nBREAKING CHANGE(nn): b": "major",
    "fix: a\n\nBREAKING CHANGE(nn)!: b\n\nBREAKING CHANGE: c": "major", "feat(nn): a\n\nBREAKING CHANGE: b\n\nReviewed-by: Z": "major",
    'Revert "feat: a"\n\nBREAKING CHANGE: b': "major", "Merge branch 'x'\n\nBREAKING CHANGE: b": "major", "no convention\nBREAKING CHANGE: b": "major",
    "fix: a\n\nThis is no\nBREAKING CHANGE\n: at all": "patch", "fix: a\n\nBREAKING CHANGE:": "patch",
}  # fmt: skip
AFTER = {"v1.2.3": {"patch": "1.2.4", "minor": "1.3.0", "major": "2.0.0"}, "v0.4.2": {"patch": "0.4.3", "minor": "0.5.0", "major": "0.5.0"}}  # fmt: skip


class Repository:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "--quiet", "--initial-branch=main")
        for name, value in {"user.name": "A test", "user.email": "test@localhost", "commit.gpgsign": "false"}.items():
            self.git("config", name, value)

    def git(self, *arguments: str) -> str:
        return version.git(self.path, *arguments)

    def commit(self, *messages: str) -> str:
        for message in messages:
            self.git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-m", message)
        return version.read(self.path).version


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "repository").mkdir()
    return Repository(tmp_path / "repository")


@pytest.mark.parametrize("tag", AFTER)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_commit_leads_to_its_release(message: str, tag: str):
    last = tuple(map(int, tag[1:].split(".")))
    assert ".".join(map(str, version.bump(last, [message]))) == AFTER[tag][MESSAGES[message]]


@pytest.mark.parametrize("tag", [*AFTER, None])
def test_git_cliff_bumps_as_we_do(repository: Repository, tag: str | None):
    shutil.copy(ROOT / "cliff.toml", repository.path)
    for message in MESSAGES:
        repository.git("checkout", "--quiet", "--orphan", "next")
        repository.commit("chore: start")
        repository.git("tag", "--force", tag or "not-a-release")
        repository.commit("docs: one before", message)
        command = ["git-cliff", "--offline", "--bumped-version"]
        cliff = subprocess.run(command, cwd=repository.path, capture_output=True, text=True, check=True).stdout.strip()
        assert cliff.removeprefix("v") == ".".join(map(str, version.read(repository.path).next)), message
        repository.git("branch", "--move", "--force", "done")


def test_the_changelog_lists_as_breaking_what_the_version_takes_for_it(repository: Repository):
    shutil.copy(ROOT / "cliff.toml", repository.path)
    repository.commit("chore: start")
    repository.git("tag", "v1.0.0")
    for message, change in MESSAGES.items():
        repository.commit(message)
        command = ["git-cliff", "--offline", "--unreleased"]
        changelog = subprocess.run(command, cwd=repository.path, capture_output=True, text=True, check=True).stdout
        assert ("### Breaking changes" in changelog) == (change == "major"), message
        repository.git("reset", "--quiet", "--hard", "v1.0.0")


@pytest.mark.parametrize(
    ("message", "lists"),
    [
        ("Merge branch 'side'", []),
        ("feat!: a thing", ["a thing"]),
        ("Merge 'side'\n\nBREAKING CHANGE: b", ["Merge 'side' (b)"]),
    ],
)
def test_a_merge_is_in_the_changelog_where_its_own_message_is_conventional(repository: Repository, message, lists):
    shutil.copy(ROOT / "cliff.toml", repository.path)
    repository.commit("chore: start")
    repository.git("tag", "v1.0.0")
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit(FIX)
    repository.git("checkout", "--quiet", "-")
    repository.git("merge", "--quiet", "--no-ff", "-m", message, "side")
    command = ["git-cliff", "--offline", "--unreleased"]
    changelog = subprocess.run(command, cwd=repository.path, capture_output=True, text=True, check=True).stdout
    headings = [line for line in changelog.splitlines() if line.startswith("###")]
    assert headings == ["### Breaking changes"] * bool(lists) + ["### Fixes"]
    assert [line for line in changelog.splitlines() if line.startswith("- ")] == [
        f"- {line}" for line in [*lists, "a fault"]
    ]


@pytest.mark.parametrize("tag", ["v2024.01.05", "v1.2.\u0663", "v01.3.0"])
def test_other_tags_are_no_releases(repository: Repository, tag: str):
    repository.commit(FIX)
    repository.git("tag", "v1.2.3")
    repository.git("tag", tag)
    assert version.read(repository.path).version == "1.2.3"
    assert repository.commit(FIX) == "1.2.4.dev1"


def test_the_largest_change_decides_and_the_distance_counts(repository: Repository):
    assert repository.commit("chore: start") == "0.1.0.dev1"
    assert repository.commit(BREAKING) == "0.1.0.dev2"
    repository.git("tag", "v0.1.0")
    assert version.read(repository.path).version == "0.1.0"
    versions = [repository.commit(message) for message in (FIX, FEAT, FIX, BREAKING, "docs: a page")]
    assert versions == ["0.1.1.dev1", "0.2.0.dev2", "0.2.0.dev3", "0.2.0.dev4", "0.2.0.dev5"]
    repository.git("tag", "v1.0.0")
    versions = [repository.commit(message) for message in (FIX, FEAT, BREAKING, FIX)]
    assert versions == ["1.0.1.dev1", "1.1.0.dev2", "2.0.0.dev3", "2.0.0.dev4"]


def test_versions_grow_with_every_commit(repository: Repository):
    from packaging.version import Version

    repository.commit("chore: start")
    versions = []
    for i, message in enumerate([*MESSAGES, *reversed(MESSAGES)]):
        versions.append(Version(repository.commit(message)))
        if i % 7 == 6:
            release = ".".join(map(str, version.read(repository.path).next))
            repository.git("tag", f"v{release}")
            versions.append(Version(release))
    assert versions == sorted(set(versions))
    assert all(v.local is None for v in versions)


def test_merged_commits_count_and_tags_on_other_branches_do_not(repository: Repository):
    repository.commit("chore: start")
    repository.git("tag", "v1.0.0")
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit(FEAT)
    repository.git("tag", "v7.0.0-side")
    repository.git("checkout", "--quiet", "-b", "other", "v1.0.0")
    repository.commit(BREAKING)
    repository.git("tag", "v9.0.0")
    repository.git("checkout", "--quiet", "main")
    assert repository.commit(FIX) == "1.0.1.dev1"
    repository.git("merge", "--quiet", "--no-ff", "-m", "Merge branch 'side'", "side")
    assert version.read(repository.path).version == "1.1.0.dev3"


def test_the_highest_release_counts_though_an_older_line_was_merged_later(repository: Repository):
    repository.commit("chore: start")
    repository.git("tag", "v1.0.0")
    repository.git("checkout", "--quiet", "-b", "old")
    repository.commit(FIX)
    repository.git("tag", "v1.0.1")
    repository.git("checkout", "--quiet", "main")
    repository.commit(FEAT)
    repository.git("tag", "v1.1.0")
    repository.commit(*[FIX] * 5)
    repository.git("merge", "--quiet", "--no-ff", "-m", "Merge branch 'old'", "old")
    assert version.read(repository.path).version == "1.1.1.dev7"


def test_a_change_that_is_not_committed_is_no_release(repository: Repository):
    (repository.path / "file").write_text("one")
    repository.git("add", "file")
    repository.commit("chore: start")
    repository.git("tag", "v1.2.3")
    (repository.path / "untracked").write_text("")
    assert version.read(repository.path).version == "1.2.3"
    (repository.path / "csrc").mkdir()
    (repository.path / "csrc/new.cu").write_text("")  # which wheels would have
    assert version.read(repository.path).version == "1.2.4.dev0"
    (repository.path / "csrc/new.cu").unlink()
    (repository.path / "file").write_text("two")
    assert version.read(repository.path).version == "1.2.4.dev0"


def test_what_a_build_leaves_in_a_package_is_no_change(repository: Repository):
    shutil.copy(ROOT / ".gitignore", repository.path)
    repository.git("add", ".")
    repository.commit("chore: start")
    repository.git("tag", "v1.2.3")
    (repository.path / "packages/cuops/dist").mkdir(parents=True)
    (repository.path / "packages/cuops/dist/cuops-1.2.3.tar.gz").write_text("")
    assert version.read(repository.path).version == "1.2.3"


def test_tags_that_are_no_releases_are_passed_over(repository: Repository):
    repository.commit("chore: start")
    for tag in ("v1.0.0rc1", "nightly-20261120", "v2", "1.0.0", "v1.0"):
        repository.git("tag", tag)
    assert repository.commit(FIX) == "0.1.0.dev2"


# What follows builds: the real packages and their build backend, in a repository of their own.


@pytest.fixture
def monorepo(repository: Repository) -> Repository:
    for name in ("build_backend", "csrc", "packages", "cuda.toml", "LICENSE"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "dist")
        shutil.copytree(source, repository.path / name, symlinks=True, ignore=ignore) if source.is_dir() else shutil.copy(source, repository.path)  # fmt: skip
    repository.git("add", ".")
    repository.commit("chore: start")
    return repository


def build(path: Path, out: Path, *kinds: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        *kinds,
        "-o",
        str(out),
        str(path),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def built(path: Path, out: Path, *kinds: str) -> set[str]:
    done = build(path, out, *kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name for file in out.iterdir()}


@pytest.mark.parametrize(
    ("tag", "messages", "expected"),
    [
        (None, [], "0.1.0.dev1"),
        (None, [FIX], "0.1.0.dev2"),
        (None, [FEAT], "0.1.0.dev2"),
        (None, [BREAKING], "0.1.0.dev2"),
        ("v1.2.3", [], "1.2.3"),
        ("v1.2.3", [FIX], "1.2.4.dev1"),
        ("v1.2.3", [FIX, FEAT], "1.3.0.dev2"),
        ("v1.2.3", [FEAT, BREAKING, FIX], "2.0.0.dev3"),
        ("v0.2.0", [BREAKING], "0.3.0.dev1"),
    ],
)
def test_two_packages_are_built_with_the_version_of_the_commit(monorepo, tmp_path, tag, messages, expected):
    if tag:
        monorepo.git("tag", "-a", tag, "-m", tag)
    monorepo.commit(*messages)
    core = built(monorepo.path / "packages/cuops", tmp_path / "core")
    assert core == {f"cuops-{expected}.tar.gz", f"cuops-{expected}-py3-none-any.whl"}
    backend = built(monorepo.path / "packages/cuops-cu121", tmp_path / "backend", "--sdist")
    assert backend == {f"cuops_cu121-{expected}.tar.gz"}


@pytest.mark.parametrize("tag", ["h100", "gpu-h100", "v2-draft", "v1.2.x", "v1.0.0+cu121"])
def test_a_tag_that_is_no_release_changes_nothing_that_is_built(monorepo, tmp_path, tag):
    monorepo.git("tag", "v1.2.3")
    monorepo.commit(FIX)
    monorepo.git("tag", tag)
    assert built(monorepo.path / "packages/cuops", tmp_path / "out", "--sdist") == {"cuops-1.2.4.dev1.tar.gz"}


def test_a_source_distribution_carries_its_version(monorepo, tmp_path):
    monorepo.commit(FEAT)
    (sdist,) = built(monorepo.path / "packages/cuops", tmp_path / "sdist", "--sdist")
    with tarfile.open(tmp_path / "sdist" / sdist) as archive:
        archive.extractall(tmp_path / "outside-git", filter="data")
        archive.extractall(monorepo.path / "inside-git", filter="data")  # whose version is another by now
    monorepo.git("tag", "v3.0.0")
    folder = sdist.removesuffix(".tar.gz")
    for place in (tmp_path / "outside-git", monorepo.path / "inside-git"):
        out = tmp_path / place.name / "dist"
        assert built(place / folder, out, "--wheel") == {"cuops-0.1.0.dev2-py3-none-any.whl"}


def test_a_shallow_clone_is_an_error_that_says_how_to_mend_it(monorepo, tmp_path):
    monorepo.commit(FIX, FEAT)
    command = ["git", "clone", "--quiet", "--depth=1", monorepo.path.as_uri(), str(tmp_path / "shallow")]
    subprocess.run(command, check=True, capture_output=True)
    done = build(tmp_path / "shallow/packages/cuops", tmp_path / "out", "--wheel")
    assert done.returncode != 0
    assert "git fetch --unshallow" in done.stdout + done.stderr
    with pytest.raises(version.VersionError, match="git fetch --unshallow --tags"):
        version.read(tmp_path / "shallow")
    version.git(tmp_path / "shallow", "fetch", "--quiet", "--unshallow", "--tags")
    assert version.read(tmp_path / "shallow").version == "0.1.0.dev3"
