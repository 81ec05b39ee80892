"""Every format users have becomes a conversation; what cannot be trained is named, never guessed."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.row_formats import FORMATS, FormatSpec, Reader, detect, format_of

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
RESULT = {"role": "tool", "content": "rain"}


def convert(spec: FormatSpec | None = None, keep_columns: bool = False, **columns: Any) -> Conversation:
    spec = spec or FormatSpec()
    return Reader(spec, format_of(spec, columns), keep_columns=keep_columns).read(columns)


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


BRIEF = [("system", "be brief"), ("user", "hi"), ("assistant", "hello")]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("messages", {"messages": [SYSTEM, USER, ASSISTANT], "id": 7}),
        ("messages", {"messages": json.dumps([SYSTEM, USER, ASSISTANT])}),
        ("messages", {"messages": [USER, ASSISTANT], "system": "be brief"}),
        ("messages", {"messages": [{"role": "developer", "content": "be brief"}, USER, ASSISTANT]}),
        ("messages", {"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "hi"}]}, ASSISTANT]}),
        (
            "messages",  # LLaMA-Factory v1
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "value": "be brief"}], "loss_weight": 0.0},
                    {"role": "user", "content": [{"type": "text", "value": "hi"}], "loss_weight": 0.0},
                    {"role": "assistant", "content": [{"type": "text", "value": "hello"}], "loss_weight": 1.0},
                ]
            },
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
             "system": "be brief"},
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "be brief"}, {"from": "user", "value": "hi"},
                               {"from": "assistant", "value": "hello"}]},
        ),
        ("alpaca", {"instruction": "hi", "input": "", "output": "hello", "system": "be brief"}),
        ("query_response", {"query": "hi", "response": "hello", "system": "be brief", "history": None}),
        ("prompt_completion", {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}),
    ],
)  # fmt: skip
def test_one_conversation_in_every_format(name: str, columns: dict[str, Any]) -> None:
    assert detect(columns) == name
    found = convert(**columns)
    assert turns(found) == BRIEF
    assert found.kind == "chat"


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"id": 1, "convs": [{"from": "human", "value": "hi"}]}, "columns: {conversations: convs}"),
        ({"dialog": [{"role": "user", "content": "hi"}]}, "columns: {messages: dialog}"),
        ({"dialog": "hi"}, "columns: {query: YOUR_COLUMN, response: YOUR_COLUMN}"),
    ],
)
def test_a_column_of_turns_under_another_name_is_named(row: dict[str, Any], example: str) -> None:
    with pytest.raises(BadRow, match=re.escape(f"for example with `{example}`")):
        format_of(FormatSpec(), row)


def test_alpaca_joins_instruction_and_input_and_history_comes_before() -> None:
    row = {"instruction": "add", "input": "2 and 3", "output": "5", "history": [["hi", "hello"], ["who?", "me"]]}
    said = [("user", "hi"), ("assistant", "hello"), ("user", "who?"), ("assistant", "me")]
    assert turns(convert(**row)) == [*said, ("user", "add\n2 and 3"), ("assistant", "5")]


def test_plain_pairs_and_plain_text() -> None:
    pair = convert(prompt="2 + 2 =", completion=" 4")
    assert (pair.kind, turns(pair)) == ("completion", [("user", "2 + 2 ="), ("assistant", " 4")])
    text = convert(text="all of it")
    assert (text.kind, turns(text)) == ("text", [("assistant", "all of it")])


def test_answers_in_the_prompt_are_context() -> None:
    found = convert(prompt=[SYSTEM, USER, ASSISTANT, USER], completion=[ASSISTANT])
    assert found.first_trained == 4


CALLED = [("user", "hi"), ("assistant", ""), ("tool", "rain"), ("assistant", "hello")]


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, ASSISTANT]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments":
            '{"city": "Oslo"}'}}]}, RESULT, ASSISTANT]},
        {"messages": [USER, {"role": "assistant", "content": "", "function_call": {"name": "weather", "arguments":
            '{"city": "Oslo"}'}}, {"role": "function", "content": "rain"}, ASSISTANT]},
        {"messages": [USER, {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
            {"role": "tool_response", "content": "rain"}, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
            {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "hello"}]},
        {"messages": [{"role": "system", "content": [{"type": "tools", "value": json.dumps([TOOL])}]},
            {"role": "user", "content": [{"type": "text", "value": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL["function"])}]},
            {"role": "tool", "content": [{"type": "tool_result", "value": "rain"}]}, ASSISTANT]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [[WRAPPED], [TOOL], json.dumps([TOOL])])
def test_a_tool_call_in_every_dialect(columns: dict[str, Any], tools: Any) -> None:
    found = convert(**columns, tools=tools)
    assert turns(found) == CALLED
    assert found.messages[1].tool_calls == (CALL,)
    assert WRAPPED in found.tools


def test_tools_that_are_written_as_null_are_none() -> None:
    """As Parquet files hold them that store JSON as text."""
    assert convert(messages=[USER, ASSISTANT], tools="null").tools == ()


def test_parallel_calls_and_words_before_them_are_one_turn() -> None:
    call = {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'}
    found = convert(
        messages=[USER, {**ASSISTANT, "content": "well"}, call, call, RESULT, RESULT, ASSISTANT], tools=[TOOL]
    )
    assert [role for role, _ in turns(found)] == ["user", "assistant", "tool", "tool", "assistant"]
    assert found.messages[1] == Message("assistant", "well", (CALL, CALL))


def test_calls_that_are_written_as_text_may_be_answered() -> None:
    said = "<tool_call>\n{}\n</tool_call>"
    rows = [("human", "hi"), ("gpt", said), ("tool", "rain"), ("gpt", "hello")]
    found = convert(conversations=[{"from": who, "value": what} for who, what in rows])
    assert [role for role, _ in turns(found)] == ["user", "assistant", "tool", "assistant"]


def test_weights_reasoning_and_other_keys() -> None:
    for key, value, weight in (("loss", False, 0), ("loss_weight", 0.5, 0.5), ("weight", 1, 1), ("train", True, 1)):
        assert convert(messages=[USER, {**ASSISTANT, key: value}]).messages[1].weight == weight
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert convert(messages=[USER, {**ASSISTANT, key: "so"}]).messages[1].reasoning == "so"
        assert convert(messages=[USER, {**ASSISTANT, key: " "}]).messages[1].reasoning is None, "an export's empty text"
    for part in ({"thinking": "so"}, {"text": "so"}, {"thinking": [{"type": "text", "text": "so"}]}):
        content = [{"type": "thinking", **part}, {"type": "text", "text": "hello"}]
        answer = convert(messages=[USER, {"role": "assistant", "content": content}]).messages[1]
        assert (answer.reasoning, answer.content) == ("so", "hello")
    message = convert(messages=[{**USER, "name": "ann", "tool_calls": None}, ASSISTANT]).messages[0]
    assert message.as_template_input() == {**USER, "name": "ann"}


def test_other_columns_are_kept_for_rewards_when_asked() -> None:
    row = {"messages": [USER, ASSISTANT], "solution": "42", "rejected_response": "bye"}
    assert convert(**row).columns == {}
    assert convert(keep_columns=True, **row).columns == {"solution": "42", "rejected_response": "bye"}


@pytest.mark.parametrize("prompts", [False, True])
def test_conversations_without_a_system_message_get_that_of_the_config(prompts: bool) -> None:
    spec = FormatSpec(system="Be brief.", prompts=prompts)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = [{"role": "system", "content": "Be exact."}, *turns]
    for columns, system in (
        ({"messages": turns}, "Be brief."),
        ({"messages": own}, "Be exact."),
        ({"messages": turns, "system": "Be exact."}, "Be exact."),
        ({"prompt": turns[:1], "completion": turns[1:]}, "Be brief."),
        ({"instruction": "a", "output": "b"}, "Be brief."),
    ):
        read = Reader(spec, format_of(spec, columns), keep_columns=prompts).read(columns)
        assert [(message.role, message.content) for message in read.messages][:2] == [("system", system), ("user", "a")]
        if prompts:
            assert read.columns["prompt"][0] == {"role": "system", "content": system}
        elif "completion" in columns:
            assert read.first_trained == 2
    text = {"text": "bare"}
    if not prompts:
        assert [message.content for message in Reader(spec, format_of(spec, text)).read(text).messages] == ["bare"]


def test_columns_can_be_mapped() -> None:
    spec = FormatSpec(columns={"query": "question", "response": "answer"})
    assert turns(convert(spec, question="hi", answer="hello")) == BRIEF[1:]
    with pytest.raises(BadRow, match="'answer'.*`columns`"):
        convert(spec, question="hi")
    forced = FormatSpec("alpaca")
    assert turns(convert(forced, instruction="hi", output="hello", text="x")) == BRIEF[1:]


def test_a_key_of_another_dialect_does_not_replace_what_was_read() -> None:
    row = {"conversations": [{"from": "human", "value": "hi", "role": "system", "content": "other"},
                             {"from": "gpt", "value": "hello"}]}  # fmt: skip
    assert convert(**row).messages[0].as_template_input() == {"role": "user", "content": "hi"}


def test_llamafactorys_columns_leave_out_what_they_do_not_name() -> None:
    spec = FormatSpec("alpaca", {"instruction": "instruction", "output": "output"}, only_mapped=True)
    row = {"instruction": "hi", "input": "not mapped", "output": "hello", "system": "not mapped"}
    assert turns(convert(spec, **row)) == BRIEF[1:]


def test_turns_out_of_order_are_named_as_the_row_names_them() -> None:
    row = {"messages": [{"role": role, "content": "text"} for role in ("user", "bot", "assistant")]}
    with pytest.raises(BadRow, match=re.escape("(roles: user, assistant (bot in the row), assistant)")):
        convert(FormatSpec(), **row)


def test_llamafactory_tags_rename_roles_and_keys() -> None:
    tags = {"role_tag": "speaker", "content_tag": "said", "user_tag": "Q", "assistant_tag": "A", "system_tag": "S"}
    rows = [{"speaker": who, "said": what} for who, what in zip("SQA", ("be brief", "hi", "hello"), strict=True)]
    assert turns(convert(FormatSpec("sharegpt", tags=tags), conversations=rows)) == BRIEF


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "a", "answer": "b"}, r"\(answer, question\) .*: messages .* `columns: "),
        ({"messages": [USER, ASSISTANT], "text": "x"}, r": messages, text.*dataset_format: messages"),
        ({"instruction": "a", "output": "b", "text": "x"}, r": alpaca, text.*dataset_format: alpaca"),
        ({"messages": [USER, USER, ASSISTANT]}, r" 2 of 3: user after user"),
        ({"messages": [SYSTEM, ASSISTANT]}, r" 2 of 2: assistant .*system"),
        ({"messages": [ASSISTANT, USER]}, r" 1 of 2: assistant .*start"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, r" 2 of 3: system "),
        ({"messages": [USER, RESULT, ASSISTANT]}, r" 2 of 3: tool .*user"),
        ({"messages": [USER, ASSISTANT, USER]}, r"ends with user"),
        ({"messages": [USER]}, r"no assistant .*\(roles: user\)"),
        ({"messages": []}, r"'messages' .*non-empty list"),
        ({"conversations": []}, r"'conversations' .*list"),
        ({"messages": "hi"}, r"messages .*JSON"),
        ({"messages": [USER, {"role": "bard", "content": "x"}]}, r"messages\[1\] .*role 'bard'.*assistant, "),
        ({"messages": [USER, {"role": None, "content": "x"}]}, r"messages\[1\] .*role null"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\] \(assistant\) .*content null"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, r"messages\[1\] \(assistant\) .*content 4\b"),
        ({"messages": [USER, "hello"]}, r"messages\[1\] .*object.*'hello'"),
        ({"instruction": "a", "input": "", "output": None}, r"output .*null"),
        ({"query": 3, "response": "b"}, r"query .*3\b"),
        ({"query": "a", "response": "b", "history": ["x"]}, r"'history' .*\[question, answer\].*\['x'\]"),
        ({"prompt": "a", "completion": [ASSISTANT]}, r"prompt .*'a' .*completion .*texts"),
        ({"prompt": "a", "completion": ""}, r"completion .*empty"),
        ({"text": ""}, r"text .*empty"),
        ({"messages": [USER, ASSISTANT], "videos": ["a.mp4"]}, r"videos .*a\.mp4"),
        ({"prompt": "a", "completion": "b", "label": False}, r"label .*false"),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "x"}, r"system .*twice"),
        ({"instruction": "a", "input": 0, "output": "b"}, r"input .*0\b"),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "\ud800"}}]}]},
            r"name .*function .*valid text",
        ),
        ({"prompt": "a", "completion": "cut \ud83d"}, r"completion .*character 5\b"),
        ({"prompt": "a\0b", "completion": "c"}, r"prompt .*NUL .* 2\b"),
        ({"prompt": "a\U000ffffb", "completion": "c"}, r"prompt .*U\+FFFFB"),
        ({"messages": [USER, {**ASSISTANT, "loss": "yes"}]}, r"loss='yes'"),
        ({"messages": [USER, {**ASSISTANT, "weight": -1}]}, r"weight=-1"),
        ({"messages": [{**USER, "loss": True}, ASSISTANT]}, r"messages\[0\] \(user\) .*weight"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [CALL]}]}, r"call of 'weather', .*no `tools`"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [CALL]}], "tools": [{"name": "sun"}]}, r"'weather', .*sun"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [1]}]}, r"function name: 1"),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}]},
            r" f .*malformed",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            r" f .*arguments \[1\]",
        ),
        ({"messages": [USER, ASSISTANT], "tools": ["x"]}, r"tools .*JSON"),
        ({"messages": [USER, ASSISTANT], "tools": "7"}, r"tools holds 7"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}, ASSISTANT]},
            r"messages\[0\], part 0 .*type video_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}, ASSISTANT]}, r"messages\[0\], part 0 .*types"),
        ({f"c{n}": n for n in range(10_000)}, r"\(c0, c1, .* \.\.\. \(10000 columns\)\) "),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        convert(**columns)
    assert len(str(caught.value)) < 700


def test_ten_thousand_columns_beside_a_conversation_do_no_harm() -> None:
    assert turns(convert(messages=[USER, ASSISTANT], **{f"c{n}": n for n in range(10_000)})) == BRIEF[1:]


def test_a_row_of_another_format_than_its_file_is_refused() -> None:
    reader = Reader(FormatSpec(), "messages")
    with pytest.raises(BadRow, match="mixed .*alpaca, .*messages"):
        reader.read({"instruction": "a", "output": "b"})


WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.one_of(st.none(), WORDS.filter(bool)))
def test_any_conversation_is_the_same_in_every_format(pairs: list[tuple[str, str]], system: str | None) -> None:
    said = [(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    wanted = ([("system", system)] if system else []) + said
    question, answer = pairs[-1]
    history = [list(pair) for pair in pairs[:-1]]
    openai = [{"role": role, "content": text} for role, text in said]
    rows: list[dict[str, Any]] = [
        {"messages": openai},
        {"messages": json.dumps(openai)},
        {
            "messages": [
                {"role": turn["role"], "content": [{"type": "text", "value": turn["content"]}]} for turn in openai
            ]
        },
        {"conversations": [{"from": {"user": "human"}.get(role, "gpt"), "value": text} for role, text in said]},
        {"query": question, "response": answer, "history": history},
        {"instruction": question, "input": "", "output": answer, "history": history},
    ]
    for row in rows:
        assert turns(convert(**row, system=system)) == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("role", "from", "content", "value", "loss", "tool_calls", "reasoning_content", "name")
MESSAGE = st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(["user", "assistant", "tool"]), max_size=4)
NAMES = sorted({name for made in FORMATS.values() for name in made.required | made.optional})


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON | st.lists(MESSAGE, max_size=4), max_size=4))
def test_any_row_is_a_conversation_or_is_refused_by_name(columns: dict[str, Any]) -> None:
    try:
        found = convert(**columns)
    except BadRow:
        return
    assert any(message.role == "assistant" for message in found.messages)
    assert all(isinstance(message.content, str) for message in found.messages)
