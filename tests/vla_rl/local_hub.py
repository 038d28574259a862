"""A small server on loopback that speaks as much of the Hub's API as it takes to look at models and datasets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote

from huggingface_hub import constants
from served_hub import served
from typer.testing import CliRunner

from vla_rl.cli.app import app


class LocalHub:
    """Models and datasets by repository (those of datasets begin with "datasets/") and revision.

    Attributes:
        url: for HF_ENDPOINT.
        sent: (path of a file in its model, bytes sent of it), in order.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, tuple[str, Path]]] = {}
        self.sent: list[tuple[str, int]] = []
        self.url = ""

    def add(self, repo: str, folder: Path, *revisions: str) -> str:
        """Serve a folder under these names; returns its commit."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        for revision in (*revisions, commit):
            self.models.setdefault(repo, {})[revision] = (commit, folder)
        return commit


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        if match := re.fullmatch(r"/api/(?:models/|(datasets/))([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._repository((match[1] or "") + match[2], match[3] or "main")
        elif match := re.fullmatch(r"/api/(?:models/|(datasets/))([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree((match[1] or "") + match[2], match[3])
        elif match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3], with_body)
        else:
            self._send(404, b"", {})

    def _repository(self, repo: str, revision: str) -> None:
        if (found := self._find(repo, revision)) is not None:
            commit, folder = found
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            siblings = [{"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size} for p in files]
            names = {"id": repo.removeprefix("datasets/"), "modelId": repo}
            body = {**names, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _tree(self, repo: str, revision: str) -> None:
        if (found := self._find(repo, revision)) is not None:
            files = [p for p in sorted(found[1].rglob("*")) if p.is_file()]
            rows = [
                {"type": "file", "path": p.relative_to(found[1]).as_posix(), "size": p.stat().st_size, "oid": _oid(p)}
                for p in files
            ]
            self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str, with_body: bool) -> None:
        if (found := self._find(repo, revision)) is None:
            return
        commit, folder = found
        file = folder / name
        headers = {"X-Repo-Commit": commit}
        if not file.is_file():
            self._send(404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
            return
        data = file.read_bytes()
        headers |= {"ETag": f'"{_oid(file)}"', "Accept-Ranges": "bytes"}
        status = 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        if with_body:
            self.hub.sent.append((name, len(data)))
        self._send(status, data, headers, with_body)

    def _find(self, repo: str, revision: str) -> tuple[str, Path] | None:
        known = self.hub.models.get(repo)
        if known is None or revision not in known:
            code = "RepoNotFound" if known is None else "RevisionNotFound"
            self._send(404, b"", {"X-Error-Code": code})
            return None
        return known[revision]

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command == "GET":
            self.wfile.write(body)


def local_hub() -> AbstractContextManager[LocalHub]:
    """Serve, for the block."""
    return served(LocalHub(), _Handler)


@contextmanager
def asking(hub: LocalHub, home: Path, offline: bool = False) -> Iterator[None]:
    """Have this process ask the server, for the block: what HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE do to a new one."""
    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url),
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": offline,
    }
    with patch.multiple(constants, **values):
        yield


def answer(command: list[str]) -> tuple[int, str, str]:
    """A command's exit code, output and errors."""
    result = CliRunner().invoke(app, command)
    trouble = "" if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    return result.exit_code, result.stdout, result.stderr + trouble
