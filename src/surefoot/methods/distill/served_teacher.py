"""The teacher on a vLLM server: the likeliest tokens of its distribution, which one request gives for a sequence."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf, isfinite
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.data.collate import MicroBatch
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError, StoppedOnFinding
from surefoot.findings import Finding
from surefoot.methods.distill.divergence import LikeliestTokens
from surefoot.methods.distill.settings import DistillConfig
from surefoot.methods.rollout.engines.request_threads import RequestThreads
from surefoot.methods.rollout.engines.server import Server, ServerFailed
from surefoot.methods.rollout.engines.vllm_protocol import MAX_LOGPROB, MAX_ROUNDING_ERROR

PROBE_TEXT = "One, two, three: 4 + 5 = 9.\nÜber 你好 "
"""Text that tokenizers of different families cut in different ways."""
ANSWER_S = 10.0
"""Seconds in which a server must list its models: one that is loading a model does not answer."""
CHECK_S = 60.0
"""Seconds that it has for each further question before the run begins."""
PATH = "/v1/completions"
LATE_FIX = (
    "Start the teacher's server again, and then the same command, which goes on from the last step. If the server is "
    "only slow, raise teacher_timeout_s."
)


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher on a vLLM server."""

    server: Server
    name: str
    """Name of the model on the server."""
    top_k: int
    vocab_size: int
    """Number of the student's tokens: a teacher's token beyond them is none of its own."""
    timeout_s: float
    has_tail: bool = True
    temperature: float = 1.0
    """Temperature of the loss; 1 unless the distribution is normalised over its likeliest tokens."""
    threads: "RequestThreads[_Answer]" = field(default_factory=RequestThreads)

    @classmethod
    def of(cls, config: DistillConfig, name: str, vocab_size: int) -> "ServedTeacher":
        """Return the teacher that a config names. `name`: its name on the server."""
        assert config.teacher_server is not None
        return cls(
            server=Server(config.teacher_server),
            name=name,
            top_k=config.teacher_top_k,
            vocab_size=vocab_size,
            timeout_s=config.teacher_timeout_s,
            has_tail=config.teacher_top_k_tail,
            temperature=config.loss_temperature,
        )

    def submit(self, batches: Sequence[MicroBatch], ranks: World) -> Callable[[float], list[LikeliestTokens] | None]:
        """Ask for the likeliest tokens at the trained tokens of each batch; return the wait for them.

        Waiting is collective, and gives None on all ranks if an answer is missing. Raises, on all ranks: ConfigError
        for images; StoppedOnFinding (SF801, SF806) for a server that is late or gives something else.
        """
        deadline = time.monotonic() + self.timeout_s
        sequences = ranks.run_or_raise_on_all(lambda: [each for batch in batches for each in _sequences_of(batch)])
        futures = self.threads.start([partial(self._ask, *each, deadline) for each in sequences])

        def wait_for(seconds: float) -> list[LikeliestTokens] | None:
            _, pending = wait(futures, None if seconds == inf else seconds)
            if ranks.sum([len(pending)])[0]:
                return None
            answers = iter(ranks.run_or_raise_on_all(lambda: [future.result() for future in futures]))
            return [self._collect(batch, answers) for batch in batches]

        return wait_for

    def _collect(self, batch: MicroBatch, of_sequences: Iterator["_Answer"]) -> LikeliestTokens:
        count = 0 if batch.is_dummy else len(batch.lengths)
        answers = list(islice(of_sequences, count)) or [_nothing(self.top_k, len(batch.ids[0]))]
        ids = torch.tensor([row for answer in answers for row in answer.ids])
        logprobs = torch.tensor([row for answer in answers for row in answer.logprobs], dtype=torch.float32)
        at = batch.target_positions
        return LikeliestTokens(ids[at], logprobs[at] / self.temperature, self.has_tail)

    def body(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the request of a sequence's log-probabilities. vLLM writes one token at least, which is not read."""
        return {
            "model": self.name, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.top_k, "add_special_tokens": False,
        }  # fmt: skip

    def _ask(self, ids: list[int], place: str, deadline: float) -> "_Answer":
        """Return the likeliest tokens after each token of a sequence."""
        try:
            response = self.server.post_with_retries(PATH, self.body(ids), deadline)
        except ServerFailed as error:
            cause = f"the teacher's log-probabilities of {place} are missing: {error}"
            raise StoppedOnFinding(Finding("SF801", cause, {"teacher_timeout_s": self.timeout_s}, LATE_FIX)) from error
        try:
            return parse_answer(response, ids, self)
        except ValueError as error:
            raise self.server.stopped("SF806", f"of the teacher: {error}", model=self.name) from error


@dataclass(frozen=True)
class _Answer:
    """The likeliest tokens after each token of a sequence, each [n][K]; those after the last are never read."""

    ids: list[list[int]]
    logprobs: list[list[float]]


def _sequences_of(batch: MicroBatch) -> list[tuple[list[int], str]]:
    """Return the tokens of each sequence of a batch and the place of its row. Raises: ConfigError for images."""
    if batch.is_dummy:
        return []
    if batch.vision is not None and not batch.vision.is_blank:
        raise ConfigError(
            f"{batch.row_refs[0]}: the row has images, and a teacher server reads text alone. Set teacher_model "
            "instead of teacher_server."
        )
    ids = [each.tolist() for each in batch.ids[0].split(batch.lengths)]
    return list(zip(ids, batch.row_refs, strict=True))


def parse_answer(response: Mapping[str, Any], ids: Sequence[int], teacher: ServedTeacher) -> _Answer:
    """Return what a response says of a sequence. Raises: ValueError for a wrong one."""
    try:
        (choice,) = response["choices"]
        model, entries = response["model"], choice.get("prompt_logprobs")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"a response has an unexpected form ({error}): {str(response)[:300]}") from error
    if model != teacher.name:
        raise ValueError(f"log-probabilities are from {model}, but {teacher.name} was asked")
    if not isinstance(entries, list):
        raise ValueError("a response has no log-probabilities of the prompt: the server does not give them")
    if len(entries) != len(ids):
        raise ValueError(f"a response has log-probabilities of {len(entries)} tokens, and {len(ids)} were sent")
    rows = [_parse_likeliest(entry, teacher) for entry in entries[1:]]
    end = _nothing(teacher.top_k, 1)
    return _Answer([*(tokens for tokens, _ in rows), *end.ids], [*(logprobs for _, logprobs in rows), *end.logprobs])


def _nothing(top_k: int, count: int) -> _Answer:
    """Return what stands in the place of tokens that are not trained."""
    return _Answer([[0] * top_k] * count, [[0.0] * top_k] * count)


def _parse_likeliest(entry: Any, teacher: ServedTeacher) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens and their log-probabilities. vLLM adds the token of the prompt to them."""
    try:
        pairs = sorted(((float(value["logprob"]), int(token)) for token, value in entry.items()), reverse=True)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"log-probabilities of a token have an unexpected form ({error}): {str(entry)[:200]}"
        ) from error
    pairs = pairs[: teacher.top_k]
    if len(pairs) < teacher.top_k:
        raise ValueError(
            f"a token has {len(pairs)} log-probabilities, and teacher_top_k={teacher.top_k} were asked for"
        )
    for logprob, token in pairs:
        if not isfinite(logprob) or not -MAX_LOGPROB <= logprob <= MAX_ROUNDING_ERROR:
            raise ValueError(f"a token has {logprob!r} as a log-probability")
        if not 0 <= token < teacher.vocab_size:
            raise ValueError(f"the token {token} is likely, and the student has {teacher.vocab_size} tokens")
    return [token for _, token in pairs], [logprob for logprob, _ in pairs]


def check_server(config: DistillConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str) -> str:
    """Return the name of the teacher on its server, after asking for its tokens and a few log-probabilities.

    Raises: ConfigError for a server that does not answer, or answers with another model.
    """
    assert config.teacher_server is not None
    server = Server(config.teacher_server)

    def refuse(text: str) -> ConfigError:
        return ConfigError(f"teacher_server={config.teacher_server}: {text} ({where}).")

    try:
        models = server.get("/v1/models", ANSWER_S)
        name, limit = _choose_model(models, config.teacher_model)
        tokens = server.post(
            "/tokenize", {"model": name, "prompt": PROBE_TEXT, "add_special_tokens": False}, CHECK_S
        ).get("tokens")
    except ServerFailed as error:
        what = str(error)[:300].rstrip(".")
        raise refuse(f"{what}. A vLLM server must be ready there: start it, or correct the address") from error
    except ValueError as error:
        raise refuse(str(error).rstrip(".")) from error
    own = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    if tokens != own:
        raise refuse(
            f"{name} has another tokenizer: it reads {PROBE_TEXT!r} as {str(tokens)[:80]}, and the student as "
            f"{str(own)[:80]}. Serve a model with the student's tokenizer"
        )
    longest = config.max_row_tokens + config.max_added_tokens
    if limit is not None and longest >= limit:
        raise refuse(
            f"{name} is served with room for {limit} tokens, one of which it must write, and samples have up to "
            f"{longest}. Start it with --max-model-len {longest + 1} or more"
        )
    teacher = ServedTeacher.of(config, name, vocab_size)
    try:
        parse_answer(server.post(PATH, teacher.body(own), CHECK_S), own, teacher)
    except (ServerFailed, ValueError) as error:
        raise refuse(
            f"{str(error).rstrip('.')}. A server gives at most 20 log-probabilities of a token unless it is started "
            f"with --max-logprobs {config.teacher_top_k}"
        ) from error
    return name


def _choose_model(models: Mapping[str, Any], wanted: str | None) -> tuple[str, int | None]:
    """Return the name of the model to ask, and the most tokens that it reads. Raises: ValueError."""
    entries = models.get("data")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        raise ValueError(f"it does not list its models as vLLM does: {str(models)[:200]}")
    limits = {str(entry["id"]): entry.get("max_model_len") for entry in entries}
    if wanted is None and len(limits) == 1:
        return next(iter(limits.items()))
    for name, limit in limits.items():
        # The config has a folder that is here by its whole path.
        if wanted is not None and (wanted == name or wanted.endswith(f"/{name.removeprefix('./')}")):
            return name, limit
    reason = "teacher_model names none" if wanted is None else f"it has no {wanted}"
    raise ValueError(f"{reason}; it serves {', '.join(sorted(limits)) or 'no model'}. Set teacher_model to one of them")
