"""What families of templates need beside their text and mask: forms of messages, ends, time, a documented table."""

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from surefoot.data.conversation import BadRow, Conversation, Message
from surefoot.data.oddities import Oddity
from surefoot.data.render import answer_ends, tokenize_prompts
from surefoot.data.renderer_source import RendererSource
from surefoot.data.template import ChatTemplate
from surefoot.data.template_process import TEMPLATE_PROCESS, Rendering
from surefoot.data.template_source import Template, TemplateSource
from surefoot.errors import DataError
from tests.data.families import FAMILIES, MODELS, tokenizer_of

DOCS = Path(__file__).parents[2] / "docs"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
ASKED, ANSWERED = Message("user", "sun?"), Message("assistant", "yes")
CALLED, SHOWN = Message("assistant", "", (CALL,)), Message("tool", "bright")


def template_of(name: str, tokenizer: PreTrainedTokenizerFast | None = None) -> ChatTemplate:
    source = RendererSource.of(tokenizer or tokenizer_of(name), FAMILIES[name].kwargs, parse_special_tokens=False)
    return ChatTemplate(source.template)


def trained(name: str, *messages: Message, has_tool: bool = False) -> list[str]:
    text = template_of(name).render(Conversation(messages, tools=(TOOL,) if has_tool else ()))
    return [text.text[span.begin : span.end] for span in text.spans]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_template_is_read_in_its_form(name: str) -> None:
    assert Template(template_of(name).source).form == FAMILIES[name].form


def test_the_analysis_of_gpt_oss_is_a_part_of_its_turn() -> None:
    thought = replace(ANSWERED, reasoning="look up")
    assert trained("gpt-oss", ASKED, thought, ASKED, thought) == [
        "<|channel|>final<|message|>yes<|end|>",
        "<|channel|>analysis<|message|>look up<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
    ]
    called = replace(CALLED, reasoning="look up")
    assert trained("gpt-oss", ASKED, called, has_tool=True) == [
        "<|channel|>analysis<|message|>look up<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
        '<|message|>{"city": "Oslo"}<|call|>'
    ]


def test_a_thought_is_trained_from_its_beginning_where_the_prompt_holds_an_empty_one() -> None:
    """As Gemma 4's does unless thoughts are switched on; then the model begins the thought itself."""
    called = replace(CALLED, reasoning="look up")
    first, second = trained("gemma4", ASKED, called, SHOWN, ANSWERED, has_tool=True)
    assert first.startswith("<|channel>thought\nlook up\n<channel|><|tool_call>call:weather")
    assert second == "yes<turn|>"


def test_a_model_does_not_stop_where_only_its_analysis_ends() -> None:
    ids = tokenizer_of("gpt-oss").convert_tokens_to_ids
    assert answer_ends(tokenizer_of("gpt-oss")) == {ids("<|return|>"), ids("<|call|>")}


@pytest.mark.parametrize(("named", "stops"), [((), {"<|im_end|>", "<|call_end|>"}), (("<|im_end|>",), {"<|im_end|>"})])
def test_a_model_stops_at_the_end_of_a_call_unless_its_settings_name_other_ends(
    named: tuple[str, ...], stops: set[str]
) -> None:
    source = TemplateSource(
        "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}<|call_end|>{% endfor %}"
        "{% if not m.tool_calls %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        None, {}, ("<|im_start|>", "<|im_end|>", "<|call_end|>"), "<|im_end|>", "", generation_ends=named,
    )  # fmt: skip
    assert set(ChatTemplate(replace(source, tool_template=source.template)).ends) == stops


def test_calls_of_a_template_that_ends_only_some_of_its_turns_are_trained_to_an_end_or_refused() -> None:
    """As released with DeepSeek-R1-Distill: the end is written behind each call of a turn except for the first."""
    source = TemplateSource(
        "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}<|call_end|>{{ '' if loop.first else '<|end|>' }}"
        "{% endfor %}{{ '<|end|>' if m.role == 'assistant' and not m.tool_calls }}{% endfor %}"
        "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}",
        None, {}, ("<|role|>", "<|end|>", "<|call_end|>"), "<|end|>", "", generation_ends=("<|end|>",),
    )  # fmt: skip
    template = ChatTemplate(replace(source, tool_template=source.template))
    (call,) = CALLED.tool_calls

    def spans(num_calls: int) -> list[str]:
        turn = replace(CALLED, tool_calls=(call,) * num_calls)
        text = template.render(Conversation((Message("system", "weather"), ASKED, turn), tools=(TOOL,)))
        return [text.text[span.begin : span.end] for span in text.spans]

    assert [span.count("<|call_end|>") for span in spans(2)] == [2]
    assert spans(2)[0].endswith("<|call_end|><|end|>")
    with pytest.raises(BadRow, match=r"no end-of-turn token \(<\|end\|>\)"):
        spans(1)
    with pytest.raises(BadRow, match=r"ends the turn \(<\|end\|>\) between the calls"):
        spans(3)


def test_a_header_behind_a_result_that_the_prompt_lacks_is_not_trained() -> None:
    """As in one version of Gemma 4's template."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    )
    text = template_of("qwen2.5", tokenizer).render(Conversation((ASKED, CALLED, SHOWN, ANSWERED), tools=(TOOL,)))
    assert text.text[text.spans[1].begin : text.spans[1].end] == "yes<|im_end|>"


def test_a_role_that_ends_in_a_space_is_no_part_of_the_turn() -> None:
    """As in LLaVA-OneVision's template, whose generation prompt has none."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} \n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = template_of("qwen2.5", tokenizer).render(Conversation((ASKED, ANSWERED, ASKED, ANSWERED)))
    assert [text.text[span.begin : span.end] for span in text.spans] == ["yes<|im_end|>"] * 2


def test_a_turn_without_a_thought_is_trained_where_the_prompt_behind_a_result_begins_one() -> None:
    """As in Gemma 4's template of 2026 with thoughts switched on: behind a result it writes no header."""
    tokenizer = copy.deepcopy(tokenizer_of("gemma4"))
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template += (
        "{%- if add_generation_prompt and state.last == 'result' and enable_thinking %}<|channel>thought\n{%- endif %}"
    )
    source = RendererSource.of(tokenizer, {"enable_thinking": True}, parse_special_tokens=False)
    called = replace(CALLED, reasoning="look up")
    text = ChatTemplate(source.template).render(Conversation((ASKED, called, SHOWN, ANSWERED), tools=(TOOL,)))
    assert text.text[text.spans[1].begin : text.spans[1].end] == "yes<turn|>"


def test_a_header_that_follows_a_prompt_without_a_thought_is_not_trained() -> None:
    """As in DiffusionGemma's template with thoughts switched on: behind a result, only the text has a header."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{% if messages[-1].role != 'tool' %}<|im_start|>assistant\n"
        "{% elif enable_thinking %}<|endoftext|>think{% endif %}{% endif %}"
    )
    source = RendererSource.of(tokenizer, {"enable_thinking": True}, parse_special_tokens=False)
    text = ChatTemplate(source.template).render(Conversation((ASKED, CALLED, SHOWN, ANSWERED), tools=(TOOL,)))
    assert text.text[text.spans[1].begin : text.spans[1].end] == "yes<|im_end|>"


def test_an_end_that_is_not_written_is_found_where_the_last_turn_begins_in_another_way() -> None:
    """As in GLM-5.1's template, which writes an empty thought before the last answer alone."""
    tokenizer = copy.deepcopy(tokenizer_of("glm4"))
    tokenizer.chat_template = (
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}{{ '<think></think>' if loop.last else '</think>' }}{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    source = RendererSource.of(tokenizer, {}, parse_special_tokens=False)
    text = ChatTemplate(source.template).render(Conversation((ASKED, ANSWERED)))
    (span,) = text.spans
    assert text.text[span.begin : span.end] == "</think>yes<|user|>"


def test_words_that_stand_behind_a_result_are_named_where_no_header_follows() -> None:
    """As in another version of Gemma 4's template."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]"
        "{{ messages[loop.index0 - 1].content }}{% if loop.last %}<|im_end|>\n{% endif %}"
        "{% elif m.tool_calls %}<|im_start|>{{ m.role }}\n{{ m.tool_calls[0].function | tojson }}"
        "{% elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ m.content }}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    )
    looking = replace(CALLED, content="let me look")
    with pytest.raises(BadRow, match="message 2 behind the message that follows"):
        template_of("qwen2.5", tokenizer).render(Conversation((ASKED, looking, SHOWN, ANSWERED), tools=(TOOL,)))


def test_an_empty_answer_ends_at_its_own_end() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}: {{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"
    )
    eos = "<|endoftext|>"
    source = TemplateSource(template, template, {"eos_token": eos}, ("<|im_start|>", "<|im_end|>", eos), eos, "")
    text = ChatTemplate(source).render(Conversation((ASKED, Message("assistant", ""))))
    assert [text.text[span.begin : span.end] for span in text.spans] == ["<|im_end|>"]


def test_results_of_gemma_4_are_not_trained() -> None:
    call = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>'
    assert trained("gemma4", ASKED, CALLED, SHOWN, ANSWERED, has_tool=True) == [call, "yes<turn|>"]
    assert trained("gemma4", ASKED, CALLED, has_tool=True) == [call]
    with pytest.raises(BadRow, match="message 2 behind the message that follows"):
        trained("gemma4", ASKED, replace(CALLED, content="let me look"), SHOWN, ANSWERED, has_tool=True)


def test_glm_is_trained_on_the_end_that_its_settings_name() -> None:
    answers = trained("glm4", ASKED, CALLED, SHOWN, ANSWERED, ASKED, ANSWERED, has_tool=True)
    assert answers[0].endswith("</tool_call><|observation|>")
    assert answers[1:] == ["\n<think></think>\nyes<|user|>"] * 2
    assert trained("glm4", ASKED, CALLED, has_tool=True) == answers[:1]
    unnamed = copy.deepcopy(tokenizer_of("glm4"))
    unnamed.name_or_path = ""
    with pytest.raises(BadRow, match="no end-of-turn token"):
        template_of("glm4", unnamed).render(Conversation((ASKED, ANSWERED)))


def test_a_damaged_generation_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("glm4"))
    tokenizer.name_or_path = str(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text("{")
    with pytest.raises(DataError, match=re.escape(str(path))):
        template_of("glm4", tokenizer)
    path.write_text('{"eos_token_id": [1, -5, "x", null]}')
    assert template_of("glm4", tokenizer).source.generation_ends == (tokenizer.convert_ids_to_tokens(1),)


def test_the_generation_prompt_may_depend_on_the_system_message() -> None:
    messages = (ASKED, ANSWERED) * 3
    assert trained("smollm3", Message("system", "/no_think Be brief."), *messages) == ["yes<|im_end|>"] * 3


def test_tools_may_be_described_in_the_system_message() -> None:
    call = (ASKED, CALLED, SHOWN, ANSWERED)
    assert len(trained("deepseek-v3.1", Message("system", "You may call weather."), *call, has_tool=True)) == 2
    with pytest.raises(BadRow, match="'weather'"):
        trained("deepseek-v3.1", Message("system", "Be brief."), *call, has_tool=True)
    in_words = Message("assistant", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    answers = trained(
        "smollm3", Message("system", "You may call weather."), ASKED, in_words, SHOWN, ANSWERED, has_tool=True
    )
    assert answers == [in_words.content + "<|im_end|>", "yes<|im_end|>"]


def test_chat_renders_contents_as_parts_where_the_template_needs_them() -> None:
    tokenizer = tokenizer_of("idefics3")
    (prompt,) = tokenize_prompts(tokenizer, [[{"role": "user", "content": "sun?"}]])
    assert tokenizer.decode(prompt) == "<|begin_of_text|>User: sun?<end_of_utterance>\nAssistant:"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of messages of each rendering."""
    counts: list[int] = []
    render = TEMPLATE_PROCESS.render

    def count(call: Rendering) -> str:
        counts.append(len(call.messages))
        return render(call)

    monkeypatch.setattr(TEMPLATE_PROCESS, "render", count)
    return counts


@pytest.mark.parametrize("name", ["qwen3.5", "gpt-oss", "gemma4", "hermes"])
@pytest.mark.parametrize(
    "turns", [(ASKED, replace(ANSWERED, reasoning="look up")), (CALLED, SHOWN)], ids=["talk", "calls"]
)
def test_time_is_linear_in_the_number_of_turns(name: str, turns: tuple[Message, ...], counted: list[int]) -> None:
    template, work = template_of(name), []
    start, end = ((ASKED,), (ANSWERED,)) if turns[0] is CALLED else ((), ())
    for repeats in (5, 10, 20, 40):  # the first may find out about the template
        counted.clear()
        template.render(Conversation((*start, *turns * repeats, *end), tools=(TOOL,)))
        work.append(sum(counted))
    assert work[3] - work[2] <= 2.1 * (work[2] - work[1])


def describe(name: str) -> str:
    """The row of a family in the documented table, from what is rendered."""
    family, system = FAMILIES[name], Message("system", "You may call weather.")
    thought = {"reasoning": "look up"}

    def last_tokens(*messages: Message, has_tool: bool = False) -> list[str]:
        answers = trained(name, system, ASKED, *messages, has_tool=has_tool)
        return [token for answer in answers for token in family.specials if answer.endswith(token)]

    def is_accepted(*messages: Message) -> bool:
        with suppress(BadRow):
            return bool(last_tokens(*messages, has_tool=True))
        return False

    tokens = last_tokens(ANSWERED, ASKED, ANSWERED)
    shows_calls = is_accepted(CALLED, SHOWN, ANSWERED)
    tokens += last_tokens(CALLED, SHOWN, ANSWERED, has_tool=True) if shows_calls else []
    is_several = is_accepted(replace(CALLED, tool_calls=(CALL, CALL)), SHOWN, SHOWN, ANSWERED)
    thinks = trained(name, ASKED, replace(ANSWERED, **thought))
    thinks += trained(name, system, ASKED, replace(CALLED, **thought), has_tool=True) if shows_calls else []
    cells = (
        MODELS[name],
        ", ".join(f"<code>{escape(token).replace('|', '&#124;')}</code>" for token in dict.fromkeys(tokens)),
        ("in the system message" if family.tools_in_system else "yes") if shows_calls else "no",
        ("several" if is_several else "one") if shows_calls else "none",
        "yes" if any("look up" in answer for answer in thinks) else "no",
    )
    return "| " + " | ".join(cells) + " |"


CHINESE = {
    "yes": "是",
    "no": "否",
    "in the system message": "写在系统消息里",
    "several": "多个",
    "one": "一个",
    "none": "无",
}


@pytest.mark.parametrize("page", ["templates.md", "zh-CN/templates.md"])
def test_the_documented_table_is_true(page: str) -> None:
    rows = [describe(name) for name in MODELS]
    if page.startswith("zh"):
        rows = [" | ".join(CHINESE.get(cell, cell) for cell in row.strip("| ").split(" | ")) for row in rows]
        rows = [f"| {row} |".replace(" to ", " 至 ") for row in rows]
    text = (DOCS / page).read_text("utf-8")
    assert [row for row in rows if row not in text] == []


def test_a_thought_in_the_content_is_noticed_where_thoughts_have_a_channel() -> None:
    inside = Message("assistant", "<think>why</think>so")
    about = Message("assistant", "It begins with the tag <think>.")
    for answer, is_odd in ((inside, True), (about, False), (Message("assistant", "so", reasoning="why"), False)):
        text = template_of("gpt-oss").render(Conversation((ASKED, answer)))
        assert bool(text.oddities & Oddity.LOST_REASONING) == is_odd
