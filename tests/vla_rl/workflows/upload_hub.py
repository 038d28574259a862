"""A small server on loopback that speaks what of the Hub's API an upload needs: repository, LFS objects, one commit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

from served_hub import served

TOKEN = "hf_of_the_test"


class UploadHub:
    """What was uploaded.

    Attributes:
        repos: (kind, name) -> private. files: (kind, name) -> path -> content, of the newest commit.
        refuses: how far an upload comes: "create", "commit" or "" (all the way).
    """

    def __init__(self) -> None:
        self.url = ""
        self.refuses = ""
        self.repos: dict[tuple[str, str], bool] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    hub: UploadHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".parquet")) else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._send(200, {"files": modes})
        elif re.fullmatch(r"/(?:datasets/)?[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            wanted = json.loads(body)["objects"]
            objects = [{**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}} for one in wanted]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/commit/main", path):
            self._commit((match[1], match[2]), [json.loads(line) for line in body.splitlines()])
        else:
            self._send(404, {"error": path})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._send(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        if self.hub.refuses == "create":
            self._send(403, {"error": "You don't have the rights to create a model under this namespace"})
            return
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        kind = asked.get("type") or "model"
        private = asked.get("private", asked.get("visibility") == "private")
        self.hub.repos.setdefault((kind, name), bool(private))
        self._send(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _commit(self, repo: tuple[str, str], lines: list[dict[str, Any]]) -> None:
        if self.hub.refuses == "commit":
            self._send(403, {"error": "Forbidden: storage limit reached"})
            return
        content: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                content[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                content[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.files[repo] = content
        prefix = "datasets/" if repo[0] == "dataset" else ""
        oid = "0" * 40
        self._send(
            200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{prefix}{repo[1]}/commit/{oid}"}
        )

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", str(answer["error"]))
        self.end_headers()
        self.wfile.write(body)


def upload_hub() -> AbstractContextManager[UploadHub]:
    """Serve, for the block."""
    return served(UploadHub(), _Handler)
