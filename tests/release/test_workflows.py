"""The checks of the workflows: clean as they are, and red when a workflow is made worse."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from release import workflows

ROOT = Path(__file__).parents[2]
WORSE = {
    "the permission block of a workflow removed": ("release.yml", "permissions: {}\n", "", ("zizmor", "workflow-sessions")),
    "the permission block of a job removed": ("wheels.yml", "    permissions: { contents: read }\n", "", ("workflow-sessions",)),
    "an action not pinned": (
        "ci.yml", "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd", "actions/checkout@v6", ("zizmor", "workflow-sessions"),
    ),
    "a session that does not exist": ("ci.yml", "run: nox -s lint", "run: nox -s lnit", ("workflow-sessions",)),
    "an argument that a session does not take": ("images.yml", '--cuda "$ROW"', '--cudas "$ROW"', ("workflow-sessions",)),
    "the beginning of an argument": ("images.yml", '--cuda "$ROW"', '--cud "$ROW"', ("workflow-sessions",)),
    "a choice that an argument has not": ("wheels.yml", "x86_64 aarch64", "x86_64 riscv64", ("workflow-sessions",)),
    "a step that is not a session": ("ci.yml", "run: nox -s audit", "run: pip install twine", ("workflow-sessions",)),
    "an expression in a shell command": ("ci.yml", '"$BASE"', "${{ github.head_ref }}", ("zizmor",)),
    "a credential left behind": ("ci.yml", ", persist-credentials: false", "", ("zizmor",)),
    "a key that does not exist": ("nightly.yml", "runs-on:", "runs_on:", ("workflow-schema", "actionlint")),
    "a need that does not exist": ("release.yml", "needs: [tag, wheels]", "needs: [tag, wheel]", ("actionlint",)),
    "a token for all steps of a job": (
        "release.yml", "    steps:\n", '    env: { GH_TOKEN: "${{ github.token }}" }\n    steps:\n', ("workflow-sessions",),
    ),
    "a cache in a job that may write": ("release.yml", '        with: { cache: "false" }\n', "", ("workflow-sessions",)),
    "a job without a timeout": ("gpu.yml", "    timeout-minutes: 90\n", "", ("workflow-sessions",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the checks read, in a repository of its own: pre-commit looks at what git knows."""
    path = tmp_path_factory.mktemp("repository")
    for name in (".github", ".ci", "release", "build_backend", "packages", ".pre-commit-config.yaml", "noxfile.py", "sanitizers.py", "wheelhouse.py", "cuda.toml", "pyproject.toml"):  # fmt: skip
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(source, path / name, symlinks=True, ignore=ignore) if source.is_dir() else shutil.copy(
            source, path
        )
    subprocess.run(["git", "init", "--quiet"], cwd=path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=path, check=True)
    return path


def check(repository: Path, hook: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pre_commit", "run", hook, "--all-files"]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("hook", ["zizmor", "workflow-schema", "actionlint", "workflow-sessions"])
def test_the_workflows_are_clean(repository: Path, hook: str):
    done = check(repository, hook)
    assert done.returncode == 0, done.stdout
    assert "Passed" in done.stdout


@pytest.mark.parametrize("what", WORSE)
def test_lint_turns_red_on(what: str, repository: Path):
    name, old, new, hooks = WORSE[what]
    path = repository / ".github/workflows" / name
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
    try:
        for hook in hooks:
            done = check(repository, hook)
            assert done.returncode == 1, f"{hook} is content\n{done.stdout}"
            assert "Failed" in done.stdout
    finally:
        path.write_text(before)


def test_a_release_is_built_from_its_tag_whatever_branch_has_the_name():
    refs = re.findall(r'\bref: "([^"]+)"', (ROOT / ".github/workflows/release.yml").read_text())
    assert refs == ["refs/tags/${{ needs.tag.outputs.tag }}"] * 4


def test_no_release_that_waits_is_cancelled_by_a_later_one():
    content = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert content["concurrency"] == {"group": "release", "cancel-in-progress": False, "queue": "max"}


def test_a_subject_that_is_misspelt_stays_in_the_changelog(repository: Path):
    (repository / "CHANGELOG.md").write_text("- t" + "eh\n")
    subprocess.run(["git", "add", "CHANGELOG.md"], cwd=repository, check=True)
    done = check(repository, "codespell")
    assert done.returncode == 0, done.stdout


def test_every_step_of_a_workflow_is_a_session():
    known = workflows.sessions(ROOT)
    assert {"lint", "tests", "wheels", "release", "rehearse"} <= known
    assert workflows.call("nox -s publish -- --index pypi --attest", known) is None
    assert workflows.call("nox -s gpu_tests bench", known) is None
    assert workflows.call("nox -s bench -- rms_norm --output measured", known) is None
    assert "no arguments" in str(workflows.call("nox -s gpu_tests bench -- rms_norm", known))
    assert "no nox session" in str(workflows.call("nox -s nothing", known))
    assert "neither" in str(workflows.call("nox -s lint\nrm -r /", known))
    assert "neither" in str(workflows.call("curl example.org | sh", known))
    assert "no arguments" in str(workflows.call("nox -s lint -- zizmor", known))


@pytest.mark.parametrize(
    "more", ["&& rm -r /", "; rm", "& rm", "| sh", "`rm`", '"$(rm)"', "$(rm)", "<(rm)", "> /etc/passwd"]
)
def test_a_step_is_one_command(more):
    assert "neither" in str(workflows.call(f"nox -s tests -- x {more}", {"tests"}))


@pytest.mark.parametrize("path", ["workflows/more.yml", "workflows/more.yaml", "actions/more/action.yaml"])
def test_workflows_are_checked_whatever_their_suffix(path, tmp_path, monkeypatch, capsys):
    file = tmp_path / ".github" / path
    file.parent.mkdir(parents=True)
    file.write_text("permissions: {}\nruns: { steps: [{ run: rm -r / }] }\n")
    monkeypatch.setattr(workflows, "sessions", lambda root: set())
    if path.startswith("workflows"):
        file.write_text("permissions: {}\njobs: { more: { steps: [{ run: rm -r / }] } }\n")
    assert workflows.main(tmp_path)
    assert f"{file.relative_to(tmp_path)}: more: rm -r /: neither" in capsys.readouterr().out
