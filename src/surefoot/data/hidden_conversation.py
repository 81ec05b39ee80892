"""Stand-in characters for texts of the data that look like special tokens, while a template renders them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.data.conversation import BadRow, Conversation

STAND_INS = (0xF0000, 0x100000)
"""First stand-in characters, in the private planes of Unicode; the second plane if a text uses the first."""


class HiddenConversation:
    """A conversation with stand-ins for texts that look like special tokens. `base` is 0 if there are none."""

    def __init__(self, conversation: Conversation, control: re.Pattern[str]) -> None:
        self.base = 0
        self.conversation = conversation
        values = [
            [message.content, message.reasoning, message.tool_calls, message.others]
            for message in conversation.messages
        ]
        texts = "\n".join(_iterate_texts([values, conversation.tools]))
        lookalikes = sorted(set(control.findall(texts)))
        if not lookalikes:
            return
        self.base = next(
            (base for base in STAND_INS if not any(chr(base + i) in texts for i in range(len(lookalikes)))), 0
        )
        if not self.base:
            raise BadRow("the texts use characters of both private planes of Unicode, besides special tokens")
        self._stand_ins = {text: chr(self.base + index) for index, text in enumerate(lookalikes)}
        self._originals = {ord(stand_in): text for text, stand_in in self._stand_ins.items()}
        self._control = control
        messages = tuple(
            replace(
                message,
                content=self._hide(message.content),
                tool_calls=self._hide(message.tool_calls),
                reasoning=self._hide(message.reasoning),
                others=self._hide(message.others),
            )
            for message in conversation.messages
        )
        self.conversation = replace(conversation, messages=messages, tools=self._hide(conversation.tools))

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(lambda match: self._stand_ins[match.group()], value)
        if isinstance(value, dict):
            return {self._hide(key): self._hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._hide(item) for item in value)
        return value

    def restore(self, text: str) -> str:
        return text.translate(self._originals)

    def restore_positions(self, text: str, positions: Sequence[int]) -> list[int]:
        """Return increasing positions of a text with stand-ins as positions of the restored text."""
        restored, at = [0], 0
        for position in positions:
            restored.append(restored[-1] + len(self.restore(text[at:position])))
            at = position
        return restored[1:]


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield every text inside JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _iterate_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_texts(item)
