"""A server with vLLM's endpoints on a real port, whose answers can be wrong: `engine_server.py PORT FAULT`.

Each token is 7 with a logprob that the request's model name does not change. FAULT: none, late, dies, error, fewer,
other_version, no_logprobs, refuses_adapter, no_json.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULT = sys.argv[2]
PROBE_TOKENS = 24


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter" and FAULT == "refuses_adapter":
            return self._answer(400, {"error": "no room for adapters"})
        if self.path != "/v1/completions":
            return self._answer(200, "Success")
        if body["max_tokens"] == PROBE_TOKENS and body.get("ignore_eos"):
            return self._answer(200, self._completion(body, body["max_tokens"]))
        if FAULT == "late":
            time.sleep(60)
        if FAULT == "dies":
            os._exit(3)
        if FAULT == "error":
            return self._answer(500, {"error": "the engine is dead"})
        if FAULT == "no_json":
            return self._answer(200, "a page of a proxy")
        answer = self._completion(body, body["max_tokens"] - (FAULT == "fewer"))
        if FAULT == "other_version":
            answer["model"] = "policy-0"
        if FAULT == "no_logprobs":
            answer["choices"][0]["logprobs"]["token_logprobs"].pop()
        return self._answer(200, answer)

    def _completion(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        logprobs = json.loads(os.environ.get("PROBE_LOGPROBS", "null")) or [-1.0] * count
        choice = {"token_ids": [7] * count, "logprobs": {"token_logprobs": logprobs[:count]}, "finish_reason": "length"}
        return {"model": body["model"], "choices": [choice]}

    def _answer(self, status: int, body: Any) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
