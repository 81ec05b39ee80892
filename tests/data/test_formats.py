"""Columns become conversations, or an error that says which message is wrong."""

from typing import Any

import pytest

from surefoot.data.formats import Message, to_conversation
from surefoot.data.sources import Row
from surefoot.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}


def convert(**columns: Any) -> Any:
    return to_conversation(Row(columns, "data.jsonl:203"))


def test_messages() -> None:
    found = convert(messages=[SYSTEM, USER, ASSISTANT, USER, ASSISTANT], source="kept elsewhere")
    assert [message.role for message in found.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert found.messages[2] == Message("assistant", "hello")
    assert not found.is_plain


def test_prompt_and_completion_plain_and_conversational() -> None:
    plain = convert(prompt="2 + 2 =", completion=" 4")
    assert plain.is_plain
    assert [message.content for message in plain.messages] == ["2 + 2 =", " 4"]
    pair = convert(prompt=[SYSTEM, USER, ASSISTANT, USER], completion=[ASSISTANT])
    assert pair.messages == convert(messages=[SYSTEM, USER, ASSISTANT, USER, ASSISTANT]).messages
    assert pair.first_trained == 4, "assistant turns of the prompt are context"


def test_null_and_empty_extras_are_no_content() -> None:
    assert convert(messages=[USER, {**ASSISTANT, "tool_calls": None, "name": ""}]).messages[1].content == "hello"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"messages": [USER, USER, ASSISTANT]}, r"data.jsonl:203: roles out of order at message 2 of 3"),
        ({"messages": [SYSTEM, ASSISTANT, USER, ASSISTANT]}, r"roles out of order at message 2 of 4"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, r"roles out of order at message 2 of 3"),
        ({"messages": [USER, ASSISTANT, USER]}, r"roles out of order at message 3 of 3"),
        ({"messages": [USER]}, r"no assistant turn, so there is nothing to train on \(roles: user\)"),
        ({"messages": []}, r"'messages' must be a non-empty list"),
        ({"messages": "hi"}, r"'messages' must be a non-empty list .* found 'hi'"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, r"messages\[1\] has role 'bot'. Known roles"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\] \(assistant\) has content None"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, r"has content 4; it must be a text"),
        ({"messages": [USER, "hello"]}, r"messages\[1\] must be an object"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [1]}]}, r"has tool_calls, which this version does not train"),
        ({"prompt": "a", "completion": [ASSISTANT]}, r"prompt is a str and completion a list"),
        ({"prompt": "a", "completion": ""}, r"the completion is empty"),
        ({"messages": [USER, ASSISTANT], "prompt": "a"}, r"ambiguous"),
        ({"prompt": "a", "completion": "cut \ud83d"}, r"completion is no valid text at character 5"),
        ({"question": "a", "answer": "b"}, r"columns \['answer', 'question'\] fit no known format"),
    ],
)
def test_what_cannot_be_trained_is_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(**columns)
