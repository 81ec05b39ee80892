"""Requests to vLLM's endpoints for completions, and the parsing of its responses. Pure.

Prompts of text go to /v1/completions. Prompts with images go to /inference/v1/generate, which takes tokens and images:
each image as it was scaled for training, and one token for it where the prompt of training has one for each cell.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.methods.rollout.routed_experts import decode_experts, encode_experts
from surefoot.methods.rollout.types import Completion, Request, Sampling

BANNED_BIAS = -100.0
"""Bias added to the logit of a token that must never be drawn."""
MAX_LOGPROB = 1e4
"""Largest magnitude of the logprob of a drawn token, in nats."""
MAX_ROUNDING_ERROR = 1e-3
"""Largest logprob above 0 that is still a rounding error."""


@dataclass(frozen=True)
class RoutingLayers:
    """The layers of a model that have routers. vLLM reports experts for every decoder layer, even without a router."""

    routers: tuple[int, ...]
    """Numbers of the decoder layers that have a router, in order."""
    decoder_layers: int
    num_experts: int


@dataclass(frozen=True)
class ServedModel:
    """The model of a server, as far as requests and responses depend on it."""

    vocab_size: int
    image_token: int | None = None
    """Token of a cell of an image; None for a model without vision."""
    routing: RoutingLayers | None = None
    """Set if completions must record the experts of their tokens."""
    has_seeds: bool = True
    """Whether each request has its own seed; vLLM's CPU build (0.32) ends when it gets several."""


@dataclass(frozen=True)
class Policy:
    """A policy that a server has."""

    name: str
    """Its name on the server."""
    version: int
    """Number of optimizer steps of its weights."""


@dataclass(frozen=True)
class Call:
    """A request to an endpoint."""

    path: str
    body: Mapping[str, Any]


def build_call(
    request: Request,
    sampling: Sampling,
    policy_name: str,
    model: ServedModel,
    image_urls: Sequence[str] = (),
    *,
    is_probe: bool = False,
) -> Call:
    """Return the call. `image_urls`: data: URLs of the request's images. `is_probe`: end tokens do not end it."""
    digest = hashlib.blake2b(repr(request.seed).encode(), digest_size=8).digest()
    sampling_params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        # All are set, because a model's generation_config.json may have other values.
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": int.from_bytes(digest, "little") >> 1 if model.has_seeds else None,
        "logprobs": 0,
        "stop_token_ids": sorted(sampling.ends),
        "stop": list(sampling.stops) or None,
        "skip_special_tokens": False,
        "ignore_eos": is_probe,
    }
    if sampling.banned:
        sampling_params["logit_bias"] = {str(token): BANNED_BIAS for token in sorted(sampling.banned)}
    if not image_urls:
        body = {"model": policy_name, "prompt": request.prompt, "return_token_ids": True, "add_special_tokens": False}
        return Call("/v1/completions", body | sampling_params)
    assert model.image_token is not None
    return Call(
        "/inference/v1/generate",
        {
            "model": policy_name,
            "token_ids": _collapse_image_tokens(request, model.image_token),
            "content_parts": [{"type": "image_url", "url": url} for url in image_urls],
            "return_token_ids": True,
            "sampling_params": sampling_params,
        },
    )


def _collapse_image_tokens(request: Request, image_token: int) -> list[int]:
    images, ids, index = iter(request.images), [], 0
    while index < len(request.prompt):
        ids.append(request.prompt[index])
        index += next(images).num_tokens if request.prompt[index] == image_token else 1
    return ids


def parse_completion(
    response: Mapping[str, Any],
    request: Request,
    sampling: Sampling,
    policy: Policy,
    model: ServedModel,
    *,
    is_probe: bool = False,
) -> Completion:
    """Return the completion of a response, without experts for a probe. Raises: ValueError for a wrong one."""
    try:
        (choice,) = response["choices"]
        ids, finish, response_model = list(choice["token_ids"]), choice["finish_reason"], response["model"]
        logprobs = _parse_logprobs(choice["logprobs"], ids)
        prompt = list(response["prompt_token_ids"]) if request.images else request.prompt
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"a response has an unexpected form ({error}): {str(response)[:300]}") from error
    if response_model != policy.name:
        raise ValueError(f"a completion is from {response_model}, but {policy.name} was requested")
    if not ids or len(ids) != len(logprobs) or any(logprob is None for logprob in logprobs):
        raise ValueError(f"a completion has {len(ids)} tokens and {len(logprobs)} logprobs")
    invalid_ids = [
        token
        for token in ids
        if type(token) is not int or not 0 <= token < model.vocab_size or token in sampling.banned
    ]
    if invalid_ids:
        raise ValueError(
            f"a completion has the token {invalid_ids[0]!r}, which a model of {model.vocab_size} tokens cannot draw"
        )
    invalid_logprobs = [
        logprob
        for logprob in logprobs
        if not isinstance(logprob, int | float) or not -MAX_LOGPROB <= logprob <= MAX_ROUNDING_ERROR
    ]
    if invalid_logprobs:
        raise ValueError(f"a completion has {invalid_logprobs[0]!r} as a logprob")
    if finish not in ("stop", "length"):
        raise ValueError(f"a completion has the finish reason '{finish}'")
    if finish == "length" and len(ids) != sampling.max_tokens:
        raise ValueError(f"a completion ended for its length after {len(ids)} of {sampling.max_tokens} tokens")
    if finish == "stop" and not sampling.stops and ids[-1] not in sampling.ends:
        raise ValueError(
            f"a completion stopped after {len(ids)} tokens, at token {ids[-1]}, which is no end token of training: its "
            "end was lost, or the server has end tokens of its own. Start it with --generation-config vllm"
        )
    if len(ids) > sampling.max_tokens:
        raise ValueError(f"a completion has {len(ids)} tokens, more than the {sampling.max_tokens} requested")
    if prompt != request.prompt:
        raise ValueError(
            f"the server reads the prompt of {request.place} as {len(prompt)} tokens, which differ from the "
            f"{len(request.prompt)} of training: it scales images differently. Start it with the limits of training "
            "(--mm-processor-kwargs with min_pixels and max_pixels)"
        )
    experts = None
    if model.routing is not None and not is_probe:
        experts = _parse_experts(choice.get("routed_experts"), len(request.prompt) + len(ids) - 1, model.routing)
    return Completion(ids, logprobs, finish, policy.version, experts)


def _parse_logprobs(payload: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    if "token_logprobs" in payload:
        return list(payload["token_logprobs"])
    entries = payload["content"]
    if [entry["token_id"] for entry in entries] != ids:
        raise ValueError("logprobs of other tokens")
    return [entry["logprob"] for entry in entries]


def _parse_experts(payload: Any, num_tokens: int, routing: RoutingLayers) -> str:
    """Return the experts of the layers that have routers. Raises: ValueError."""
    if payload is None:
        raise ValueError(
            "a completion lacks the experts of its tokens. Start the server with "
            "--enable-return-routed-experts, or set routing_replay: none"
        )
    experts = decode_experts(payload)
    if experts.shape[:2] != (num_tokens, routing.decoder_layers):
        raise ValueError(
            f"a completion has the experts of {experts.shape[0]} tokens in {experts.shape[1]} layers, but the model "
            f"has read {num_tokens} tokens in {routing.decoder_layers} layers"
        )
    experts = experts[:, list(routing.routers)]
    if experts.size and not 0 <= experts.min() <= experts.max() < routing.num_experts:
        raise ValueError(
            f"a completion has experts {experts.min()} to {experts.max()}, but the model has {routing.num_experts}"
        )
    return encode_experts(experts)
