"""Serves a static index on loopback as a web server would: PEP 691 JSON to who asks for it, pages to everybody else."""

from __future__ import annotations

import functools
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .index import HTML_PAGE, JSON_PAGE

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"


class Handler(SimpleHTTPRequestHandler):
    """Chooses between index.json and index.html by the Accept header."""

    def send_head(self):  # type: ignore[no-untyped-def]
        """The file that the request names, open, after its headers."""
        folder = Path(self.translate_path(self.path))
        if self.path.endswith("/") and (folder / JSON_PAGE).exists():
            self.path += JSON_PAGE if SIMPLE_JSON in self.headers.get("Accept", "") else HTML_PAGE
        return super().send_head()

    def guess_type(self, path):  # type: ignore[no-untyped-def]
        """The content type of a file."""
        return SIMPLE_JSON if str(path).endswith(JSON_PAGE) else super().guess_type(path)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing: pip shows what it fetches."""


def server(root: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of `root` on loopback, to be started by the caller."""
    return ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(root)))


if __name__ == "__main__":
    running = server(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"http://127.0.0.1:{running.server_port}/simple/", flush=True)
    running.serve_forever()
