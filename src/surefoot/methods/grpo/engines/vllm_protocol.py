"""What is asked of vLLM's endpoints for a completion, and how its answers are read. Pure.

Prompts of text go to /v1/completions. Those with images go to /inference/v1/generate, which takes tokens and images:
each image as it was scaled for training, and one token for it where the prompt of training has one for each cell.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.methods.grpo.routed_experts import as_text, from_text
from surefoot.methods.grpo.types import Completion, Request, Sampling

BAN = -100.0
"""Added to the logit of a token that is never to be drawn."""
LARGEST = 1e4
"""No logprob of a token that was drawn is beyond it, in nats."""
ROUNDING = 1e-3
"""How far above 0 one may come out."""


@dataclass(frozen=True)
class RoutingLayers:
    """Where the routers of a model are. vLLM tells experts for every decoder layer, also for those without any."""

    routers: tuple[int, ...]
    """Numbers of the decoder layers that have one, in order."""
    decoder_layers: int
    num_experts: int


@dataclass(frozen=True)
class Call:
    """A request to an endpoint."""

    path: str
    body: Mapping[str, Any]


def call_for(
    request: Request,
    sampling: Sampling,
    model: str,
    *,
    pictures: Sequence[str] = (),
    image_token: int | None = None,
    has_seed: bool = True,
    ignores_ends: bool = False,
) -> Call:
    """`pictures`: the images of the request, as data: addresses. `image_token`: stands for a cell of them."""
    digest = hashlib.blake2b(repr(request.seed).encode(), digest_size=8).digest()
    drawn: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        # All are said, since a model's generation_config.json may say otherwise.
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": int.from_bytes(digest, "little") >> 1 if has_seed else None,
        "logprobs": 0,
        "stop_token_ids": sorted(sampling.ends),
        "stop": list(sampling.stops) or None,
        "skip_special_tokens": False,
        "ignore_eos": ignores_ends,
    }
    if sampling.banned:
        drawn["logit_bias"] = {str(token): BAN for token in sorted(sampling.banned)}
    if not pictures:
        body = {"model": model, "prompt": request.prompt, "return_token_ids": True, "add_special_tokens": False}
        return Call("/v1/completions", body | drawn)
    assert image_token is not None
    return Call(
        "/inference/v1/generate",
        {
            "model": model,
            "token_ids": _one_token_an_image(request, image_token),
            "content_parts": [{"type": "image_url", "url": picture} for picture in pictures],
            "return_token_ids": True,
            "sampling_params": drawn,
        },
    )


def _one_token_an_image(request: Request, image_token: int) -> list[int]:
    images, ids, at = iter(request.images), [], 0
    while at < len(request.prompt):
        ids.append(request.prompt[at])
        at += next(images).num_tokens if request.prompt[at] == image_token else 1
    return ids


def completion_of(
    answer: Mapping[str, Any],
    request: Request,
    sampling: Sampling,
    model: str,
    policy_version: int,
    vocab_size: int,
    routing: RoutingLayers | None = None,
) -> Completion:
    """The completion that a server answered with. `routing`: where it was asked for experts too.

    Raises: ValueError, whose text says what is not as it was asked for.
    """
    try:
        (choice,) = answer["choices"]
        ids, finish, of_model = list(choice["token_ids"]), choice["finish_reason"], answer["model"]
        logprobs = _logprobs(choice["logprobs"], ids)
        prompt = list(answer["prompt_token_ids"]) if request.images else request.prompt
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"an answer is not of the form it should have ({error}): {str(answer)[:300]}") from error
    if of_model != model:
        raise ValueError(f"a completion is of {of_model}, but {model} was asked for")
    if not ids or len(ids) != len(logprobs) or any(logprob is None for logprob in logprobs):
        raise ValueError(f"a completion has {len(ids)} tokens and {len(logprobs)} logprobs")
    strange = [one for one in ids if type(one) is not int or not 0 <= one < vocab_size or one in sampling.banned]
    if strange:
        raise ValueError(f"a completion has the token {strange[0]!r}, which the model of {vocab_size} cannot draw")
    odd = [one for one in logprobs if not isinstance(one, int | float) or not -LARGEST <= one <= ROUNDING]
    if odd:
        raise ValueError(f"a completion has {odd[0]!r} as a logprob")
    if finish not in ("stop", "length"):
        raise ValueError(f"a completion was ended by '{finish}'")
    if finish == "length" and len(ids) != sampling.max_tokens:
        raise ValueError(f"a completion ended for its length after {len(ids)} of {sampling.max_tokens} tokens")
    if finish == "stop" and not sampling.stops and ids[-1] not in sampling.ends:
        raise ValueError(
            f"a completion stopped after {len(ids)} tokens, at token {ids[-1]}, which ends no answer of training: its "
            "end was lost, or the server has end tokens of its own. Start it with --generation-config vllm"
        )
    if len(ids) > sampling.max_tokens:
        raise ValueError(f"a completion has {len(ids)} tokens, more than the {sampling.max_tokens} asked for")
    if prompt != request.prompt:
        raise ValueError(
            f"the server reads the prompt of {request.place} as {len(prompt)} tokens, which are not the "
            f"{len(request.prompt)} of training: it scales images in another way. Start it with the limits of training "
            "(--mm-processor-kwargs with min_pixels and max_pixels)"
        )
    experts = None
    if routing is not None:
        experts = _experts(choice.get("routed_experts"), len(request.prompt) + len(ids) - 1, routing)
    return Completion(ids, logprobs, finish, policy_version, experts)


def _logprobs(said: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    if "token_logprobs" in said:
        return list(said["token_logprobs"])
    of_tokens = said["content"]
    if [one["token_id"] for one in of_tokens] != ids:
        raise ValueError("logprobs of other tokens")
    return [one["logprob"] for one in of_tokens]


def _experts(said: Any, tokens: int, routing: RoutingLayers) -> str:
    """Those of the layers that have routers. Raises: ValueError."""
    if said is None:
        raise ValueError(
            "a completion comes without the experts of its tokens. Start the server with "
            "--enable-return-routed-experts, or set routing_replay: none"
        )
    found = from_text(said)
    if found.shape[:2] != (tokens, routing.decoder_layers):
        raise ValueError(
            f"a completion comes with the experts of {found.shape[0]} tokens in {found.shape[1]} layers, where "
            f"{tokens} were read, by {routing.decoder_layers} layers"
        )
    found = found[:, list(routing.routers)]
    if found.size and not 0 <= found.min() <= found.max() < routing.num_experts:
        raise ValueError(
            f"a completion comes with experts {found.min()} to {found.max()}, of a model with {routing.num_experts}"
        )
    return as_text(found)
