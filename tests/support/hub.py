"""A hub that takes uploads: the requests of huggingface_hub's client, answered on this machine."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """Repositories and files that were uploaded to the hub."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Path in the repository -> content."""
    refuses: bool = False
    """Whether commits are refused."""


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Run a hub on a free port of the loopback interface."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._read_body()
            if self.path.startswith("/api/repos/create"):
                values = json.loads(body)
                name = f"{values.get('organization') or 'me'}/{values['name']}"
                hub.repositories[name] = values
                self._answer({"url": f"{hub.address}/{name}", "name": name, "id": name})
            elif self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
                self._answer({"files": files})
            elif hub.refuses:
                self._answer({"error": "the quota of this account is used up"}, 403)
            else:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self._answer({"commitUrl": f"{hub.address}/me/count/commit/0", "commitOid": "0" * 40, "success": True})

        def _read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers["Content-Length"]))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def do_GET(self) -> None:
            self._answer({"id": "me/count", "sha": "0" * 40, "siblings": [], "auth": {}, "name": "me"})

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, values: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
