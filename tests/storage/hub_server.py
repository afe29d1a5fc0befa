"""A small server with the parts of the Hugging Face Hub's interface that reading files needs.

Large files are on a second host, as on the real Hub: the Hub answers with a signed address that expires.
"""

import hashlib
import json
import re
import urllib.parse
from collections import deque

from tests.storage.local_server import LocalHandler, LocalServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000


class HubServer(LocalServer):
    """Serves one dataset repository, ``me/films``, with the branch ``main``.

    Args:
        token: Token that requests must have; any by default.

    Attributes:
        files: The files.
        refusals: Status and headers with which the next requests are refused.
        expire: Number of requests to signed addresses that are answered with 403.
        log: (method, path, range, token) of each request.
    """

    def __init__(self, token: str | None = None) -> None:
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {}
        self.token, self.refusals, self.expire = token, deque(), 0
        self.log = []


class _Handler(LocalHandler):
    server: HubServer

    def do_HEAD(self) -> None:  # noqa: N802
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802
        server, path = self.server, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        server.log.append((self.command, path, self.headers.get("Range"), token))
        if server.refusals:
            status, headers = server.refusals.popleft()
            return self.answer(status, headers=headers)
        if path.startswith("/signed/"):
            assert not token, "a token must not be sent to another host"
            if server.expire:
                server.expire -= 1
                return self.answer(403)
            return self._file(path.removeprefix("/signed/"))
        if server.token not in (None, token):
            return self.answer(401, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if not re.match(r"/(api/)?datasets/me/films(/|$)", path):
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        found = re.fullmatch(r"/api/datasets/me/films(?:/revision/(\w+))?", path)
        if found:
            if found[1] not in (None, "main", COMMIT):
                return self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
            return self.answer(200, json.dumps({"id": "me/films", "sha": COMMIT, "tags": []}).encode())
        found = re.fullmatch(rf"/api/datasets/me/films/tree/{COMMIT}/?(.*)", path)
        if found:
            return self._tree(found[1].strip("/"))
        found = re.fullmatch(rf"/datasets/me/films/resolve/{COMMIT}/(.*)", path)
        return self._resolve(found[1]) if found else self.answer(404)

    def _tree(self, folder: str) -> None:
        entries = []
        for name, data in self.server.files.items():
            if name.startswith(f"{folder}/") or not folder:
                entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                if len(data) >= LARGE:
                    digest = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
                entries.append(entry)
        if not entries:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        return self.answer(200, json.dumps(entries).encode())

    def _resolve(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        if len(data) < LARGE:
            return self._file(name, {"X-Repo-Commit": COMMIT})
        other = self.server.endpoint.replace("127.0.0.1", "localhost")
        headers = {
            "Location": f"{other}/signed/{urllib.parse.quote(name)}?signature=1",
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
        }
        return self.answer(302, headers=headers)

    def _file(self, name: str, headers: dict[str, str] | None = None) -> None:
        data = self.server.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"} | (headers or {})
        return self.file(data, headers)
