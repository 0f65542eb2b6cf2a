"""A server that speaks S3, in this process, which fails on demand.

    with ObjectStore() as store:            # sets AWS_ENDPOINT_URL and credentials meanwhile
        store.trouble = fail_with(500, 3)   # the next three requests
        open_place(store.new_address())

Trouble is a function that is given each request first: it may answer it, delay it, or let it pass.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any
from unittest import mock

Environ = dict[str, Any]
Trouble = Callable[[Environ], int | None]
"""The status to answer a request with; None lets it pass."""

_BUCKET = "checkpoints"


def no_trouble(request: Environ) -> int | None:
    """All requests pass."""
    return None


def fail_with(
    status: int, times: int = 1 << 60, *, until: Callable[[], bool] | None = None
) -> Trouble:
    """The next requests are answered with an error."""
    left = itertools.count(times, -1)

    def trouble(request: Environ) -> int | None:
        over = until is not None and until()
        return status if not over and next(left) > 0 else None

    return trouble


def hang_up(times: int) -> Trouble:
    """The connections of the next requests are closed without an answer."""
    left = itertools.count(times, -1)

    def trouble(request: Environ) -> int | None:
        if next(left) > 0:
            request["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        return None

    return trouble


def say_nothing(times: int, seconds: float) -> Trouble:
    """The next requests are answered late, with an error."""
    left = itertools.count(times, -1)

    def trouble(request: Environ) -> int | None:
        if next(left) > 0:
            time.sleep(seconds)
            return 503
        return None

    return trouble


def slow_link(bytes_a_second: float) -> Trouble:
    """Bodies arrive no faster."""

    def trouble(request: Environ) -> int | None:
        time.sleep(int(request.get("CONTENT_LENGTH") or 0) / bytes_a_second)
        return None

    return trouble


class ObjectStore:
    """The server, with one bucket."""

    def __init__(self) -> None:
        self.trouble: Trouble = no_trouble
        self.requests: list[tuple[str, str]] = []
        """Method and path of each, those in trouble too."""

    def __enter__(self) -> ObjectStore:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *args: Any, **kwargs: Any) -> None:
                pass

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet
        )
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._patch = mock.patch.dict(os.environ, self.environment)
        self._patch.start()
        import boto3

        boto3.client("s3").create_bucket(Bucket=_BUCKET)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.stop()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def new_address(self) -> str:
        """A folder that is not used yet."""
        return f"s3://{_BUCKET}/runs/{uuid.uuid4().hex}"

    def _answer(self, request: Environ, start: Any) -> Iterable[bytes]:
        self.requests.append((request["REQUEST_METHOD"], request["PATH_INFO"]))
        status = self.trouble(request)
        if status is None:
            answer: Iterable[bytes] = self._app(request, start)
            return answer
        if length := int(request.get("CONTENT_LENGTH") or 0):
            request["wsgi.input"].read(length)
        start(f"{status} Trouble", [("Content-Type", "text/plain"), ("Content-Length", "0")])
        return [b""]
