"""A server with vLLM's endpoints that computes: transformers' model with PEFT's adapters, on the CPU.

`model_server.py serve MODEL --host HOST --port PORT ...`, as a run starts `vllm`. FAULT of the environment: none,
ignores_adapters, drifts (probabilities that are wrong for all but probes), dies (at the completions of the second
policy).
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

FAULT = os.environ["FAULT"]
DRIFT = 0.5
BASE = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
ADAPTED: dict[str, Any] = {}
"""The name of an adapter -> the model with it."""
TURN = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with TURN:
            if self.path == "/v1/load_lora_adapter":
                add_adapter(body["lora_name"], body["lora_path"])
            elif self.path == "/v1/unload_lora_adapter":
                ADAPTED["model"].delete_adapter(body["lora_name"])
            if self.path != "/v1/completions":
                return self._answer({})
            if FAULT == "dies" and body["model"].startswith("policy-00000001") and not body["ignore_eos"]:
                os._exit(3)
            return self._answer(completion(body))

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


def add_adapter(name: str, path: str) -> None:
    if not ADAPTED:
        ADAPTED["model"] = PeftModel.from_pretrained(BASE, path, adapter_name=name).eval()
    else:
        ADAPTED["model"].load_adapter(path, adapter_name=name)


@torch.no_grad()
def completion(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM answers; each token by a forward over all before it."""
    model = ADAPTED["model"]
    model.set_adapter(body["model"])
    ids, logprobs, ends = list(body["prompt"]), [], set() if body["ignore_eos"] else set(body["stop_token_ids"])
    while len(logprobs) < body["max_tokens"] and not (logprobs and ids[-1] in ends):
        if FAULT == "ignores_adapters":
            with model.disable_adapter():
                logits = model(torch.tensor([ids])).logits[0, -1]
        else:
            logits = model(torch.tensor([ids])).logits[0, -1]
        for token, bias in body.get("logit_bias", {}).items():
            logits[int(token)] += bias
        scores = torch.log_softmax(logits / body["temperature"], dim=-1)
        ids.append(int(torch.multinomial(scores.exp(), 1)))
        logprobs.append(float(scores[ids[-1]]) - DRIFT * (FAULT == "drifts" and not body["ignore_eos"]))
    choice = {
        "token_ids": ids[len(body["prompt"]) :],
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": "stop" if ids[-1] in ends else "length",
    }
    return {"model": body["model"], "choices": [choice]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ThreadingHTTPServer.request_queue_size = 256
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
