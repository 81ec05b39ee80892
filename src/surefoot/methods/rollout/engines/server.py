"""Client of a vLLM server, which is a process of this run or one at an address. Every request has a deadline."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from surefoot.errors import ConfigError, StoppedOnFinding
from surefoot.findings import Finding
from surefoot.findings.library_errors import find_library_error
from surefoot.system.process import describe_end, end_with_parent

LOG_TAIL_BYTES = 3000
LOG_READ_BYTES = 1 << 20
"""Bytes of the end of a server's log in which errors are looked for."""
PAUSES_S = (0.5, 2.0, 5.0)
"""Seconds before each retry of a request that the server did not take."""
POLL_S = 0.5
NOTICE_EVERY_S = 15.0
"""Seconds between two notices that the server is not ready yet."""
END_S = 20.0
"""Seconds that a server has to end by itself before it is killed."""
BUSY = frozenset({502, 503, 504})
"""Status codes of servers, and of proxies before them, for a request that they cannot take now."""
HEALTH_TIMEOUT_S = 5.0
SLEEP_TIMEOUT_S = 300.0
"""Seconds that a server has to move its weights to host memory, or back."""
END_NOTICE_S = 1.0
CHUNK_BYTES = 1 << 16


class ServerFailed(Exception):
    """A request failed; the text says why."""

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        """Create the error. `may_pass`: the request was not taken, for a reason that may be over soon."""
        super().__init__(text)
        self.may_pass = may_pass


class Server:
    """A vLLM server, with its process and its log if it belongs to this run."""

    def __init__(self, address: str, process: "subprocess.Popen[bytes] | None" = None, log: Path | None = None) -> None:
        parts = urlsplit(address if "//" in address else f"//{address}")
        self.address = address
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._process = process
        self._log = log

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the JSON of the response; any other text is returned as `{"text": ...}`. Raises: ServerFailed."""
        return self._send_request("POST", path, json.dumps(body).encode(), timeout_s)

    def post_with_retries(self, path: str, body: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Do what `post` does; retry a request that was not taken, which changes no result. Raises: ServerFailed.

        `deadline`: by `time.monotonic`.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                return self.post(path, body, max(deadline - time.monotonic(), 0.0))
            except ServerFailed as error:
                has_time = pause_s is not None and time.monotonic() + pause_s < deadline
                if not error.may_pass or not has_time or not self.is_running:
                    raise
                time.sleep(pause_s or 0.0)
        raise AssertionError("the last attempt returns or raises")

    def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        """Return the JSON of the response. Raises: ServerFailed."""
        return self._send_request("GET", path, None, timeout_s)

    def _send_request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=max(timeout_s, 0.01))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                text = _read_body(connection, response, deadline).decode("utf-8", "replace")
        except TimeoutError:
            raise ServerFailed(f"{method} {path} was not answered in {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            text = f"{method} {path}: {type(error).__name__}: {error}{self._describe_server_end()}"
            raise ServerFailed(text, may_pass=isinstance(error, ConnectionError)) from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            message = f"{method} {path} was answered with status {response.status}: {text[:1000]}"
            raise ServerFailed(message, may_pass=response.status in BUSY)
        try:
            payload = json.loads(text or "{}")
        except ValueError:
            payload = None
        return payload if isinstance(payload, dict) else {"text": text}

    def wait_until_ready(self, timeout_s: float, notify: Callable[[str], None]) -> None:
        """Wait for the server, and call `notify` with a line every `NOTICE_EVERY_S` seconds.

        Raises: ServerFailed if the server ends, or is not ready in time.
        """
        began_s = time.monotonic()
        deadline, next_notice_s = began_s + timeout_s, began_s + NOTICE_EVERY_S
        while time.monotonic() < deadline:
            if time.monotonic() > next_notice_s:
                next_notice_s += NOTICE_EVERY_S
                notify(f"waiting for the vLLM server at {self.address}, up to {timeout_s:.0f} s")
            with suppress(ServerFailed):  # refused until it listens; the request also waits a moment for its end
                self._send_request("GET", "/health", None, HEALTH_TIMEOUT_S)
                return
            if not self.is_running:
                raise ServerFailed(f"the server {self._describe_process()} before it was ready")
            time.sleep(POLL_S)
        raise ServerFailed(f"the server at {self.address} was not ready in {timeout_s:.0f} s")

    def sleep(self) -> None:
        """Free the server's GPU memory; its weights stay in host memory. Raises: StoppedOnFinding (SF801)."""
        self._set_sleep_mode("/sleep?level=1", is_asleep=True)  # level 2 would lose the weights

    def wake(self) -> None:
        """Take the GPU memory again. Raises: StoppedOnFinding (SF801)."""
        self._set_sleep_mode("/wake_up", is_asleep=False)

    def _set_sleep_mode(self, path: str, *, is_asleep: bool) -> None:
        try:
            self.post(path, {}, SLEEP_TIMEOUT_S)
            state = self.get("/is_sleeping", SLEEP_TIMEOUT_S).get("is_sleeping")
        except ServerFailed as error:
            raise self.stopped(
                "SF801",
                f"the server did not answer POST {path}: {error}. It must run with --enable-sleep-mode, and "
                "VLLM_SERVER_DEV_MODE=1 in its environment; or set vllm_sleep: false",
            ) from error
        if state is not is_asleep:
            raise self.stopped(
                "SF801", f"after POST {path} the server reports is_sleeping: {state}. Set vllm_sleep: false", path=path
            )

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs; true for a server of another owner."""
        return self._process is None or self._process.poll() is None

    def check_alive(self) -> None:
        """Raise StoppedOnFinding (SF801) if the server's process has ended."""
        if not self.is_running:
            raise self.stopped("SF801", f"the server {self._describe_process()}")

    def evidence(self) -> dict[str, Any]:
        """Return the server's address, and the state of its process and the end of its log if this rank has them."""
        evidence: dict[str, Any] = {"address": self.address}
        if self._process is not None:
            evidence["server"] = f"process {self._process.pid} {self._describe_process()}"
        if self._log is not None and self._log.is_file():
            evidence |= {"log": str(self._log), "end_of_log": self._read_log(LOG_TAIL_BYTES)}
        return evidence

    def stopped(self, code: str, cause: str, **evidence: Any) -> StoppedOnFinding:
        """Return the error that ends the run with a finding about the server, and the cause that its log names."""
        fix = ""
        named = find_library_error(self._read_log(LOG_READ_BYTES))
        if named is not None:
            cause, fix = f"{cause}. Its log: {named.cause}", named.fix
            evidence = {**evidence, **named.evidence}
        return StoppedOnFinding(Finding(code, cause, {**evidence, **self.evidence()}, fix))

    def _read_log(self, size: int) -> str:
        """Return the last bytes of the server's log as text; empty if there is none."""
        if self._log is None or not self._log.is_file():
            return ""
        with open(self._log, "rb") as file:
            file.seek(max(0, self._log.stat().st_size - size))
            return file.read().decode("utf-8", "replace")

    def end(self) -> None:
        """End a server of this run; any other server is left running."""
        if self._process is None:
            return
        for number, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        with suppress(ProcessLookupError):  # workers that outlived it
            os.killpg(self._process.pid, signal.SIGKILL)

    def _describe_process(self) -> str:
        code = self._process.poll() if self._process is not None else None
        return "is running" if code is None else describe_end(code)

    def _describe_server_end(self) -> str:
        """Wait a moment, because a connection is reset just before its process ends; return how it ended, if it did."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_NOTICE_S)
        return "" if self.is_running else f"; the server {self._describe_process()}"


def start_server(
    command: str, model: Path, options: Sequence[str], environment: Mapping[str, str], log: Path, where: str
) -> Server:
    """Start `vllm serve` on a free port of the loopback interface. It ends with this process, however that ends.

    Raises: ConfigError if the command cannot be started.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [command, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
    except OSError as error:
        raise ConfigError(
            f"vllm_command: {command} cannot be started: {error.strerror}. Give the path of the `vllm` command of its "
            f"virtual environment, or the address of a server with vllm_server ({where})."
        ) from error
    return Server(f"http://127.0.0.1:{port}", process, log)


def _read_body(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the whole body. A socket's timeout holds for one chunk, and a server may send any number of them.

    Raises: TimeoutError.
    """
    chunks: list[bytes] = []
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if connection.sock is not None:  # None if the server closes after its response, which is read by then
            connection.sock.settimeout(left_s)
        chunk = response.read1(CHUNK_BYTES)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
