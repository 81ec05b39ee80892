"""A chat template with its variables, and the form in which it reads messages.

Templates differ in what they read: Idefics3 contents as lists of parts, Functionary the arguments of a call as text.
The form is found by rendering short conversations in each.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from surefoot.data.conversation import BadRow, Message, MessageForm
from surefoot.data.template_process import TEMPLATE_PROCESS, Rendering
from surefoot.errors import DataError

RENDER_DEADLINE_S = 3.0
"""CPU time limit of one rendering, which does not depend on the load of the machine."""
PLAIN_TURNS = (Message("user", "Q1"), Message("assistant", "A1"), Message("user", "Q2"), Message("assistant", "A2"))
"""Turns that show how a template begins and ends turns."""
PLAIN_TOOL = {
    "type": "function",
    "function": {
        "name": "f1",
        "description": "D1",
        "parameters": {
            "type": "object",
            "properties": {"p1": {"type": "string", "description": "D2"}},
            "required": ["p1"],
        },
    },
}
_CALL_ID = "call00001"  # nine characters, as Mistral requires
PLAIN_CALL = (
    Message("user", "Q1"),
    Message("assistant", "", ({**PLAIN_TOOL, "id": _CALL_ID, "function": {"name": "f1", "arguments": {"p1": "V1"}}},)),
    Message("tool", "T1", others={"name": "f1", "tool_call_id": _CALL_ID}),
    Message("assistant", "A1"),
)
"""Turns that show how a template writes a call of PLAIN_TOOL and its result."""


@dataclass(frozen=True)
class TemplateSource:
    """All inputs of a rendering except for the conversation, as plain data."""

    template: str | None
    tool_template: str | None
    """Template for rows that declare tools; the same as `template` in most models."""
    special_tokens: Mapping[str, Any]
    """Variables `bos_token`, `eos_token`, ... of the template."""
    controls: tuple[str, ...]
    """Texts of the tokenizer's special tokens."""
    eos: str
    plain_start: str
    """Text that the tokenizer itself puts before a text without a template."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    parse_special_tokens: bool = False
    """Whether texts of the data that look like special tokens become special tokens."""
    generation_ends: tuple[str, ...] = ()
    """Tokens at which the model's generation_config.json ends an answer."""


class Template:
    """A chat template that can be rendered."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self.controls = sorted(filter(None, {*source.controls, *source.generation_ends}), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, self.controls)) or r"(?!)")

    @cached_property
    def thinking(self) -> "Template":
        """The template with thoughts switched on, under the name that most templates have for it."""
        return self._with_thinking(True)

    @cached_property
    def not_thinking(self) -> "Template":
        """The template with thoughts switched off, under the same name."""
        return self._with_thinking(False)

    def _with_thinking(self, value: bool) -> "Template":
        return Template(replace(self.source, kwargs={**self.source.kwargs, "enable_thinking": value}))

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of messages. Raises: BadRow if the template refuses them; DataError if it cannot be used."""
        return self._render(messages, tools, self.form, add_generation_prompt=add_generation_prompt)

    def try_render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], **options: bool) -> str | None:
        """Return the text of messages, or None if the template refuses them. Raises: DataError."""
        with suppress(BadRow):
            return self.render(messages, tools, **options)
        return None

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        form: MessageForm,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        template = self.source.tool_template if tools else self.source.template
        if template is None:
            raise DataError(
                "the data are conversations, but the model's tokenizer has no chat template. Use an instruct model, "
                "give chat_template: FILE, or use prompt/completion texts"
            )
        return TEMPLATE_PROCESS.render(
            Rendering(
                template,
                [message.as_template_input(form) for message in messages],
                tools,
                {**self.source.special_tokens, **self.source.kwargs},
                add_generation_prompt,
                RENDER_DEADLINE_S,
            )
        )

    @cached_property
    def form(self) -> MessageForm:
        """Form in which the template shows what messages hold; the usual one where it shows it in none."""
        form = MessageForm()
        contents = [replace(form, content_is_parts=is_parts) for is_parts in (False, True)]
        form = self._choose_form(contents, [(PLAIN_TURNS[:2], ())], ("Q1", "A1"))
        calls = [
            replace(form, call_content=content, arguments_are_text=is_text)
            for content, is_text in product(("", None), (False, True))
        ]
        return self._choose_form(calls, [(PLAIN_CALL, (PLAIN_TOOL,)), (PLAIN_CALL[:2], (PLAIN_TOOL,))], ("f1", "V1"))

    def _choose_form(
        self,
        forms: Sequence[MessageForm],
        turns: Iterable[tuple[Sequence[Message], Sequence[dict[str, Any]]]],
        words: Sequence[str],
    ) -> MessageForm:
        """Return the first form in which the template shows the words, and no object as Python would print it."""
        for messages, tools in turns:
            for form in forms:
                with suppress(BadRow):
                    text = self._render(messages, tools, form)
                    if all(word in text for word in words) and not _PRINTED_OBJECT.search(text):
                        return form
        return forms[0]


_PRINTED_OBJECT = re.compile(re.escape(repr({"p1": "V1"})) + "|" + re.escape(json.dumps(json.dumps({"p1": "V1"}))))
"""The arguments of PLAIN_CALL as Python prints an object, or as JSON text within JSON."""
