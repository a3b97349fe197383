"""The servers of a rehearsal, all on loopback: a package index, a door to it that can jam, and an image registry."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from . import ReleaseError

REGISTRIES = ("docker-registry", "registry")  # Debian's name and the upstream one
REGISTRY = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None:
                    raise ReleaseError(f"{command[0]} ended with {process.returncode}:\n{log.read_text()}")
                time.sleep(0.1)
            else:
                raise ReleaseError(f"{command[0]} does not answer:\n{log.read_text()}")
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def package_index(folder: Path) -> Iterator[str]:
    """A pypiserver that takes uploads of anybody and never another file under a name; yields its address."""
    port = free_port()
    (folder / "packages").mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pypiserver",
        "run",
        "-i",
        "127.0.0.1",
        "-p",
        str(port),
        "-a",
        ".",
        "-P",
        ".",
        "--disable-fallback",
    ]
    with _running([*command, str(folder / "packages")], port, folder / "log"):
        yield f"http://127.0.0.1:{port}"


def registry_binary() -> str:
    """The program of an image registry."""
    for path in filter(None, map(shutil.which, REGISTRIES)):
        return path
    raise ReleaseError("there is no image registry to rehearse with: apt-get install docker-registry")


@contextlib.contextmanager
def image_registry(folder: Path) -> Iterator[str]:
    """An image registry; yields its host and port."""
    binary, port = registry_binary(), free_port()
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(REGISTRY.format(folder=folder / "data", port=port))
    with _running([binary, "serve", str(folder / "config.yml")], port, folder / "log"):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def jamming_door(index: str, uploads: int) -> Iterator[str]:
    """Passes everything on to an index, but after so many uploads breaks the connection in the middle of each."""
    left = [uploads]

    class Door(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.command == "POST":
                left[0] -= 1
                if left[0] < 0:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
            onward = http.client.HTTPConnection(index.removeprefix("http://"))
            onward.request(self.command, self.path, body, dict(self.headers))
            answer = onward.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = forward  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    door = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{door.server_port}"
    finally:
        door.shutdown()
        door.server_close()
