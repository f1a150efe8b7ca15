"""Stand-in for the Hugging Face Hub: a local HTTP server that offers folders as models, with their revisions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Models of the stand-in: a folder for each name and commit, and the commit of each branch and tag."""

    commits: dict[tuple[str, str], Path] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, folder: Path, *branches: str) -> str:
        """Offer a folder under the branches, and return its commit."""
        content = "".join(f"{path.name} {_etag(path)}" for path in _files(folder))
        commit = hashlib.sha1(f"{name} {content}".encode()).hexdigest()
        self.commits[name, commit] = folder
        for branch in branches:
            self.branches[name, branch] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded."""
        files = [request for request in self.requests if request.startswith("GET") and "/resolve/" in request]
        return sorted(request.rpartition("/")[2] for request in files)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self._describe("/".join(words[2:4]), "".join(words[4:5]), "/".join(words[5:]) or "main")
        elif words[2:3] == ["resolve"]:
            self._send_file("/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self._send(404, b"", {})

    def _describe(self, name: str, kind: str, revision: str) -> None:
        if name not in {known for known, _ in self.hub.commits}:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        commit = self.hub.branches.get((name, revision), revision)
        folder = self.hub.commits.get((name, commit))
        if folder is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        files = _files(folder)
        if kind == "tree":
            value: object = [
                {
                    "type": "file",
                    "path": str(path.relative_to(folder)),
                    "size": path.stat().st_size,
                    "oid": _etag(path),
                }
                for path in files
            ]
        else:
            siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
            value = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, commit: str, file: str) -> None:
        if name in self.hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        path = self.hub.commits[name, commit] / file
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        self._send(200, path.read_bytes(), {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": commit})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve models until the context ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
