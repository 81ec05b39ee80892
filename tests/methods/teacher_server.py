"""A teacher server with vLLM's endpoints that computes with transformers: `teacher_server.py MODEL PORT FAULT`.

FAULT: none, late (from the second step on), no_logprobs, few (19 at most), other_tokens, other_model (at the second
step), nan, dies (at the second step).
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FAULT = sys.argv[3]
NAME = "the-teacher"
MODEL = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])
TURN = threading.Lock()
USUAL_REQUESTS = 8
"""Number of requests of a check and the first step of seven rows."""
COUNT = {"requests": 0}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer: dict[str, Any] = {"data": [{"id": NAME, "max_model_len": 256}]} if self.path == "/v1/models" else {}
        self._answer(200, answer)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = TOKENIZER(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return self._answer(200, {"tokens": ids[::-1] if FAULT == "other_tokens" else ids})
        assert self.path == "/v1/completions"
        if FAULT == "few" and body["prompt_logprobs"] > 19:
            return self._answer(
                400, {"error": "Requested prompt logprobs of 20, which is greater than max allowed: 19"}
            )
        with TURN:
            COUNT["requests"] += 1
            is_later = COUNT["requests"] > USUAL_REQUESTS
            if is_later and FAULT == "dies":
                os._exit(3)
            if is_later and FAULT == "late":
                time.sleep(30)
            answer = score(body)
            if is_later and FAULT == "other_model":
                answer["model"] = "another"
            return self._answer(200, answer)

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@torch.no_grad()
def score(body: dict[str, Any]) -> dict[str, Any]:
    ids = body["prompt"]
    logprobs = torch.log_softmax(MODEL(torch.tensor([ids])).logits[0].float(), -1)
    entries: list[Any] = [None]
    for position, token in enumerate(ids[1:]):
        values, likeliest = logprobs[position].topk(body["prompt_logprobs"])
        entry = {str(int(number)): {"logprob": float(value)} for number, value in zip(likeliest, values, strict=True)}
        entry.setdefault(str(token), {"logprob": float(logprobs[position, token])})  # vLLM adds it, at its end
        if FAULT == "nan":
            entry[next(iter(entry))] = {"logprob": float("nan")}
        entries.append(entry)
    choice = {"text": "", "prompt_logprobs": None if FAULT == "no_logprobs" else entries}
    return {"model": body["model"], "choices": [choice]}


class Listening(ThreadingHTTPServer):
    request_queue_size = 256


if __name__ == "__main__":
    Listening(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
