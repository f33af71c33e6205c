"""The server of the page, with the requests that it answers and refuses.

Requests identify runs by their index in the server's list, ranks and steps by numbers, and spans by
keys that are looked up in columns. No path ever comes from a request. The page loads everything
from this server, and the browser is forbidden to load anything from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from dash import Dash
from dash.exceptions import DashException
from flask import abort, request
from pydantic import BaseModel, Field, ValidationError

from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.view.callbacks import connect, first_paint
from plait.view.layout import page
from plait.view.store import Watched

if TYPE_CHECKING:
    from flask import Response
    from werkzeug.serving import BaseWSGIServer

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANSWERED = ("/_dash-", "/assets/", "/_favicon.ico")
"""Prefixes of URL paths that the server answers, besides ``/``."""
UPDATE = "/_dash-update-component"
LARGEST = 1 << 20
"""Largest body of a request in bytes; the page's own requests have some thousands."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; worker-src 'self' blob:; font-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)
INDEX = """<!doctype html>
<html lang="en">
<head>{%metas%}<meta name="viewport" content="width=device-width"><title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<noscript>This page needs JavaScript; plait diagnose prints the same as text.</noscript>
<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>"""


class _Value(BaseModel):
    """One property of one component of the page, as a callback of Dash sends it."""

    id: str | dict[str, Any]
    property: str


class _Update(BaseModel):
    """A browser's request to update parts of the page, as Dash's client sends it. output, outputs:
    properties to set. inputs, state: values that the callback gets. changed: the inputs that
    changed."""

    output: str
    outputs: _Value | list[_Value]
    inputs: list[_Value | list[_Value]]
    state: list[_Value | list[_Value]] = []
    changed: list[str] = Field([], alias="changedPropIds")


def make_app(runs: Sequence[Watched], *, local: bool = True) -> Dash:
    """Return the app with the page of these runs. local: True to serve this machine only; a request
    for another host name is then refused, since it may be a DNS rebinding attack."""
    app = Dash(
        "plait.view", assets_folder=str(Path(__file__).parent / "assets"), serve_locally=True, title="plait view",
        update_title="", suppress_callback_exceptions=True, add_log_handler=False,
    )  # fmt: skip
    app.index_string = INDEX
    app.layout = lambda: page([run.snapshot.name for run in runs], **first_paint(runs[0]))
    connect(app, runs)
    guard(app, local)
    return app


def guard(app: Dash, local: bool) -> None:
    """Make the server refuse all requests but the page's own: other paths and origins, too large
    bodies, and with ``local`` other host names."""
    app.server.config["MAX_CONTENT_LENGTH"] = LARGEST

    @app.server.before_request
    def _refuse() -> None:
        path = request.path
        if local and _host(f"//{request.host}")[1] not in LOOPBACK:
            abort(403)
        origin = request.headers.get("Origin")
        if origin and _host(origin)[0] != request.host:
            abort(403)
        if path != "/" and not path.startswith(ANSWERED):
            abort(404)
        if any(part in path for part in ("..", "//", "\\", "\0")):
            abort(404)
        if path == UPDATE and not _is_page_update(request.get_json(silent=True), app):
            abort(400)

    @app.server.errorhandler(DashException)
    def _unknown(_: DashException) -> tuple[str, int]:
        """Answer a missing part of a library with 404."""
        return "not found", 404

    @app.server.errorhandler(RecursionError)
    def _too_deep(_: RecursionError) -> tuple[str, int]:
        """Answer too deeply nested JSON with 400."""
        return "bad request", 400

    @app.server.after_request
    def _restrict(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


def _host(url: str) -> tuple[str, str]:
    """Return (host with port, host alone) of a URL; empty texts for an invalid URL."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""


def _is_page_update(body: Any, app: Dash) -> bool:
    """True if the body of an update request, which any client can write, is for a part of the
    page."""
    try:
        return _Update.model_validate(body).output in cast("Any", app).callback_map
    except ValidationError:
        return False


def make_server(app: Dash, host: str, port: int) -> BaseWSGIServer:
    """Return a server that is bound to its port and does not serve yet. port: 0 for any free port.
    Raises JobError if the address is unavailable, and for an empty host, at which the system would
    listen on every address."""
    import socket

    from werkzeug.serving import WSGIRequestHandler
    from werkzeug.serving import make_server as bind

    class Quiet(WSGIRequestHandler):
        """A request handler that does not log answered requests."""

        protocol_version = "HTTP/1.1"

        def run_wsgi(self) -> None:
            """Answer the request, or refuse it with 400 if its request line has an invalid URL."""
            try:
                urlsplit(self.path)
            except ValueError:
                self.send_error(400)
                return
            super().run_wsgi()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Log nothing."""

    if not host.strip():
        fix = "Name the address to listen at, such as 127.0.0.1; 0.0.0.0 means every one of this machine"
        raise JobError(f"'{host}' is no address", key="--host", fix=fix)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        probe = socket.create_server(address, family=family)
    except (OSError, ValueError) as error:
        problem = f"cannot listen at {host}, port {port}: {reason_of(error)}"
        raise JobError(
            problem, fix="Choose another --port (0: any free one), or a --host that this machine has"
        ) from None
    with probe:
        return bind(host, probe.getsockname()[1], app.server, threaded=True, request_handler=Quiet, fd=probe.fileno())
