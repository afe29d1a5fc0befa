"""The part of Google Cloud Storage's XML interface that a client needs, in memory, with numbered versions.

moto does not have it. The server enforces preconditions strictly: it holds one lock for a whole request.
"""

import hashlib
import itertools
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.storage.local_server import LocalHandler, LocalServer

MOVED_BY_PUT = "x-goog-if-generation-match"


@dataclass
class Stored:
    """One version of an object."""

    data: bytes
    number: int
    meta: dict[str, str] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.data + b"%d" % self.number).hexdigest()[:12]}"'


class GcsServer(LocalServer):
    """Objects by ``bucket/name``."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count(1000)
        self.lock = threading.Lock()

    def account(self, path: Path) -> Path:
        """Write a service account that directs a client to this server without a login."""
        facts = {
            "gcs_base_url": self.endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        path.write_text(json.dumps(facts))
        return path


class _Handler(LocalHandler):
    server: GcsServer

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        name, query = unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)
        with self.server.lock:
            getattr(self, f"_{self.command.lower()}")(name, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815

    def _get(self, name, query, _body):
        if "list-type" in query:
            return self._list(name, query.get("prefix", [""])[0])
        found = self.server.objects.get(name)
        if found is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if self.headers.get("If-Match") not in (None, found.tag):
            return self.answer(412, headers=_headers(found))
        return self.file(found.data, _headers(found))

    _head = _get

    def _list(self, bucket, prefix):
        entries = "".join(
            f"<Contents><Key>{escape(name.removeprefix(bucket + '/'))}</Key><Size>{len(found.data)}</Size>"
            f"<LastModified>2024-01-01T00:00:00Z</LastModified><ETag>{escape(found.tag)}</ETag></Contents>"
            for name, found in sorted(self.server.objects.items())
            if name.startswith(f"{bucket}/{prefix}")
        )
        self.answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())

    def _put(self, name, query, body):
        if "uploadId" in query:
            self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return self.answer(200, headers={"ETag": f'"{len(body)}"'})
        expected, found = self.headers.get(MOVED_BY_PUT), self.server.objects.get(name)
        if expected is not None and int(expected) != (found.number if found else 0):
            return self.answer(412)
        return self.answer(200, headers=self._store(name, body))

    def _post(self, name, query, _body):
        if "uploads" in query:
            upload = f"upload-{next(self.server.numbers)}"
            self.server.uploads[upload] = {}
            return self.answer(200, _upload_xml("InitiateMultipartUploadResult", "UploadId", upload))
        parts = self.server.uploads.pop(query["uploadId"][0])
        headers = self._store(name, b"".join(parts[number] for number in sorted(parts)))
        return self.answer(200, _upload_xml("CompleteMultipartUploadResult", "ETag", escape(headers["ETag"])), headers)

    def _delete(self, name, query, _body):
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"][0], None)
            return self.answer(204)
        return self.answer(204 if self.server.objects.pop(name, None) else 404)

    def _store(self, name, data):
        meta = {key: value for key, value in self.headers.items() if key.lower().startswith("x-goog-meta-")}
        self.server.objects[name] = Stored(data, next(self.server.numbers), meta)
        return _headers(self.server.objects[name])


def _headers(found: Stored) -> dict[str, str]:
    date = "Mon, 01 Jan 2024 00:00:00 GMT"
    return {"ETag": found.tag, "x-goog-generation": str(found.number), "Last-Modified": date, **found.meta}


def _upload_xml(kind: str, field_name: str, value: str) -> bytes:
    rest = "<Bucket>b</Bucket><Key>k</Key>"
    return f"<{kind}>{rest}<{field_name}>{value}</{field_name}></{kind}>".encode()
