"""Publishing to a real index on loopback, and everything that must stop it before the first upload."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cuops_build import table
from small_wheels import ROWS, write_sums, write_wheel

from release import ReleaseError, github, publish, servers, wheels

NAMES = {"cuops", "cuops-cu118", "cuops-cu121"}


@pytest.fixture
def url(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TWINE_USERNAME", "test")
    monkeypatch.setenv("TWINE_PASSWORD", "test")
    with servers.package_index(tmp_path / "index") as address:
        yield address


def run(folder: Path, url: str, door: str | None = None) -> list[str]:
    return publish.publish(folder, ["--repository-url", door or url], f"{url}/simple/", rows=list(ROWS))


def there(url: str) -> set[str]:
    return set(publish.published(f"{url}/simple/", NAMES))


def test_a_release_goes_up_once_the_core_first(release, url):
    folder = release("1.0.0")
    done = run(folder, url)
    assert done[0] == "cuops-1.0.0-py3-none-any.whl"
    assert set(done) == there(url) == {path.name for path in folder.glob("*.whl")}
    assert run(folder, url) == []
    publish.await_all(folder, f"{url}/simple/", list(ROWS), seconds=0)


def test_wheels_of_no_release_do_not_go_up(release, url):
    with pytest.raises(ReleaseError, match=r"1\.0\.0\.dev3 is no release"):
        run(release("1.0.0.dev3"), url)
    assert there(url) == set()


def test_what_is_there_already_is_not_signed_again(release, url, monkeypatch):
    folder = release("1.0.0")
    run(folder, url)
    monkeypatch.setattr(publish.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(publish, "twine", lambda *_: None)
    assert publish.publish(folder, ["--repository-url", url], f"{url}/simple/", True, list(ROWS)) == []


def test_an_index_of_ones_own_needs_its_pages(release, url, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["publish", "--index", url, "--dist", str(release("1.0.0"))])
    with pytest.raises(SystemExit, match="--index needs --simple URL"):
        publish.main()
    assert there(url) == set()


def test_an_index_that_does_not_answer_after_the_uploads_is_asked_again(release, url, monkeypatch):
    folder = release("1.0.0")
    run(folder, url)
    down = [f"http://127.0.0.1:{servers.free_port()}/simple/"] * 2
    ask = publish.published
    monkeypatch.setattr(publish.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(publish, "published", lambda simple, names: ask(down.pop() if down else simple, names))
    publish.await_all(folder, f"{url}/simple/", list(ROWS))
    down += [f"http://127.0.0.1:{servers.free_port()}/simple/"]
    with pytest.raises(ReleaseError, match=r"all is uploaded, but the index does not show cuops-1\.0\.0-py3-.*refused"):
        publish.await_all(folder, f"{url}/simple/", list(ROWS), seconds=0)


@pytest.mark.parametrize("uploads", [0, 1, 2])
def test_a_rerun_finishes_what_broke_in_the_middle(release, url, uploads):
    folder = release("1.0.0")
    with servers.jamming_door(url, uploads) as door, pytest.raises(ReleaseError, match="run the same command again"):
        run(folder, url, door)
    assert len(there(url)) == uploads
    with pytest.raises(ReleaseError, match="does not show"):
        publish.await_all(folder, f"{url}/simple/", list(ROWS), seconds=0)
    assert len(run(folder, url)) == 3 - uploads
    assert len(there(url)) == 3


def spoil_bytes(folder: Path) -> None:
    (folder / "cuops-1.0.0-py3-none-any.whl").write_bytes(b"other")


def spoil_by_absence(folder: Path) -> None:
    next(folder.glob("cuops_cu118*")).unlink()
    write_sums(folder)


def spoil_by_a_stranger(folder: Path) -> None:
    write_wheel(folder, "cuops-cu999", "1.0.0", "py3-none-manylinux_2_17_x86_64", "cuops==1.0.0")
    write_sums(folder)


def spoil_by_half_a_machine(folder: Path) -> None:
    write_wheel(folder, "cuops-cu121", "1.0.0", "py3-none-manylinux_2_17_aarch64", "cuops==1.0.0")
    write_sums(folder)


def spoil_down_to_the_core(folder: Path) -> None:
    for backend in folder.glob("cuops_*"):
        backend.unlink()
    write_sums(folder)


def spoil_platforms(folder: Path) -> None:
    for backend in folder.glob("cuops_*"):
        backend.rename(folder / backend.name.replace("manylinux_2_17", "linux"))
    write_sums(folder)


def spoil_pythons(folder: Path) -> None:
    for backend in folder.glob("cuops_*"):
        backend.rename(folder / backend.name.replace("py3-none", "cp312-cp312"))
    write_sums(folder)


def spoil_versions(folder: Path) -> None:
    write_wheel(folder, "cuops", "1.0.1", "py3-none-any")
    write_sums(folder)


def spoil_a_source_distribution(folder: Path) -> None:
    (folder / "cuops-1.0.1.tar.gz").write_bytes(b"")
    write_sums(folder)


def spoil_pin(folder: Path) -> None:
    write_wheel(folder, "cuops-cu121", "1.0.0", "py3-none-manylinux_2_17_x86_64", "cuops>=1.0.0")
    write_sums(folder)


def spoil_bill(folder: Path) -> None:
    write_wheel(folder, "cuops", "1.0.0", "py3-none-any", bill=False)
    write_sums(folder)


def spoil_sums(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_bytes, "not the files that"),
        (spoil_by_absence, "not the wheels of one whole release: cuops-cu118 for x86_64"),
        (spoil_by_a_stranger, "cuops-cu999 for x86_64"),
        (spoil_by_half_a_machine, "cuops-cu118 for aarch64"),
        (spoil_down_to_the_core, "cuops-cu118 for aarch64, cuops-cu118 for x86_64, cuops-cu121 for aarch64"),
        (spoil_platforms, "cuops-cu118 for linux_x86_64"),
        (spoil_pythons, "cuops-cu118 for cp312-cp312-manylinux_2_17_x86_64"),
        (spoil_versions, r"the wheels of one version, found 1\.0\.0, 1\.0\.1"),
        (spoil_a_source_distribution, r"of one version, found 1\.0\.0, 1\.0\.1"),
        (spoil_pin, r"does not require cuops==1\.0\.0"),
        (spoil_bill, "0 bills of materials"),
        (spoil_sums, "SHA256SUMS is missing"),
    ],
)
def test_nothing_is_uploaded_of_a_release_that_is_not_whole(release, url, spoil, message):
    folder = release("1.0.0")
    spoil(folder)
    with pytest.raises(ReleaseError, match=message):
        run(folder, url)
    assert there(url) == set()


def test_a_whole_release_has_all_rows_for_both_processors(release):
    folder = release("1.0.0")
    for row in table.read(wheels.ROOT / "cuda.toml"):
        write_wheel(folder, f"cuops-{row}", "1.0.0", "py3-none-manylinux_2_17_x86_64", "cuops==1.0.0")
    with pytest.raises(ReleaseError, match="cuops-cu118 for aarch64, .*cuops-cu130 for aarch64$"):
        wheels.read_set(folder)
    for row in table.read(wheels.ROOT / "cuda.toml"):
        write_wheel(folder, f"cuops-{row}", "1.0.0", "py3-none-manylinux_2_17_aarch64", "cuops==1.0.0")
    assert len(wheels.read_set(folder)) == 1 + 2 * len(table.read(wheels.ROOT / "cuda.toml"))


def test_metadata_that_is_none_is_said_of_its_wheel(release):
    folder = release("1.0.0")
    write_wheel(folder, "cuops-cu121", "1.0.0", "py3-none-manylinux_2_17_x86_64", "cuops ==")
    with pytest.raises(ReleaseError, match=r"cuops_cu121-1\.0\.0-.*whl: .*'cuops ==' is invalid for 'requires-dist'"):
        wheels.read_set(folder, list(ROWS))


def test_metadata_that_an_index_would_refuse_stops_the_upload(release, url, monkeypatch):
    folder = release("1.0.0")
    path = folder / "cuops-1.0.0-py3-none-any.whl"
    original = wheels.zipfile.ZipFile
    write_wheel(folder, "cuops", "1.0.0", "py3-none-any")
    with original(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with original(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(
                name, content.replace(b"text/markdown", b"text/x-rst").replace(b"# A test", b"A\n=\n\n.. no::")
            )
    write_sums(folder)
    with pytest.raises(ReleaseError, match="twine check failed"):
        run(folder, url)
    assert there(url) == set()


def test_other_bytes_under_a_name_that_is_taken_stop_everything(release, url):
    folder = release("1.0.0")
    with servers.jamming_door(url, uploads=1) as door, pytest.raises(ReleaseError):
        run(folder, url, door)
    write_wheel(folder, "cuops", "1.0.0", "py3-none-any", requires="numpy")
    write_sums(folder)
    with pytest.raises(ReleaseError, match="with other bytes"):
        run(folder, url)
    assert len(there(url)) == 1


def test_an_index_that_tells_no_digest_is_said_so(release, url, monkeypatch):
    monkeypatch.setattr(publish, "published", lambda *_: {"cuops-1.0.0-py3-none-any.whl": None})
    with pytest.raises(ReleaseError, match=r"cuops-1\.0\.0-py3-none-any\.whl is on the index without a SHA-256"):
        run(release("1.0.0"), url)


def test_an_index_that_is_down_is_said_so(release):
    with pytest.raises(ReleaseError, match="does not answer, so nothing is published"):
        run(release("1.0.0"), f"http://127.0.0.1:{servers.free_port()}")


def test_cibuildwheel_reads_its_settings():
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux"]
    command += ["--config-file", "pyproject.toml", "packages/cuops-cu121"]
    said = subprocess.run(command, cwd=wheels.ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["cp312-manylinux_x86_64"]


def test_the_bill_of_materials_is_valid_cyclonedx():
    from cuops_build import sbom
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill = sbom.cyclonedx("cuops-cu121", "1.0.0", "Apache-2.0 AND MIT", ["nvidia-cuda-nvrtc-cu12==12.1.105"])
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.decode()) is None
    names = {component["name"] for component in json.loads(bill)["components"]}
    assert names == {"nvidia-cuda-nvrtc-cu12", "apache-tvm-ffi", "ziglang"}
    assert bill == sbom.cyclonedx("cuops-cu121", "1.0.0", "Apache-2.0 AND MIT", ["nvidia-cuda-nvrtc-cu12==12.1.105"])


def test_a_changelog_that_github_does_not_take_ends_with_where_the_rest_is():
    line = "* a change\n"
    assert github.shortened(line * 10, "v1.0.0") == line * 10
    short = github.shortened(line * 20_000, "v1.0.0")
    assert len(short) <= github.MOST_CHARACTERS
    assert set(short.splitlines()) == {line.strip(), "", "The rest is in CHANGELOG.md of v1.0.0."}
