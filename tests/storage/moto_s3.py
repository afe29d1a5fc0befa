"""moto's server with conditional writes as S3 does them: ``python moto_s3.py PORT``.

moto checks If-Match and If-None-Match and writes afterwards, each request in its own thread, so that two conditional
writes could both succeed. Here one at a time is answered.
"""

import sys
import threading

import moto.server

CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class AtomicConditions(moto.server.DomainDispatcherApplication):
    """Answers a conditional write when the one before it is done."""

    def __init__(self, create_app):
        super().__init__(create_app)
        self.one = threading.Lock()

    def __call__(self, environ, start_response):
        if environ["REQUEST_METHOD"] == "PUT" and any(name in environ for name in CONDITIONS):
            with self.one:
                return super().__call__(environ, start_response)
        return super().__call__(environ, start_response)


if __name__ == "__main__":
    moto.server.DomainDispatcherApplication = AtomicConditions
    moto.server.main(["-H", "127.0.0.1", "-p", sys.argv[1]])
