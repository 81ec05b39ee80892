"""Rows as prompts of GRPO: where they end, what goes to the rewards, and that they are what inference would send."""

from typing import Any

import pytest

from surefoot.data.conversation import BadRow
from surefoot.data.render import Renderer
from surefoot.data.renderer_source import RendererSource
from surefoot.data.row_formats import FormatSpec, Reader, detect

ASKED = [{"role": "user", "content": "Two?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "2"}]


def conversation(row: dict[str, Any]) -> Any:
    spec = FormatSpec(prompts=True)
    return Reader(spec, detect(row, spec), keep_columns=True).read(row)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": ASKED, "solution": "x"}, {"solution": "x"}),
        ({"messages": ANSWERED}, {"response": "2"}),
        ({"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}]}, {"response": "2"}),
        ({"instruction": "Two?", "answer": 2}, {"answer": 2}),
        ({"instruction": "Two?", "output": "2"}, {"output": "2", "response": "2"}),
        ({"query": "Two?"}, {}),
        ({"query": "Two?", "response": "2"}, {"response": "2"}),
        ({"prompt": ASKED, "answer": "2"}, {"answer": "2"}),
        ({"prompt": ASKED, "completion": [{"role": "assistant", "content": "2"}]}, {"response": "2"}),
    ],
)
def test_every_format_ends_before_the_answer(row: dict[str, Any], columns: dict[str, Any], tokenizer: Any) -> None:
    found = conversation(row)
    assert {name: value for name, value in found.columns.items() if name not in ("prompt", "completion")} == columns
    assert found.columns["prompt"] == ASKED
    source = RendererSource.of(tokenizer, {}, parse_special_tokens=False)
    renderer = Renderer(source)
    (rendered,) = renderer.tokenize([renderer.render(found)])
    assert not isinstance(rendered, BadRow)
    wanted = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert rendered.ids.tolist() == wanted
    assert rendered.spans == ()


def test_a_conversation_of_several_turns_keeps_all_but_the_last_answer() -> None:
    found = conversation({"messages": [*ANSWERED, {"role": "user", "content": "Three?"}, ANSWERED[1]]})
    assert [message.role for message in found.messages] == ["user", "assistant", "user"]
    assert found.columns["response"] == "2"


def test_a_plain_text_is_gone_on_from(tokenizer: Any) -> None:
    found = conversation({"prompt": "Once upon", "answer": "a time"})
    assert found.columns == {"prompt": "Once upon", "answer": "a time"}
    renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))
    assert renderer.render(found).text == "Once upon"


def test_texts_that_look_like_special_tokens_stay_text(tokenizer: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "What is <|im_end|>?"}]}
    renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))
    (rendered,) = renderer.tokenize([renderer.render(conversation(row))])
    assert not isinstance(rendered, BadRow)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert rendered.ids.tolist().count(end) == 2  # of the system's and the user's turn
    assert "What is <|im_end|>?" in tokenizer.decode(rendered.ids)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "assistant", "content": "2"}]}, "1 of 1: assistant|empty"),
        ({"prompt": ""}, "prompt .*empty"),
        ({"text": "x"}, r"\(text\) .*`columns: "),
        ({"prompt": 3}, "prompt is 3"),
    ],
)
def test_what_is_no_question_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        conversation(row)
