"""The static index, as pip and a client of PEP 691 see it, and its retention."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import requests
from pypi_simple import PyPISimple
from small_wheels import ROWS, write_wheel

from release import ReleaseError, arguments, index, nightly, serve, wheels


@pytest.fixture
def url(tmp_path: Path):
    root = tmp_path / "index"
    root.mkdir()
    running = serve.server(root)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def add(root: Path, folder: Path) -> None:
    index.add(root, wheels.read_set(folder, list(ROWS)))


def download(url: str, *requirements: str, folder: Path) -> set[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--isolated",
        "--no-deps",
        "--no-cache-dir",
        "--index-url",
        f"{url}/simple/",
    ]
    subprocess.run([*command, "-d", str(folder), *requirements], check=True, capture_output=True)
    return {path.name for path in folder.iterdir()}


def test_pip_finds_the_newest_nightly_and_checks_its_hash(release, url, tmp_path):
    root = tmp_path / "index"
    for version in ("0.2.0.dev3", "0.2.0.dev12"):
        add(root, release(version))
    got = download(url, "--pre", "cuops", folder=tmp_path / "got")
    assert got == {"cuops-0.2.0.dev12-py3-none-any.whl"}
    (root / "files/cuops-0.2.0.dev12-py3-none-any.whl").write_bytes(b"not a wheel")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        download(url, "--pre", "cuops", folder=tmp_path / "again")
    assert b"HASH" in failure.value.stderr.upper()


@pytest.mark.parametrize("accept", ["application/vnd.pypi.simple.v1+json", "text/html"])
def test_both_forms_tell_the_same(release, url, tmp_path, accept):
    root = tmp_path / "index"
    add(root, release("0.2.0.dev3"))
    answer = requests.get(f"{url}/simple/cuops-cu121/", headers={"Accept": accept}, timeout=10)
    assert answer.headers["Content-Type"] == accept
    with PyPISimple(f"{url}/simple/") as client:
        (package,) = client.get_project_page("cuops-cu121", accept=accept).packages
        assert client.get_index_page(accept=accept).projects == ["cuops", "cuops-cu118", "cuops-cu121"]
        content = client.get_package_metadata(package)
    file = root / "files" / package.filename
    assert package.digests == {"sha256": wheels.sha256(file)}
    assert (package.requires_python, package.is_yanked) == (">=3.10", False)
    assert "Requires-Dist: cuops==0.2.0.dev3" in content
    assert requests.get(package.url, timeout=10).content == file.read_bytes()


def test_people_can_read_what_is_there(release, tmp_path):
    add(tmp_path / "index", release("0.2.0.dev3"))
    page = (tmp_path / "index/index.html").read_text()
    assert "Newest: 0.2.0.dev3" in page
    assert "pip install --pre --extra-index-url" in page


def test_retention_keeps_the_newest_of_every_project(release, tmp_path):
    root = tmp_path / "index"
    for number in (1, 2, 10, 11):
        add(root, release(f"0.2.0.dev{number}"))
    assert index.prune(root, 2) == ["0.2.0.dev1", "0.2.0.dev2"]
    assert list(map(str, index.versions(root))) == ["0.2.0.dev10", "0.2.0.dev11"]
    left = {path.name.removesuffix(".metadata").split("-")[1] for path in (root / "files").iterdir()}
    assert left == {"0.2.0.dev10", "0.2.0.dev11"}
    assert index.prune(root, 2) == []
    assert len(json.loads((root / "simple/cuops-cu118/index.json").read_text())["files"]) == 2
    assert index.prune(root, 2, room=1) == ["0.2.0.dev10"], "the newest alone, where there is no room for more"


def test_the_same_wheel_may_come_twice_and_another_under_its_name_may_not(release, tmp_path):
    root, folder = tmp_path / "index", release("0.2.0.dev3")
    add(root, folder)
    add(root, folder)
    (folder / "cuops-0.2.0.dev3-py3-none-any.whl").unlink()
    write_wheel(folder, "cuops", "0.2.0.dev3", "py3-none-any", requires="numpy")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ReleaseError, match="other bytes"):
        add(root, folder)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_a_version_is_there_once_the_backends_pages_are(release, tmp_path, monkeypatch):
    root, built, write = tmp_path / "index", release("0.2.0.dev3"), index._write

    def interrupted(path: Path, text: str) -> None:
        if path.parent.name != "cuops":
            raise KeyboardInterrupt
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(index, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add(root, built)
    assert index.versions(root) == []
    add(root, built)
    assert list(map(str, index.versions(root))) == ["0.2.0.dev3"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_address_for_pip_is_none_of_a_mirror(url, tmp_path, slash):
    """Nothing is there below simple/, of which a new index would begin."""
    with pytest.raises(ReleaseError, match="--mirror: expected the address above simple/"):
        index.mirror(f"{url}/simple{slash}", tmp_path / "index")


def test_the_folder_of_an_index_is_no_address_and_no_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for wrong in ("https://cuops.github.io/cuops/simple", str(tmp_path / "file")):
        with pytest.raises(SystemExit):
            arguments.nightly().parse_args(["--index", wrong])
        assert f"--index: expected a folder, got {wrong}" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["-r", "--find-links", "doctor", "-c"])
def test_a_wheel_that_does_not_install_or_load_ends_the_night_with_its_name(release, monkeypatch, capfd, step):
    def run(command, **options):
        done = [sys.executable, "-c", "import sys; sys.exit('libfoo.so.3 is missing')"] if step in command else ["true"]
        return subprocess_run(done, **options)

    subprocess_run = subprocess.run
    monkeypatch.setattr(nightly.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(nightly.subprocess, "run", run)
    with pytest.raises(ReleaseError, match=r"cuops-cu118 0\.2\.0\.dev3 does not install, load or compute"):
        nightly.try_out(release("0.2.0.dev3"), list(ROWS))
    assert "libfoo.so.3 is missing" in capfd.readouterr().err


def test_a_mirror_has_the_same_files_and_notices_others(release, url, tmp_path):
    root = tmp_path / "index"
    index.mirror(url, tmp_path / "none")
    assert index.projects(tmp_path / "none") == {}
    add(root, release("0.2.0.dev3"))
    index.mirror(url, tmp_path / "mirror")
    assert index.projects(tmp_path / "mirror") == index.projects(root)
    wheel = root / "files/cuops-0.2.0.dev3-py3-none-any.whl"
    before = wheel.read_bytes()
    wheel.write_bytes(b"not that wheel")
    with pytest.raises(ReleaseError, match="not the file that its page describes"):
        index.mirror(url, tmp_path / "another")
    assert index.projects(tmp_path / "another") == {}
    wheel.write_bytes(before)
    wheel.with_name(f"{wheel.name}.metadata").write_bytes(b"not that metadata")
    with pytest.raises(ReleaseError, match=r"whl\.metadata is not the file that its page describes"):
        index.mirror(url, tmp_path / "another")
    wheel.unlink()
    with pytest.raises(ReleaseError, match="404"):
        index.mirror(url, tmp_path / "another")
    assert not (tmp_path / "another").exists()  # which a night would go on from


def test_an_index_whose_page_is_no_json_is_named(url, tmp_path):
    page = tmp_path / "index/simple" / index.JSON_PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("<html>")
    with pytest.raises(ReleaseError, match=re.escape(url)):
        index.published(url)


def test_a_mirror_takes_an_empty_folder_and_leaves_one_with_other_files_alone(release, url, tmp_path):
    add(tmp_path / "index", release("0.2.0.dev3"))
    (tmp_path / "mirror").mkdir()
    index.mirror(url, tmp_path / "mirror")
    assert index.projects(tmp_path / "mirror") == index.projects(tmp_path / "index")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/page.html").write_text("")
    with pytest.raises(ReleaseError, match=r"other has files, and no index among them: --index takes an empty folder"):
        index.mirror(url, tmp_path / "other")
    assert [path.name for path in tmp_path.glob("other*")] == ["other"]


def test_a_night_with_nothing_new_builds_nothing(release, tmp_path, monkeypatch):
    root, rows = tmp_path / "index", list(ROWS)

    def decide(version: str, rows: list[str] = rows) -> str | None:
        monkeypatch.setattr(nightly, "read", lambda _: type("History", (), {"version": version}))
        return nightly.decide(tmp_path, index.projects(root), rows)

    assert decide("0.2.0.dev3") == "0.2.0.dev3"
    add(root, release("0.2.0.dev3"))
    assert decide("0.2.0.dev3") is None
    assert decide("0.2.0.dev3", [*rows, "cu999"]) == "0.2.0.dev3"
    assert decide("0.2.0.dev4") == "0.2.0.dev4"
    assert decide("0.2.0") is None, "a release is no nightly"


@pytest.mark.parametrize(
    ("version", "files"), [("0.2.0.dev3", 0), ("0.2.0.dev4", 6), ("0.2.0", 6)], ids=["published", "new", "a release"]
)
def test_a_night_fetches_the_files_of_the_index_only_to_go_on_from_them(
    release, url, tmp_path, monkeypatch, version, files
):
    add(tmp_path / "index", release("0.2.0.dev3"))
    monkeypatch.setattr(nightly, "read", lambda _: type("History", (), {"version": version}))
    words = ("decide", "--mirror", url, "--index", str(tmp_path / "mirror"), "--rows", *ROWS)
    monkeypatch.setattr(sys, "argv", ["nightly", *words])
    nightly.main()
    assert len(list(tmp_path.glob("mirror/files/*"))) == files


def test_files_that_are_gone_already_do_not_stop_retention(release, tmp_path):
    root = tmp_path / "index"
    for version in ("0.2.0.dev3", "0.2.0.dev4"):
        add(root, release(version))
    (root / "files/cuops-0.2.0.dev3-py3-none-any.whl").unlink()
    assert index.prune(root, 1) == ["0.2.0.dev3"]
    assert list(map(str, index.versions(root))) == ["0.2.0.dev4"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("foo.whl", b"", "no wheel has such a name"),
        ("cuops-0.2.0.dev3-py3-none-any.whl", b"half of a file", "not a whole wheel"),
        ("SHA256SUMS", b"abc a name with blanks\n", "expected a digest and a name in each line"),
    ],
)
def test_what_is_no_wheel_is_named(release, name, content, message):
    folder = release("0.2.0.dev3")
    (folder / name).write_bytes(content)
    with pytest.raises(ReleaseError, match=f"{name}: {message}"):
        wheels.check_sums(folder) if name == "SHA256SUMS" else wheels.read_set(folder, list(ROWS))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.2.0.dev4", "version=0.2.0.dev4\nsite=true\n"),
        ("0.2.0.dev3", "version=\nsite=\n"),
        ("0.2.0", "version=\nsite=true\n"),
    ],
    ids=["new", "published", "a release"],
)
def test_a_night_publishes_documentation_that_is_not_there_yet(release, tmp_path, monkeypatch, version, said):
    add(tmp_path / "index", release("0.2.0.dev3"))
    monkeypatch.setattr(nightly, "read", lambda _: type("History", (), {"version": version}))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "said"))
    monkeypatch.setattr(sys, "argv", ["nightly", "decide", "--index", str(tmp_path / "index"), "--rows", *ROWS])
    nightly.main()
    *outputs, date = (tmp_path / "said").read_text().splitlines(keepends=True)
    assert "".join(outputs) == said
    assert re.fullmatch(r"date=\d{8}\n", date)
