"""A tokenizer and its chat template as plain data, from which worker processes build a renderer."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from surefoot.data.images import ImageSettings
from surefoot.data.template_source import TemplateSource
from surefoot.errors import DataError, is_panic
from surefoot.system.atomic_io import cache_folder, write_bytes
from surefoot.system.json_files import DamagedFile, read_object

TEXT_ONLY = "this model reads text only; take a model that reads images, such as Qwen3-VL or InternVL"
TODAY = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)")
LOOKS_SPECIAL = re.compile(r"^<[|｜].+[|｜]>$")  # noqa: RUF001 - DeepSeek writes a wide bar
"""Pattern of control tokens such as Qwen's `<|fim_prefix|>`, which its tokenizer does not mark as special."""


@dataclass(frozen=True)
class RendererSource:
    """A tokenizer and its template as plain data, for worker processes and the cache key."""

    template: TemplateSource
    tokenizer_sha256: str
    bos_id: int | None
    images: ImageSettings | None = None
    """Image settings; None if images cannot be read."""
    no_vision_reason: str = TEXT_ONLY
    """Reason why images cannot be read."""

    @property
    def tokenizer_file(self) -> Path:
        """Path of the cached tokenizer, which workers read: as a Python string it would take several times its size."""
        return cache_folder() / "data" / "tokenizers" / f"{self.tokenizer_sha256}.json"

    @staticmethod
    def of(
        tokenizer: PreTrainedTokenizerBase,
        kwargs: dict[str, Any],
        *,
        parse_special_tokens: bool,
        today: date = date(2024, 7, 26),
        images: ImageSettings | None = None,
        no_vision_reason: str = TEXT_ONLY,
    ) -> "RendererSource":
        """Build the source and store the tokenizer in the cache. Raises: DataError for an unusable tokenizer."""
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer without character offsets; a fast one is needed."
            )
        if tokenizer.eos_token is None:
            raise DataError("the tokenizer names no end-of-sequence token, so completions could never end.")
        with tokenizer_faults():
            backend = tokenizer.backend_tokenizer
            if backend.truncation is not None or backend.padding is not None:
                backend = Tokenizer.from_str(backend.to_str())
                backend.no_truncation()
                backend.no_padding()
            content = backend.to_str().encode()
            template = build_template_source(tokenizer, kwargs, today, parse_special_tokens=parse_special_tokens)
        source = RendererSource(
            template, hashlib.sha256(content).hexdigest(), tokenizer.bos_token_id, images, no_vision_reason
        )
        if not source.tokenizer_file.is_file():
            write_bytes(source.tokenizer_file, content)
        return source


def build_template_source(
    tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any], today: date, *, parse_special_tokens: bool
) -> TemplateSource:
    begins = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    has_template = tokenizer.chat_template is not None
    return TemplateSource(
        template=_get_template(tokenizer, None, today) if has_template else None,
        tool_template=_get_template(tokenizer, [], today) if has_template else None,
        special_tokens=dict(tokenizer.special_tokens_map),
        controls=tuple(
            sorted(
                token.content
                for token in tokenizer.added_tokens_decoder.values()
                if token.special or LOOKS_SPECIAL.match(token.content)
            )
        ),
        eos=str(tokenizer.eos_token),
        plain_start=str(tokenizer.bos_token) if begins else "",
        kwargs=kwargs,
        parse_special_tokens=parse_special_tokens,
        generation_ends=_read_generation_ends(tokenizer),
    )


def _read_generation_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special tokens at which the generation_config.json beside the tokenizer ends an answer."""
    path = Path(tokenizer.name_or_path) / "generation_config.json"
    if not tokenizer.name_or_path or not path.is_file():
        return ()
    try:
        ends = read_object(path).get("eos_token_id")
    except DamagedFile as error:
        raise DataError(f"{error}. Take the file of the model's release") from error
    named = tokenizer.added_tokens_decoder
    return tuple(named[end].content for end in (ends if isinstance(ends, list) else [ends]) if end in named)


def _get_template(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None, today: date) -> str:
    """Return the chat template, with `today` in place of the current date so that runs are reproducible."""
    try:
        template: str = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        names = ", ".join(sorted(tokenizer.chat_template)) if isinstance(tokenizer.chat_template, dict) else "several"
        raise DataError(
            f"the tokenizer has the chat templates {names}, and none is the default. Give one with chat_template"
        ) from error
    return TODAY.sub(lambda match: json.dumps(today.strftime(match["format"])), template)


def is_fault(error: BaseException) -> bool:
    """Return whether the tokenizers library raised it: Exception itself, or a panic."""
    return type(error) is Exception or is_panic(error)


@contextmanager
def tokenizer_faults() -> Iterator[None]:
    """Turn what the tokenizers library raises for an unusable tokenizer into a DataError."""
    try:
        yield
    except BaseException as error:
        if not is_fault(error):
            raise
        raise DataError(
            f"the model's tokenizer cannot be used: {str(error)[:200]}. Take the tokenizer.json of the model's release."
        ) from error
