"""Row formats: converts rows of every known format to conversations, and detects formats by column names.

This module does not depend on files, templates or tokens.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import Any, Literal

from surefoot.data.conversation import BadRow, Conversation, Message, check_tools, check_turns, shown
from surefoot.data.image_columns import IMAGE_COLUMNS, PLACEHOLDER, looks_like_images, place_images, read_image_columns
from surefoot.data.message_content import parsed, text_of, tools_of
from surefoot.data.messages import Columns, MessageReader
from surefoot.data.pair_formats import read_preference, read_rejected_messages, read_rejected_response

IN_THE_ROW = "bytes in the row"
"""Placeholder for an image that has no name."""
ANSWERS = frozenset(("response", "output", "completion"))
"""Columns that a prompt-only row does not need."""
SIDES = frozenset(("chosen", "rejected"))
"""Columns of preference data."""
TURNS = {"role": "messages", "from": "conversations"}
"""Columns with the turns of a conversation, by a key that each turn has."""
LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is desired, of TRL and ms-swift, and of LLaMA-Factory."""
MARGIN = "margin"
"""Column that says by how much the score of the chosen answer should be above that of the rejected one."""
UNTRAINABLE_COLUMNS = ("video", "videos", "audio", "audios")


@dataclass(frozen=True)
class FormatSpec:
    """The format of the rows of one source."""

    format: str = "auto"
    """Name in FORMATS, or `auto`: detected from the columns."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Map from Surefoot's column names to those of the file."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """`tags` of a LLaMA-Factory entry: role_tag, content_tag, user_tag, ..."""
    only_mapped: bool = False
    """Whether to ignore optional columns that are not in `columns`, as LLaMA-Factory does."""
    named_in: str = "`columns`"
    """Name of the place that sets `columns`, for error messages."""
    system: str | None = None
    """System message of conversations without one."""
    prompts: bool = False
    """Whether rows are prompts, which the model answers in GRPO. A row's own answer is kept as a column."""
    pairs: bool = False
    """Whether rows are pairs of a chosen and a rejected answer."""
    labels: bool = False
    """Whether rows have a label that says whether their answer is desired."""
    margins: bool = False
    """Whether pairs may have a margin, which is kept as a column."""

    @property
    def candidates(self) -> dict[str, frozenset[str]]:
        """The formats that rows may have, with the columns that each requires."""
        formats = {
            name: format.required_columns(prompts=self.prompts)
            for name, format in FORMATS.items()
            if format.is_pair == self.pairs
        }
        if self.prompts or self.labels:
            del formats["text"]  # a text has no question
        return formats


@dataclass(frozen=True)
class Format:
    """A row format: its required columns, its optional columns, and its reader."""

    required: frozenset[str]
    optional: frozenset[str]
    read: Callable[["Reader", Columns], Conversation]
    is_pair: bool = False
    """Whether its rows have a chosen and a rejected answer."""

    def required_columns(self, *, prompts: bool) -> frozenset[str]:
        """Return the columns a row must have; a prompt needs no answer."""
        return self.required - ANSWERS if prompts else self.required


def detect(columns: Collection[str], spec: FormatSpec = FormatSpec(), example: str | None = None) -> str:
    """Return the name of the format that has these columns, among those that `spec` allows.

    `example`: a map of the columns for the message.
    Raises: BadRow if no format or several fit; it lists the candidates.
    """
    formats = spec.candidates
    candidates = [name for name, needed in formats.items() if needed <= set(columns)]
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(sorted(columns)[:8]) + (f", ... ({len(columns)} columns)" if len(columns) > 8 else "")
    if candidates:
        raise BadRow(
            f"the columns ({names}) fit several formats: {', '.join(candidates)}. "
            f"Say which one with `dataset_format: {candidates[0]}`"
        )
    format_list = "; ".join(f"{name} ({' + '.join(sorted(needed, reverse=True))})" for name, needed in formats.items())
    if not spec.pairs and set(columns) >= SIDES:
        raise BadRow(f"the columns ({names}) are of preference data: `method: dpo`, `orpo` and `reward` train on pairs")
    texts = ["query"] if spec.prompts else ["query", *sorted(SIDES)] if spec.pairs else ["query", "response"]
    example = example or ", ".join(f"{name}: YOUR_COLUMN" for name in texts)
    raise BadRow(
        f"the columns ({names}) fit no known format: {format_list}. Say what yours mean, for example with "
        f"`columns: {{{example}}}`"
    )


def _map_of_turns(row: Columns) -> str | None:
    """Return the map that names the column of a row with turns of a conversation; None if there is none."""
    for column, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        names = [name for key, name in TURNS.items() if isinstance(first, Mapping) and key in first]
        if names:
            return f"{names[0]}: {column}"
    return None


def format_of(spec: FormatSpec, first_row: Columns) -> str:
    """Return the format of a file: the one named in its spec, or that of its first row.

    Raises: BadRow if it is ambiguous or unknown.
    """
    if spec.format == "auto":
        return detect(_rename_columns(first_row, spec).keys(), spec, None if spec.pairs else _map_of_turns(first_row))
    if FORMATS[spec.format].is_pair != spec.pairs:
        where = spec.named_in if spec.only_mapped else "dataset_format"
        expected = (
            "pairs of answers" if spec.pairs else "single answers. Pairs are for `method: dpo`, `orpo` and `reward`"
        )
        raise BadRow(f"the format of these rows is {spec.format} ({where}), and the method trains on {expected}")
    return spec.format


def _rename_columns(row: Columns, spec: FormatSpec) -> Columns:
    """Rename the columns of a row to Surefoot's names."""
    if not spec.columns:
        return row
    required = FORMATS[spec.format].required if spec.format != "auto" else frozenset(spec.columns)
    absent = [source for name, source in spec.columns.items() if source not in row and name in required]
    if absent:
        raise BadRow(f"column '{absent[0]}', named in {spec.named_in}, is missing; the row has {shown(list(row))}")
    sources = set(spec.columns.values())
    mapped = {name: value for name, value in row.items() if name not in sources}
    if spec.only_mapped:
        format = FORMATS[spec.format]
        mapped = {name: value for name, value in mapped.items() if name not in format.optional or name in IMAGE_COLUMNS}
    return mapped | {name: row[source] for name, source in spec.columns.items() if source in row}


class Reader(MessageReader):
    """A reader for the rows of one file, which all have the same format.

    `keep_columns`: keep the columns that are not part of the conversation, for the method.
    """

    def __init__(self, spec: FormatSpec, format: str, *, keep_columns: bool = False) -> None:
        super().__init__(spec.tags)
        self.spec = spec
        self.format = format
        self._keep_columns = keep_columns
        self._detected: dict[tuple[str, ...], str] = {}

    def read(self, row: Columns) -> Conversation:
        """Return the conversation of a row.

        Raises: BadRow for a row whose format is not the file's, or that is no trainable conversation.
        """
        columns = _rename_columns(row, self.spec)
        if self.spec.format == "auto":
            names = tuple(columns)
            row_format = self._detected.get(names) if len(names) < 64 else None
            if row_format is None:
                row_format = self._detected[names] = detect(names, self.spec)
            if row_format != self.format:
                raise BadRow(
                    f"mixed formats: this row is {row_format}, the file began as {self.format}. Split the file"
                )
        format = FORMATS[self.format]
        missing = sorted(format.required_columns(prompts=self.spec.prompts) - columns.keys())
        if missing:
            raise BadRow(f"column '{missing[0]}' of format {self.format} is missing; the row has {shown(list(row))}")
        is_desired = _read_label(columns) if self.spec.labels else None
        _refuse_untrainable(columns, is_desired)
        if self.spec.prompts:
            return self._read_prompt(format, columns)
        conversation = self._read_conversation(format, columns)
        if is_desired is not None:
            conversation = _label(conversation, is_desired)
        for side in conversation.sides:
            if side.kind == "chat":
                check_turns(side.messages)
                check_tools(side.messages, side.tools)
        if self.spec.margins:
            return replace(conversation, columns=_read_margin(columns))
        if not self._keep_columns:
            return conversation
        used = format.required | format.optional
        return replace(conversation, columns={name: value for name, value in columns.items() if name not in used})

    def _read_conversation(self, format: Format, columns: Columns) -> Conversation:
        """Return the conversation with its images in their places, and the system message that it may lack."""
        conversation = self._complete(format.read(self, columns), columns)
        rejected = conversation.rejected
        return conversation if rejected is None else replace(conversation, rejected=self._complete(rejected, columns))

    def _complete(self, conversation: Conversation, columns: Columns) -> Conversation:
        conversation = self._place_row_images(conversation, columns)
        messages, first = conversation.messages, conversation.first_trained
        if self.spec.system is None or conversation.kind != "chat" or (messages and messages[0].role == "system"):
            return conversation
        messages = (Message("system", self.spec.system), *messages)
        return replace(conversation, messages=messages, first_trained=first + 1 if first else 0)

    def _place_row_images(self, conversation: Conversation, columns: Columns) -> Conversation:
        """Return the conversation with the images of the row's columns put in their places."""
        sources = read_image_columns(
            {name: _parse_image_list(columns[name], name) for name in IMAGE_COLUMNS if name in columns}
        )
        if sources is None and any(PLACEHOLDER in message.content for message in conversation.messages):
            likely = next((name for name, value in columns.items() if looks_like_images(name, value)), None)
            if likely is not None:
                raise BadRow(f"a turn says {PLACEHOLDER}, and no column is `images`. Set columns: {{images: {likely}}}")
        if sources and conversation.kind in ("completion", "text", "text prompt"):
            raise BadRow(
                "the row has images, but bare texts instead of messages to put them into. Give messages, or "
                "name the text as a question: columns: {query: prompt}"
            )
        return replace(conversation, messages=place_images(conversation.messages, sources))

    def _read_prompt(self, format: Format, columns: Columns) -> Conversation:
        """Read a row as a prompt: its last answer, if it has one, is passed to the reward functions as `response`."""
        if isinstance(columns.get("prompt"), str) and self.format == "prompt_completion":
            prompt = Message("user", text_of(columns["prompt"], "prompt"))
            messages = self._place_row_images(Conversation((prompt,), "text prompt"), columns).messages
            tools: tuple[dict[str, Any], ...] = ()
            kind: Literal["prompt", "text prompt"] = "text prompt"
        else:
            stand_ins: dict[str, Any] = dict.fromkeys(format.required & ANSWERS, "")
            if self.format == "prompt_completion":
                stand_ins["completion"] = []
            conversation = self._read_conversation(format, {**columns, **stand_ins})
            messages, tools, kind = conversation.messages, conversation.tools, "prompt"
        answers = []
        while messages and messages[-1].role == "assistant":
            answers.append(messages[-1].content)
            messages = messages[:-1]
        if kind == "prompt":
            check_turns([*messages, Message("assistant", "")])
            check_tools(messages, tools)
        elif not messages[0].content:
            raise BadRow("the prompt is empty")
        used = (format.required | format.optional) - ANSWERS
        others = {name: value for name, value in columns.items() if name not in used}
        others["prompt"] = (
            messages[0].content if kind == "text prompt" else [message.as_template_input() for message in messages]
        )
        images = Conversation(messages).images
        if images:
            others["images"] = [source if isinstance(source, str) else IN_THE_ROW for source in images]
        if any(answers):
            others.setdefault("response", answers[0])
        for name in format.required & ANSWERS & columns.keys():
            answer = columns[name]
            is_messages = isinstance(answer, list) and answer and isinstance(answer[-1], dict)
            others.setdefault("response", answer[-1].get("content") if is_messages else answer)
        return Conversation(messages, kind, tools, columns=others)


def _read_label(columns: Columns) -> bool:
    """Return whether the answer of a row is desired. Raises: BadRow."""
    names = [name for name in LABELS if columns.get(name) is not None]
    if len(names) != 1:
        reason = "several labels: " + ", ".join(names) if names else "no label"
        raise BadRow(f"{reason}. The answer needs `label` (or `kto_tag`): true if it is desired, false if not")
    value = columns[names[0]]
    if isinstance(value, str) and value.lower() in ("true", "false"):  # as CSV has it
        return value.lower() == "true"
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise BadRow(f"{names[0]} is {shown(value)}; it must be true (the answer is desired) or false")


def _read_margin(columns: Columns) -> dict[str, float]:
    """Return the margin of a pair as its only column; none without one. Raises: BadRow."""
    value = columns.get(MARGIN)
    if value is None:
        return {}
    try:
        margin = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else nan
    except ValueError:
        margin = nan
    if not isfinite(margin):
        raise BadRow(f"{MARGIN} is {shown(value)}; it must be a number: by how much the chosen answer is better")
    return {MARGIN: margin}


def _label(conversation: Conversation, is_desired: bool) -> Conversation:
    """Return a conversation whose answer, what follows the last question, is the only part in the loss."""
    roles = [message.role for message in conversation.messages]
    after_question = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    return replace(conversation, is_desired=is_desired, first_trained=conversation.first_trained or after_question)


def _refuse_untrainable(columns: Columns, is_desired: bool | None) -> None:
    """Raise BadRow for rows that would be trained as text although they are not meant to be."""
    for name in UNTRAINABLE_COLUMNS:
        if columns.get(name):
            raise BadRow(f"the row has {name} ({shown(columns[name])}); this version trains on text and images")
    if is_desired is None and (
        columns.get("kto_tag") is False or (columns.get("label") is False and "completion" in columns)
    ):
        raise BadRow("its label is false: its answer is not one to learn. `method: kto` trains on both")


def _read_prompt_completion(reader: Reader, columns: Columns) -> Conversation:
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow("the completion is empty, so there is nothing to train on")
        turns = (Message("user", text_of(prompt, "prompt")), Message("assistant", text_of(completion, "completion")))
        return Conversation(turns, "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        context, tools = reader.messages(prompt, "prompt")
        if reader.spec.prompts:
            return Conversation(context, tools=(*tools_of(columns.get("tools")), *tools))
        answers, more = reader.messages(completion, "completion")
        tools = (*tools_of(columns.get("tools")), *tools, *more)
        return Conversation((*context, *answers), tools=tools, first_trained=len(context))
    raise BadRow(
        f"prompt is {shown(prompt)} and completion {shown(completion)}; both must be texts or both lists of messages"
    )


def _read_alpaca(reader: Reader, columns: Columns) -> Conversation:
    """Read a row whose user turn is instruction and input, joined by a newline, as in LLaMA-Factory and ms-swift."""
    parts = [text_of(columns[name], name) for name in ("instruction", "input") if columns.get(name) is not None]
    question = "\n".join(part for part in parts if part)
    return _build_conversation(reader, columns, question, columns["output"], "output")


def _read_query_response(reader: Reader, columns: Columns) -> Conversation:
    return _build_conversation(reader, columns, text_of(columns["query"], "query"), columns["response"], "response")


def _build_conversation(reader: Reader, columns: Columns, question: str, answer: Any, name: str) -> Conversation:
    last = (Message("user", question), Message("assistant", text_of(answer, name)))
    tools = tools_of(columns.get("tools"))
    return Conversation((*reader.system(columns), *reader.history(columns), *last), tools=tools)


def _read_plain_text(_: Reader, columns: Columns) -> Conversation:
    text = text_of(columns["text"], "text")
    if not text:
        raise BadRow("the text is empty, so there is nothing to train on")
    return Conversation((Message("assistant", text),), "text")


def _define_format(
    required: str, optional: str, read: Callable[[Reader, Columns], Conversation], *, is_pair: bool = False
) -> Format:
    return Format(frozenset(required.split()), frozenset((*optional.split(), *IMAGE_COLUMNS)), read, is_pair)


FORMATS: Mapping[str, Format] = {
    "messages": _define_format(
        "messages", "tools functions system", lambda reader, row: reader.conversation(row, "messages")
    ),
    "sharegpt": _define_format(
        "conversations", "tools system", lambda reader, row: reader.conversation(row, "conversations")
    ),
    "alpaca": _define_format("instruction output", "input history system tools", _read_alpaca),
    "query_response": _define_format("query response", "history system tools", _read_query_response),
    "prompt_completion": _define_format("prompt completion", "tools", _read_prompt_completion),
    "text": _define_format("text", "", _read_plain_text),
    "preference": _define_format(
        "chosen rejected",
        "prompt messages conversations instruction input query history system tools",
        read_preference,
        is_pair=True,
    ),
    "rejected_response": _define_format(
        "rejected_response", "messages query response history system tools", read_rejected_response, is_pair=True
    ),
    "rejected_messages": _define_format(
        "messages rejected_messages", "system tools", read_rejected_messages, is_pair=True
    ),
}
"""Formats by name. `messages` is OpenAI's format, which ms-swift and TRL share, with its dialects."""


def _parse_image_list(value: Any, name: str) -> Any:
    """Return an image column, one image or a list of them, parsed if the list is stored as JSON text."""
    return parsed(value, name) if isinstance(value, str) and value[:1] + value[-1:] == "[]" else value
