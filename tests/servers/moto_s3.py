"""moto as a server of its own process: ``python moto_s3.py PORT PROTOCOL``.

moto looks whether an object exists, and then puts it. So of two conditional puts at one time both may succeed, which S3
excludes: here they come one after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import moto.server
from werkzeug.serving import WSGIRequestHandler


def one_by_one(serve: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    lock = threading.Lock()

    def served(application: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and ("HTTP_IF_NONE_MATCH" in environ or "HTTP_IF_MATCH" in environ):
            with lock:
                return serve(application, environ, start_response)
        return serve(application, environ, start_response)

    return served


if __name__ == "__main__":
    port, WSGIRequestHandler.protocol_version = sys.argv[1:]
    application = moto.server.DomainDispatcherApplication
    application.__call__ = one_by_one(application.__call__)  # type: ignore[method-assign]
    moto.server.main(["-H", "127.0.0.1", "-p", port])
