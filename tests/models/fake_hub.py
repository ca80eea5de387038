"""A Hugging Face Hub on 127.0.0.1: as much of its protocol as uploading and downloading small files needs."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
Repositories = dict[str, dict[str, bytes]]  # of another branch than main, the name is owner/name@branch


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        repositories: Repositories = self.server.repositories
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            repositories.setdefault(name, {})
            return self._json({"url": f"{self.server.address}/{name}"})
        if path == "/api/validate-yaml":  # of the header of a README.md
            return self._json({"errors": [], "warnings": []})
        name = "/".join(path.split("/")[3:5])
        if "/branch/" in path:
            repositories[f"{name}@{path.split('/')[-1]}"] = dict(repositories[name])
            return self._json({})
        if "/preupload/" in path:
            answer = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [{"path": f["path"], **answer} for f in json.loads(body)["files"]]
            return self._json({"files": files})
        if "/commit/" in path:
            branch = path.split("/")[-1]
            name += "" if branch == "main" else f"@{branch}"
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "header":
                    self.server.commits.append((name, entry["value"]["summary"], self.headers.get("Authorization")))
                if entry["key"] == "file":
                    repositories[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            address = f"{self.server.address}/{name}/commit/{COMMIT}"
            return self._json({"success": True, "commitUrl": address, "commitOid": COMMIT})
        return self._json({"error": "unknown"}, 404)

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def do_GET(self) -> None:
        self._get(with_body=True)

    def _get(self, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        self.server.asked.append("/".join(parts))
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        revision = parts[5] if is_api and len(parts) > 5 else parts[3] if not is_api and len(parts) > 3 else "main"
        key = next((k for k in self.server.repositories if revision in _revisions(k) and k.split("@")[0] == name), None)
        files = self.server.repositories.get(key)
        if files is None:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if is_api and "tree" in parts:
            tree = [{"type": "file", "path": f, "size": len(c), "oid": _digest(c)} for f, c in files.items()]
            return self._json(tree)
        if is_api:
            return self._json({"id": name, "sha": _revisions(key)[1], "siblings": [{"rfilename": f} for f in files]})
        content = files["/".join(parts[4:])]
        self.send_response(200)
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", _revisions(key)[1])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        sent = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
        for key, text in sent.items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


def _revisions(key: str | None) -> tuple[str, str]:
    """The branch of a repository, and its commit."""
    branch = (key or "").partition("@")[2]
    return (branch, _digest(branch.encode())) if branch else ("main", COMMIT)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def fake_hub(repositories: Repositories) -> Iterator[Any]:
    """Run the server; `address` is where, `asked` what was asked for, `commits` their branch, message and token."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.repositories, server.asked, server.commits = repositories, [], []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
