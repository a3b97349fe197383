"""Cutting a release: version, changelog, commit and tag, together or not at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cuops_build.version import VersionError, git, read

from release import ReleaseError, cut

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch) -> Path:
    """A clone with an origin, one release and a fix since."""
    origin, path = tmp_path / "origin.git", tmp_path / "clone"
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A test")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "test@localhost")
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", str(origin))
    git(tmp_path, "clone", "--quiet", str(origin), str(path))
    git(path, "checkout", "--quiet", "-B", "main")
    shutil.copy(ROOT / "cliff.toml", path)
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "feat: a start")
    git(path, "tag", "v0.3.0")
    git(path, "commit", "--quiet", "--allow-empty", "-m", "fix(nn): a fault")
    git(path, "push", "--quiet", "origin", "main", "v0.3.0")
    monkeypatch.chdir(path)
    return path


def state(clone: Path) -> list[str]:
    """All that cutting a release may change."""
    return [
        *(git(where, "for-each-ref") for where in (clone, clone.parent / "origin.git")),
        git(clone, "status", "--porcelain"),
    ]


def test_version_changelog_and_tag_agree_here_and_at_the_origin(clone):
    assert cut.cut(clone, "", "origin") == "v0.3.1"
    assert read(clone).version == "0.3.1"
    assert "- **nn**: a fault" in cut.notes((clone / "CHANGELOG.md").read_text(), "0.3.1")
    assert "- a start" in cut.notes((clone / "CHANGELOG.md").read_text(), "0.3.0")
    origin = clone.parent / "origin.git"
    assert (
        git(origin, "rev-parse", "v0.3.1^{commit}")
        == git(origin, "rev-parse", "main")
        == git(clone, "rev-parse", "HEAD")
    )
    assert git(clone, "show", "--name-only", "--format=%s").split("\n\n") == [
        "chore(release): v0.3.1",
        "CHANGELOG.md\n",
    ]


def test_the_changelog_leaves_out_the_commits_of_releases_alone(clone):
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "chore(release): a step of its own")
    cut.cut(clone, "", None)
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "fix: more")
    cut.cut(clone, "", None)
    changelog = (clone / "CHANGELOG.md").read_text()
    assert "- **release**: a step of its own" in changelog
    assert "- **release**: v0.3.1" not in changelog


def test_no_hook_changes_a_release(clone):
    for name in ("pre-commit", "prepare-commit-msg", "commit-msg", "post-commit"):
        hook = clone / ".git/hooks" / name
        hook.write_text("#!/bin/sh\necho changed > cliff.toml\nexit 1\n")
        hook.chmod(0o755)
    cut.cut(clone, "", "origin")
    assert git(clone, "status", "--porcelain") == ""


def test_a_release_is_of_the_repository_wherever_the_process_is(clone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cut.cut(clone, "", "origin") == "v0.3.1"
    assert "- **nn**: a fault" in (clone / "CHANGELOG.md").read_text()


def test_a_higher_version_may_be_given_and_a_lower_one_not(clone):
    with pytest.raises(ReleaseError, match=r"v0\.2\.9 does not follow from the commits, which lead to v0\.3\.1"):
        cut.cut(clone, "0.2.9", None)
    for version in ("1.0", "v1.0.0"):
        with pytest.raises(ReleaseError, match=f"--version: expected X.Y.Z, such as 1.0.0, got {version}"):
            cut.cut(clone, version, None)
    assert cut.cut(clone, "1.0.0", None) == "v1.0.0"


def test_there_has_to_be_something_to_release(clone):
    cut.cut(clone, "", None)
    with pytest.raises(ReleaseError, match=r"this commit is 0\.3\.1 already"):
        cut.cut(clone, "", None)


def undo(clone, said):
    """Runs the command that a message names."""
    subprocess.run(said.partition("To undo it: ")[2], shell=True, cwd=clone, check=True, capture_output=True)


@pytest.mark.parametrize("version", ["", "0.3.1"])
def test_a_release_that_was_made_here_is_pushed_by_another_call(clone, version):
    tag = cut.cut(clone, "", None)
    made = git(clone, "rev-parse", "HEAD")
    with pytest.raises(ReleaseError, match="this commit is 0\\.3\\.1 already"):
        cut.cut(clone, "", None)
    with pytest.raises(ReleaseError, match=r"v0\.3\.1 was made here and is not pushed yet"):
        cut.cut(clone, "0.4.0", "origin")
    assert cut.cut(clone, version, "origin") == tag
    origin = clone.parent / "origin.git"
    assert git(origin, "rev-parse", "v0.3.1^{commit}") == git(origin, "rev-parse", "main") == made
    with pytest.raises(ReleaseError, match="already"):
        cut.cut(clone, "", "origin")


@pytest.mark.parametrize("more", [False, True])
def test_a_release_that_was_made_here_is_undone_by_what_is_printed(clone, monkeypatch, capsys, more):
    monkeypatch.setattr("sys.argv", ["release"])
    before = git(clone, "rev-parse", "HEAD")
    cut.main()
    if more:
        git(clone, "commit", "--quiet", "--allow-empty", "-m", "feat: more")
    undo(clone, capsys.readouterr().out)
    assert git(clone, "rev-parse", "HEAD~" if more else "HEAD") == before
    assert git(clone, "tag").split() == ["v0.3.0"]
    git(clone, "push", "--quiet", "origin", "main")
    assert cut.cut(clone, "", "origin") == ("v0.4.0" if more else "v0.3.1")


def test_a_release_commit_that_lost_its_tag_is_no_release(clone):
    cut.cut(clone, "", None)
    git(clone, "tag", "-d", "v0.3.1")
    git(clone, "push", "--quiet", "origin", "main")
    assert cut.cut(clone, "", "origin") == "v0.3.1"
    assert git(clone, "log", "-2", "--format=%s").splitlines() == ["chore(release): v0.3.1"] * 2


def test_a_release_made_by_hand_is_not_pushed(clone):
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "chore(release): v9.9.9")
    git(clone, "tag", "-a", "v9.9.9", "-m", "by hand")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"no section 9\.9\.9: v9\.9\.9 was not made by nox -s release"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before


@pytest.mark.parametrize("empty", [False, True])
def test_a_release_is_made_on_a_branch(clone, empty):
    git(clone, "checkout", "--quiet", "--detach")
    remote = str(clone.parent / "empty.git") if empty else None
    if remote:
        git(clone, "init", "--quiet", "--bare", remote)
        git(clone, "push", "--quiet", remote, "v0.3.0")
    before = state(clone)
    with pytest.raises(ReleaseError, match="on a branch, and no branch is checked out"):
        cut.cut(clone, "", remote)
    assert state(clone) == before


@pytest.mark.parametrize("commit", ["HEAD~", "HEAD"])
def test_a_tag_of_this_clone_alone_leads_to_no_release(clone, commit):
    """Versions follow from tags, and the changelog has a section for each."""
    git(clone, "tag", "-a", "v5.0.0", "-m", "by hand", commit)
    git(clone, "tag", "other")  # is no version
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"a tag v5\.0\.0 that origin has not, .*: git tag -d v5\.0\.0, or"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before
    git(clone, "tag", "-d", "v5.0.0")
    assert cut.cut(clone, "", "origin") == "v0.3.1"


def test_a_tag_that_the_origin_has_elsewhere_leads_to_no_release(clone):
    git(clone, "tag", "--force", "v0.3.0", "HEAD")
    git(clone, "push", "--quiet", "origin", "v0.3.0~:refs/tags/another")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"origin has v0\.3\.0 elsewhere: git tag -d v0\.3\.0 && git pull --tags"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before


def test_of_two_releases_at_once_one_is_undone(clone, tmp_path, monkeypatch):
    """What the later one reads brings it to where the first one is."""
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", str(tmp_path / "origin.git"), str(other))
    git(other, "commit", "--quiet", "--allow-empty", "-m", "fix: another")
    git(other, "push", "--quiet", "origin", "main")
    cut.cut(clone, "", None)
    monkeypatch.chdir(other)
    cut.cut(other, "", "origin")
    monkeypatch.chdir(clone)
    with pytest.raises(ReleaseError, match=r"origin has v0\.3\.1 elsewhere: ") as raised:
        cut.cut(clone, "", "origin")
    undo(clone, "To undo it: " + str(raised.value).partition("elsewhere: ")[2])
    assert git(clone, "rev-parse", "HEAD", "v0.3.1") == git(other, "rev-parse", "HEAD", "v0.3.1")


def test_a_dirty_tree_is_left_as_it_is(clone):
    (clone / "cliff.toml").write_text("")
    (clone / "csrc").mkdir()
    (clone / "csrc/new.cu").write_text("")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"not committed \(cliff.toml, csrc/new.cu\): .* git stash -u"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before


def test_a_tag_that_exists_at_the_origin_is_not_moved(clone):
    elsewhere = git(clone, "commit-tree", "HEAD^{tree}", "-m", "chore: elsewhere").strip()
    git(clone, "push", "--quiet", "origin", f"{elsewhere}:refs/tags/v0.3.1")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"such as v0\.3\.1: git pull --tags origin main"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before
    git(clone, "tag", "v0.3.1", elsewhere)
    with pytest.raises(ReleaseError, match=r"v0\.3\.1 exists and is never moved"):
        cut.cut(clone, "", None)


def test_a_run_that_is_run_again_has_the_tag_that_it_made(clone):
    before = git(clone, "rev-parse", "HEAD").strip()
    assert cut.cut(clone, "", "origin") == "v0.3.1"
    made = git(clone, "rev-parse", "HEAD").strip()
    git(clone, "reset", "--quiet", "--hard", before)  # as the checkout of the run leaves it
    assert cut.cut(clone, "", "origin") == "v0.3.1"
    assert (git(clone, "rev-parse", "HEAD").strip(), git(clone, "rev-parse", "v0.3.1^{commit}").strip()) == (
        before,
        made,
    )


@pytest.mark.parametrize("fault", ["a hook", "a commit that is not here", "the same tag meanwhile", "no answer"])
def test_nothing_stays_behind_after_a_push_that_was_refused(clone, monkeypatch, fault):
    origin = clone.parent / "origin.git"
    if fault == "a hook":
        (origin / "hooks/pre-receive").write_text("#!/bin/sh\nexit 1\n")
        (origin / "hooks/pre-receive").chmod(0o755)
    elif fault != "a commit that is not here":

        def broken(root, *arguments):
            if arguments[0] == "push" and fault == "the same tag meanwhile":
                git(root, "push", "--quiet", "origin", "HEAD~:refs/tags/v0.3.1")
            elif arguments[0] == "push":
                monkeypatch.setattr(cut, "tags_of", lambda *_: git(root, "ls-remote", "nowhere"))
                raise VersionError("git push --atomic failed")
            return git(root, *arguments)

        monkeypatch.setattr(cut, "git", broken)
    else:
        elsewhere = git(clone, "commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "fix: meanwhile").strip()
        git(clone, "push", "--quiet", "origin", f"{elsewhere}:refs/heads/main")
        git(clone, "fetch", "--quiet", "origin")
    before = state(clone)
    with pytest.raises(VersionError, match="push --atomic"):
        cut.cut(clone, "", "origin")
    if fault == "the same tag meanwhile":
        git(origin, "tag", "-d", "v0.3.1")
    assert state(clone) == before
    assert not (clone / "CHANGELOG.md").exists()


def test_a_branch_of_the_name_of_the_tag_at_the_origin_stops_the_release(clone):
    git(clone, "push", "--quiet", "origin", "HEAD:refs/heads/v0.3.1", "HEAD:refs/heads/fix/v0.3.1")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"origin has a branch v0\.3\.1, which would be taken for the tag"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before
    git(clone, "push", "--quiet", "--delete", "origin", "refs/heads/v0.3.1")
    assert cut.cut(clone, "", "origin") == "v0.3.1"


@pytest.mark.parametrize("where", ["made by this call", "made by an earlier call", "another repository"])
def test_a_release_takes_no_commit_along_that_the_origin_has_not(clone, where):
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "feat: not looked at yet")
    remote = "origin"
    if where == "another repository":
        git(clone, "push", "--quiet", "origin", "main")
        remote = str(clone.parent / "empty.git")
        git(clone, "init", "--quiet", "--bare", "--initial-branch=main", remote)
        git(clone, "push", "--quiet", remote, "v0.3.0")
    elif where == "made by an earlier call":
        cut.cut(clone, "", None)
    before = state(clone)
    with pytest.raises(ReleaseError, match=rf"{remote}'s branch main has not .*feat: not looked at yet"):
        cut.cut(clone, "", remote)
    assert state(clone) == before
    git(clone, "push", "--quiet", remote, ("HEAD~" if where == "made by an earlier call" else "HEAD") + ":main")
    assert cut.cut(clone, "", remote) == "v0.4.0"


def test_a_clone_that_does_not_know_of_the_origins_newest_commit_takes_none_along_either(clone, tmp_path):
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", str(tmp_path / "origin.git"), str(other))
    git(other, "commit", "--quiet", "--allow-empty", "-m", "fix: meanwhile")
    git(other, "push", "--quiet", "origin", "main")
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "feat: not looked at yet")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"origin's branch main has not .*feat: not looked at yet"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before


def test_a_clone_without_the_tags_of_its_origin_releases_nothing(clone):
    git(clone, "tag", "-d", "v0.3.0")
    before = state(clone)
    with pytest.raises(ReleaseError, match=r"such as v0\.3\.0: git pull --tags origin main"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before


def test_a_push_whose_answer_was_lost_is_a_release(clone, monkeypatch):
    def cut_off(root, *arguments):
        done = git(root, *arguments)
        if arguments[0] == "push":
            raise VersionError("the connection is lost")
        return done

    monkeypatch.setattr(cut, "git", cut_off)
    assert cut.cut(clone, "", "origin") == "v0.3.1"
    assert git(clone.parent / "origin.git", "rev-parse", "v0.3.1^{commit}") == git(clone, "rev-parse", "HEAD")


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("pushed", [False, True])
def test_an_interrupt_leaves_nothing_or_a_whole_release(clone, monkeypatch, pushed, earlier):
    if earlier:
        cut.cut(clone, "", None)

    def interrupted(root, *arguments):
        done = git(root, *arguments) if arguments[0] != "push" or pushed else ""
        if arguments[0] == "push":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(cut, "git", interrupted)
    monkeypatch.setattr("sys.argv", ["release", "--push", "origin"])
    before = state(clone)
    if pushed:
        cut.main()
        assert git(clone.parent / "origin.git", "rev-parse", "v0.3.1^{commit}") == git(clone, "rev-parse", "HEAD")
    else:
        with pytest.raises(SystemExit, match="interrupted; nothing is pushed"):
            cut.main()
        assert state(clone) == before


@pytest.mark.parametrize("where", ["the branch feature", "no branch"])
def test_releases_are_made_on_the_default_branch_of_the_origin(clone, where):
    git(clone, "checkout", "--quiet", *(["-b", "feature"] if where != "no branch" else ["--detach"]))
    before = state(clone)
    with pytest.raises(ReleaseError, match=f"on origin's branch main, and {where} is checked out"):
        cut.cut(clone, "", "origin")
    assert state(clone) == before


def test_a_tag_that_was_pushed_is_checked_before_it_is_built(clone):
    tag = cut.cut(clone, "", "origin")
    cut.check(clone, tag)
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "fix: more")
    with pytest.raises(ReleaseError, match=r"v0\.3\.1 is not the version of this commit"):
        cut.check(clone, tag)
    git(clone, "tag", "-a", "v0.3.2", "-m", "by hand")
    with pytest.raises(ReleaseError, match=r"CHANGELOG\.md has no section 0\.3\.2"):
        cut.check(clone, "v0.3.2")
    (clone / "CHANGELOG.md").write_text("## 0.3.3 - today\n")
    git(clone, "commit", "--quiet", "-am", "chore(release): v0.3.3")
    git(clone, "tag", "-a", "v0.3.3", "-m", "by hand")
    with pytest.raises(ReleaseError, match=r"v0\.3\.3 has commits that origin/main has not"):
        cut.check(clone, "v0.3.3")


def test_a_tag_lower_than_the_commits_ask_for_cannot_be_released(clone):
    (clone / "CHANGELOG.md").write_text("## 0.3.1 - today\n\n## 0.4.0 - today\n")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "-m", "feat!: another argument")
    git(clone, "push", "--quiet", "origin", "main")
    git(clone, "tag", "v0.3.1")
    with pytest.raises(ReleaseError, match=r"v0\.3\.1 does not follow from the commits, which lead to v0\.4\.0"):
        cut.check(clone, "v0.3.1")
    git(clone, "tag", "v0.4.0")
    cut.check(clone, "v0.4.0")
