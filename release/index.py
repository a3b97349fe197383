"""A package index of static files: PEP 503 pages, PEP 691 JSON, and the metadata of each wheel (PEP 658)."""

from __future__ import annotations

import contextlib
import hashlib
import html
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import requests
from packaging.version import Version
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from . import ReleaseError, wheels

JSON_PAGE, HTML_PAGE = "index.json", "index.html"
META = {"api-version": "1.1"}
STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#eee;padding:.2em}"


def projects(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The files of each project, as PEP 691 describes them."""
    pages = sorted((root / "simple").glob(f"*/{JSON_PAGE}"))
    return {page.parent.name: json.loads(page.read_text())["files"] for page in pages}


def versions(root: Path) -> list[Version]:
    """The versions of the core, oldest first."""
    return sorted({Version(file["filename"].split("-")[1]) for file in projects(root).get("cuops", [])})


def add(root: Path, release: list[wheels.Wheel]) -> None:
    """Adds the wheels of a release, all or none; the same bytes may come twice, others under one name may not."""
    pages = projects(root)
    taken = {file["filename"]: file["hashes"]["sha256"] for files in pages.values() for file in files}
    for wheel in release:
        if taken.get(wheel.path.name, wheel.sha256) != wheel.sha256:
            raise ReleaseError(
                f"{wheel.path.name} is in the index with other bytes: commit what changed, or begin another index"
            )
    (root / "files").mkdir(parents=True, exist_ok=True)
    for wheel in release:
        if wheel.path.name in taken:
            continue
        shutil.copyfile(wheel.path, root / "files" / wheel.path.name)
        (root / "files" / f"{wheel.path.name}.metadata").write_bytes(wheel.metadata)
        pages.setdefault(wheel.name, []).append(
            {
                "filename": wheel.path.name,
                "url": f"../../files/{wheel.path.name}",
                "hashes": {"sha256": wheel.sha256},
                "size": wheel.path.stat().st_size,
                "requires-python": wheel.requires_python,
                "core-metadata": {"sha256": hashlib.sha256(wheel.metadata).hexdigest()},
                "upload-time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        )
    write(root, pages)


def prune(root: Path, keep: int, room: int = 800_000_000) -> list[str]:
    """Retention: removes all but the `keep` newest versions of every project; returns the versions that went.

    All together they have at most `room` bytes, unless the newest alone has more: GitHub Pages has a gigabyte.
    """
    pages, kept, held = projects(root), set[str](), 0
    for version in map(str, reversed(versions(root)[-keep:])):
        held += sum(f["size"] for files in pages.values() for f in files if f["filename"].split("-")[1] == version)
        if kept and held > room:
            break
        kept.add(version)
    gone = {str(version) for version in versions(root)} - kept
    for name, files in pages.items():
        for file in files:
            if file["filename"].split("-")[1] in gone:
                for suffix in ("", ".metadata"):
                    (root / "files" / f"{file['filename']}{suffix}").unlink(missing_ok=True)
        pages[name] = [file for file in files if file["filename"].split("-")[1] not in gone]
    write(root, pages)
    return sorted(gone, key=Version)


@contextlib.contextmanager
def _session(url: str) -> Iterator[Callable[[str], requests.Response]]:
    """What gets an answer from below `url`, and asks again where that is worth it."""
    retry = Retry(5, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        try:
            yield lambda path: session.get(f"{url.rstrip('/')}/{path}", timeout=600)
        except requests.RequestException as error:
            raise ReleaseError(f"{url}: {error}") from error


def _checked(answer: requests.Response) -> requests.Response:
    answer.raise_for_status()
    return answer


def published(url: str) -> dict[str, list[dict[str, Any]]]:
    """The files of each project of the index published at `url`; one that is not there is empty."""
    if url.rstrip("/").endswith("/simple"):
        raise ReleaseError(f"--mirror: expected the address above simple/, got {url}")
    with _session(url) as get:
        answer = get(f"simple/{JSON_PAGE}")
        if answer.status_code == requests.codes.not_found:
            print(f"{answer.url} is not there: the index begins anew", file=sys.stderr)
            return {}
        names = [project["name"] for project in _checked(answer).json()["projects"]]
        return {name: _checked(get(f"simple/{name}/{JSON_PAGE}")).json()["files"] for name in names}


def mirror(url: str, root: Path, pages: dict[str, list[dict[str, Any]]] | None = None) -> None:
    """Fetches the index published at `url`, whose pages may be known, all or nothing, each file checked."""
    if root.exists() and any(root.iterdir()):
        raise ReleaseError(f"{root} has files, and no index among them: --index takes an empty folder, or a new one")
    pages = published(url) if pages is None else pages
    if not pages:
        return
    part = root.with_name(f"{root.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "files").mkdir(parents=True)
    with _session(url) as get:
        for file in itertools.chain(*pages.values()):
            for suffix, hashes in (("", file["hashes"]), (".metadata", file["core-metadata"])):
                name = f"{file['filename']}{suffix}"
                content = _checked(get(f"files/{name}")).content
                if hashlib.sha256(content).hexdigest() != hashes["sha256"]:
                    raise ReleaseError(f"{url}: {name} is not the file that its page describes")
                (part / "files" / name).write_bytes(content)
    write(part, pages)
    part.rename(root)


def write(root: Path, pages: dict[str, list[dict[str, Any]]]) -> None:
    """Writes every page; the core's, which says what versions there are, after those of the backends that need it."""
    simple = root / "simple"
    for name, files in sorted(pages.items(), key=lambda page: page[0] == "cuops"):
        files.sort(key=lambda file: (Version(file["filename"].split("-")[1]), file["filename"]), reverse=True)
        found = sorted({file["filename"].split("-")[1] for file in files}, key=Version)
        _write(simple / name / HTML_PAGE, _html(name, [_anchor(file) for file in files]))
        _write(
            simple / name / JSON_PAGE,
            json.dumps({"meta": META, "name": name, "versions": found, "files": files}, indent=1),
        )
    _write(simple / HTML_PAGE, _html("Simple index", [f'<a href="{name}/">{name}</a>' for name in sorted(pages)]))
    _write(
        simple / JSON_PAGE, json.dumps({"meta": META, "projects": [{"name": name} for name in sorted(pages)]}, indent=1)
    )
    newest = versions(root)
    rows = [f'<a href="simple/{name}/">{name}</a>: {len(files)} files' for name, files in sorted(pages.items())]
    command = "<code>pip install --pre --extra-index-url URL/simple cuops-cu121</code>"
    text = f"<p>Newest: {newest[-1] if newest else 'none'}. To install it:</p><p>{command}</p>"
    _write(root / HTML_PAGE, _html("cuops nightlies", rows, text))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _anchor(file: dict[str, Any]) -> str:
    attributes = {
        "href": f"{file['url']}#sha256={file['hashes']['sha256']}",
        "data-core-metadata": f"sha256={file['core-metadata']['sha256']}",
    }
    if file["requires-python"]:
        attributes["data-requires-python"] = file["requires-python"]
    listed = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<a {listed}>{file['filename']}</a> <small>{file['size'] / 1e6:.2f} MB, {file['upload-time']}</small>"


def _html(title: str, items: list[str], text: str = "") -> str:
    head = f'<meta charset="utf-8"><meta name="pypi:repository-version" content="1.1"><title>{title}</title>'
    listed = "\n".join(f"<li>{item}</li>" for item in items)
    body = f"<h1>{title}</h1>{text}\n<ul>\n{listed}\n</ul>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n'
