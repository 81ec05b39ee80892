"""A server with vLLM's endpoints on a real port, whose answers can be wrong: `engine_server.py PORT FAULT`.

Each token is 7 with a logprob that the request's model name does not change, but for a trial. FAULT: none, late, dies,
error, fewer, fewer_and_stop, late_sync, other_version, no_logprobs, no_experts, few_experts, odd_experts,
other_experts, refuses_adapter, no_json, no_sleep, sleepless, no_reload, keeps_cache, trickles, busy_twice,
ignores_adapters, or one of ODD.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from surefoot.methods.rollout.routed_experts import encode_experts

FAULT = sys.argv[2]
PROBE_TOKENS = 24
ODD = {
    "beyond": ("token_ids", 10**7), "negative": ("token_ids", -5), "text_token": ("token_ids", "7"),
    "banned": ("token_ids", 9), "nan": ("logprobs", float("nan")), "text": ("logprobs", "-1.0"),
    "endless": ("logprobs", -1e300), "positive": ("logprobs", 0.5),
}  # fmt: skip
"""What one token or its logprob is instead."""
ASKED: dict[str, Any] = {"is_sleeping": False}
"""What was asked for besides completions."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {
            "/is_sleeping": {"is_sleeping": ASKED["is_sleeping"]},
            "/v1/models": {"data": [{"id": "served"}]},
            "/asked": ASKED,
        }
        self._answer(200, answers.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter" and FAULT == "late_sync":
            time.sleep(60)
        if self.path == "/v1/load_lora_adapter" and FAULT == "refuses_adapter":
            return self._answer(400, {"error": "no room for adapters"})
        if self.path in ("/wake_up", "/sleep?level=1"):
            ASKED["is_sleeping"] = self.path != "/wake_up" and FAULT != "sleepless"
            return self._answer(404 if FAULT == "no_sleep" else 200, {})
        if self.path == "/collective_rpc":
            ASKED[body["method"]] = body["kwargs"]["weights_path"]
            return self._answer(404 if FAULT == "no_reload" else 200, {"results": [None]})
        if self.path in ("/reset_prefix_cache", "/reset_encoder_cache"):
            ASKED["caches"] = [*ASKED.get("caches", []), self.path][-2:]
            return self._answer(200, {"success": FAULT != "keeps_cache"})
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
        if FAULT == "busy_twice":  # each third request is taken
            ASKED["tries"] = ASKED.get("tries", 0) + 1
            if ASKED["tries"] % 3:
                return self._answer(503, {"error": "not now"})
        if FAULT == "no_json":
            return self._answer(200, "a page of a proxy")
        answer = self._completion(body, body["max_tokens"] - FAULT.startswith("fewer"))
        if FAULT == "fewer_and_stop":
            answer["choices"][0]["finish_reason"] = "stop"
        if FAULT == "other_version":
            answer["model"] = "policy-0"
        if FAULT == "no_logprobs":
            answer["choices"][0]["logprobs"]["token_logprobs"].pop()
        return self._answer(200, answer)

    def _completion(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        usual = -2.0 if body["model"].startswith("trial") and FAULT != "ignores_adapters" else -1.0
        logprobs = (json.loads(os.environ.get("PROBE_LOGPROBS", "null")) or [usual] * count)[:count]
        choice: dict[str, Any] = {
            "token_ids": [7] * count,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": "length",
        }
        if FAULT in ODD and count != PROBE_TOKENS:
            name, value = ODD[FAULT]
            of_tokens = choice[name] if name == "token_ids" else choice[name]["token_logprobs"]
            of_tokens[-1] = value
        if FAULT == "few_experts":
            choice["routed_experts"] = encode_experts(np.zeros((3, 2, 2), np.int16))
        if FAULT == "odd_experts":
            choice["routed_experts"] = [[0, 1]]
        if FAULT == "other_experts":
            choice["routed_experts"] = encode_experts(np.full((6, 2, 2), 9, np.int16))
        return {"model": body["model"], "choices": [choice]}

    def _answer(self, status: int, body: Any) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if FAULT == "trickles" and self.path == "/v1/completions" and b'"token_ids": [7, 7, 7, 7, 7]' in content:
            for byte in content:  # none of its pieces is late
                self.wfile.write(bytes([byte]))
                time.sleep(0.2)
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


class Listening(ThreadingHTTPServer):
    """As many may knock at a time as at a real server; of more than the usual five some were turned away."""

    request_queue_size = 256


if __name__ == "__main__":
    Listening(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
