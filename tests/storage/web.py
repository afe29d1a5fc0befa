"""A file server based on aiohttp: ``python web.py FOLDER PORT LOG``."""

import sys
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger


class Requests(AbstractAccessLogger):
    """Logs one line per request: method, decoded path, status and bytes of the body."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        with LOG.open("a") as log:
            log.write(f"{request.method} {request.path} {response.status} {response.content_length}\n")


if __name__ == "__main__":
    FOLDER, PORT, LOG = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    LOG.touch()
    app = web.Application()
    app.router.add_static("/", FOLDER)
    web.run_app(app, host="127.0.0.1", port=PORT, access_log_class=Requests, print=None)
