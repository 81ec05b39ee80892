"""The page of a run while it goes on: a server on the loopback interface that sends what has changed."""

import json
import socket
import time
from collections.abc import Callable
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from surefoot.diagnostics.monitor.explain import explain
from surefoot.diagnostics.report.html import page_of
from surefoot.diagnostics.report.page import Page, load_chart_script
from surefoot.errors import ConfigError
from surefoot.system.console import say

EVERY_S = 2.0
"""Seconds between two looks at the folder of the run."""
ALIVE_S = 15.0
"""Seconds without a change after which a comment is sent, by which a closed connection is noticed."""
ADDRESS = "127.0.0.1"
OWN_HOSTS = (ADDRESS, "localhost")
"""Host names of requests that are answered. Another name points here by DNS rebinding from a foreign page."""


def watch_in_browser(run_folder: Path, port: int) -> None:
    """Serve the live page of a run until Ctrl-C.

    Raises: ConfigError for a folder without a run, a port in use, or if vl-convert-python is missing.
    """
    script = load_chart_script()
    explain(run_folder)
    try:
        server = make_server(run_folder, port, script)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}. Choose another, or 0 for any free one.") from error
    say(f"{run_folder} is shown at http://{ADDRESS}:{server.server_port}/ until Ctrl-C")
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def make_server(run_folder: Path, port: int, chart_script: str) -> ThreadingHTTPServer:
    """Return a server of the live page, which listens already. `port`: 0 for any free one. Raises: OSError."""
    server = ThreadingHTTPServer((ADDRESS, port), partial(_Handler, lambda: _read_page(run_folder), chart_script))
    server.daemon_threads = True  # an open page does not keep the process alive
    return server


def _read_page(run_folder: Path) -> Page:
    """Return the page of a run, or one that says why there is nothing to show yet."""
    try:
        return page_of(run_folder)
    except ConfigError as error:
        head = f"<h1>{escape(str(run_folder))}</h1><p>{escape(str(error))}</p>"
        return Page(f"{run_folder.name}: Surefoot run", head, {})


class _Handler(BaseHTTPRequestHandler):
    """Handler of requests: `/` is the page, `/events` its changes as server-sent events."""

    def __init__(self, read_page: Callable[[], Page], chart_script: str, *connection: Any) -> None:
        self._read_page, self._chart_script = read_page, chart_script
        super().__init__(*connection)

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in OWN_HOSTS:
            self.send_error(403)
        elif self.path == "/":
            body = self._read_page().render(self._chart_script, is_live=True).encode()
            self._begin("text/html; charset=utf-8", length=len(body))
            self.wfile.write(body)
        elif self.path == "/events":
            self._begin("text/event-stream")
            self._send_changes()
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal belongs to the user."""

    def _begin(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_changes(self) -> None:
        """Send the content of the page whenever it has changed, until the browser closes the connection."""
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent, sent_at = "", time.monotonic()
        try:
            while True:
                content = json.dumps(self._read_page().update(), allow_nan=False)
                if content != sent:
                    self.wfile.write(f"data: {content}\n\n".encode())
                    sent, sent_at = content, time.monotonic()
                elif time.monotonic() - sent_at > ALIVE_S:
                    self.wfile.write(b": unchanged\n\n")
                    sent_at = time.monotonic()
                time.sleep(EVERY_S)
        except ConnectionError:  # the page was closed
            self.close_connection = True
