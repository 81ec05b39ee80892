"""Completions from a vLLM server, to which adapters alone are sent: the base model is never gathered, nor touched.

A new policy is a new adapter under a name of its own, since the server's cache of prompts goes by the name. At each
sync the file is compared with what was trained, and a sequence is scored by both sides, which shows another base model,
another precision or an adapter without effect. One step changes a policy less than kernels differ: a server that went
on with the last adapter under a new name would show in `importance_ratio` only, after some steps.
"""

import hashlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.errors import ModelError, StoppedOnFinding
from surefoot.events import Phase
from surefoot.findings import CATALOGUE, Finding
from surefoot.models.adapter import read_adapter, write_adapter
from surefoot.models.build import trainable_parameters
from surefoot.models.lora import LoraSettings, adaptable_names
from surefoot.models.placement import whole
from surefoot.parallel.ranks import ALONE, Ranks
from surefoot.rl.engines.server import Server, ServerFailed
from surefoot.rl.rollout import Completion, Request, Sampling

MOST_AT_ONCE = 256
"""Requests under way at a time; the server batches them as it can."""
SYNC_TIMEOUT_S = 300.0
END_TIMEOUT_S = 5.0
PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""Mean difference of logprobs, in nats, that other kernels of this precision may make."""

Score = Callable[[list[int], list[int]], list[float]]
"""(prompt, tokens that follow) -> the trainer's logprobs of these. Collective."""


@dataclass(frozen=True)
class Sent:
    """An adapter that the server has."""

    version: int
    name: str
    folder: Path


class VllmEngine:
    """`Engine` that asks a server. Ranks ask for their own completions; rank 0 sends adapters."""

    phase: Phase = "wait for completions"

    def __init__(
        self,
        server: Server,
        model: PreTrainedModel,
        settings: LoraSettings,
        folder: Path,
        score: Score,
        *,
        timeout_s: float,
        probe_prompt: Sequence[int],
        temperature: float,
        has_seeds: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        """`folder`: where adapters are written, which the server can read. `timeout_s`: for a whole rollout.

        `has_seeds`: each request has a seed of its own; vLLM's CPU build (0.32) ends when it gets several.
        """
        self._server = server
        self._model = model
        self._settings = settings
        self._folder = folder
        self._score = score
        self._timeout_s = timeout_s
        self._probe_prompt = list(probe_prompt)
        self._temperature = temperature
        self._has_seeds = has_seeds
        self._ranks = ranks
        self._sent: Sent | None = None
        self._start = secrets.token_hex(4)
        """Part of the names of this start's adapters: a server may know others of the same versions."""
        self.bytes_sent = 0
        """Of the adapter files of all syncs."""

    def publish(self, policy_version: int) -> None:
        """Send the adapter as it is now, and see that it arrived. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks.
        """
        if self._sent is not None and self._sent.version == policy_version:
            return
        before = self._sent
        target = self._folder / f"policy-{policy_version:08d}"
        wanted = self._write(target)
        name = self._ranks.from_first(lambda: self._send(target, policy_version, wanted))
        self._sent = Sent(policy_version, name, target)
        self._probe(name)
        if before is not None and self._ranks.is_first:
            self._forget(before)

    def generate(self, requests: Sequence[Request], sampling: Sampling, policy_version: int) -> list[Completion]:
        """A completion for each request, in order. Collective. Raises: StoppedOnFinding (SF801, SF806) on all."""
        assert self._sent is not None
        assert self._sent.version == policy_version
        name, deadline = self._sent.name, time.monotonic() + self._timeout_s

        def ask() -> list[Completion]:
            with ThreadPoolExecutor(min(MOST_AT_ONCE, max(len(requests), 1))) as pool:
                return list(
                    pool.map(lambda one: self._complete(one, sampling, name, policy_version, deadline), requests)
                )

        return self._ranks.together(ask, names_rank=False)

    def end(self) -> None:
        """The run is over: a server that goes on does not keep its adapter."""
        if self._sent is not None and self._ranks.is_first:
            with suppress(ServerFailed):  # the run may be over because the server is gone
                self._server.post("/v1/unload_lora_adapter", {"lora_name": self._sent.name}, END_TIMEOUT_S)

    def _write(self, target: Path) -> dict[str, str]:
        """Rank 0 writes what the ranks gather, a tensor at a time; returns a digest of each. Collective."""
        parameters = trainable_parameters(self._model)
        digests: dict[str, str] = {}

        def values() -> Any:
            for name, parameter in parameters.items():
                value = whole(parameter)
                digests[name] = _digest(value)
                yield name, value

        gathered = values()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}

        def write() -> None:
            try:
                if self._ranks.is_first:
                    shutil.rmtree(target, ignore_errors=True)
                    target.mkdir(parents=True)
                    write_adapter(target, shapes, gathered, self._settings, "", adaptable_names(self._model))
            finally:
                for _ in gathered:  # the other ranks, and a first one that could not write: gathering takes all
                    pass

        self._ranks.together(write, names_rank=False)
        return digests

    def _send(self, target: Path, version: int, wanted: Mapping[str, str]) -> str:
        """What rank 0 does: see that the file holds every tensor, and let the server load it. Returns its name."""
        shapes = {name: parameter.shape for name, parameter in trainable_parameters(self._model).items()}
        try:
            found = {name: _digest(value) for name, value in read_adapter(target, shapes, self._settings).items()}
        except ModelError as error:
            raise self._stopped("SF805", f"the adapter of version {version} is not whole: {error}") from error
        wrong = sorted(name for name in wanted if found.get(name) != wanted[name])
        if wrong:
            raise self._stopped(
                "SF805",
                f"{len(wrong)} of {len(wanted)} tensors of the adapter of version {version} are not what was "
                f"trained, {wrong[0]} first",
                tensors=len(wanted),
                wrong=", ".join(wrong[:8]),
            )
        checksum = hashlib.sha256("".join(wanted[name] for name in sorted(wanted)).encode()).hexdigest()[:12]
        self.bytes_sent += sum(path.stat().st_size for path in target.iterdir())
        name = f"policy-{version}-{checksum}-{self._start}"
        try:
            self._server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(target)}, SYNC_TIMEOUT_S)
        except ServerFailed as error:
            raise self._stopped("SF801", f"the adapter of version {version} could not be loaded: {error}") from error
        return name

    def _forget(self, sent: Sent) -> None:
        try:
            self._server.post("/v1/unload_lora_adapter", {"lora_name": sent.name}, SYNC_TIMEOUT_S)
        except ServerFailed as error:
            raise self._stopped("SF801", f"the adapter of version {sent.version} stays loaded: {error}") from error
        shutil.rmtree(sent.folder)

    def _probe(self, name: str) -> None:
        """Let both sides score a sequence that the server made. Collective. Raises: StoppedOnFinding (SF805, SF801)."""
        sampling = Sampling(PROBE_TOKENS, self._temperature)
        request = Request(self._probe_prompt, (0,))
        deadline = time.monotonic() + self._timeout_s
        said = self._ranks.from_first(lambda: vars(self._complete(request, sampling, name, 0, deadline, is_probe=True)))
        ours = self._score(self._probe_prompt, said["ids"])
        differences = [abs(one - other) for one, other in zip(ours, said["logprobs"], strict=True)]
        mean = sum(differences) / len(differences)
        tolerance = PROBE_TOLERANCE.get(self._model.dtype, max(PROBE_TOLERANCE.values()))
        if not mean <= tolerance:  # NaN is no agreement
            stopped = self._stopped(
                "SF805",
                f"the server gives the tokens of a probe other probabilities than the trainer: their logprobs differ "
                f"by {mean:.3g} on average, {max(differences):.3g} at most, where {tolerance:g} is usual",
                adapter=name,
                mean_difference=float(f"{mean:.4g}"),
                largest_difference=float(f"{max(differences):.4g}"),
                tolerance=tolerance,
            )
            stopped.is_agreed = True
            raise stopped

    def _complete(
        self,
        request: Request,
        sampling: Sampling,
        name: str,
        policy_version: int,
        deadline: float,
        *,
        is_probe: bool = False,
    ) -> Completion:
        """Raises: StoppedOnFinding (SF801, SF806)."""
        seed = int.from_bytes(hashlib.blake2b(repr(request.seed).encode(), digest_size=8).digest(), "little") >> 1
        body = {
            "model": name,
            "prompt": request.prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": seed if self._has_seeds else None,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(sampling.ends),
            "stop": list(sampling.stops) or None,
            "skip_special_tokens": False,
            "ignore_eos": is_probe,
            "add_special_tokens": False,
        }
        try:
            answer = self._server.post("/v1/completions", body, deadline - time.monotonic())
        except ServerFailed as error:
            raise self._stopped("SF801", f"a completion is missing: {error}") from error
        try:
            (choice,) = answer["choices"]
            ids, logprobs = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
            finish, model = choice["finish_reason"], answer["model"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._stopped("SF806", f"an answer is not of the form it should have: {str(answer)[:300]}") from error
        wrong = _wrong(ids, logprobs, finish, model, name, sampling)
        if wrong:
            raise self._stopped("SF806", wrong, adapter=name, tokens=len(ids), finish=finish)
        return Completion(ids, logprobs, finish, policy_version)

    def _stopped(self, code: str, cause: str, **evidence: Any) -> StoppedOnFinding:
        return StoppedOnFinding(Finding(code, cause, {**evidence, **self._server.evidence()}, CATALOGUE[code].fix))


def _wrong(
    ids: Sequence[int], logprobs: Sequence[float], finish: str, model: str, name: str, sampling: Sampling
) -> str | None:
    """What is not as asked for in an answer."""
    if model != name:
        return f"a completion is of {model}, but {name} was asked for"
    if not ids or len(ids) != len(logprobs) or any(logprob is None for logprob in logprobs):
        return f"a completion has {len(ids)} tokens and {len(logprobs)} logprobs"
    if finish not in ("stop", "length"):
        return f"a completion was ended by '{finish}'"
    if finish == "length" and len(ids) != sampling.max_tokens:
        return f"a completion ended for its length after {len(ids)} of {sampling.max_tokens} tokens"
    if len(ids) > sampling.max_tokens:
        return f"a completion has {len(ids)} tokens, more than the {sampling.max_tokens} asked for"
    return None


def _digest(value: Tensor) -> str:
    """Of a value in float32, as adapters are written."""
    return hashlib.blake2b(value.detach().float().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
