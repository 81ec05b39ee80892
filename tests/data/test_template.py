"""Over real families' templates: the text is transformers' own, the mask is the assistant's words and end of turn."""

import copy
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from surefoot.data.conversation import IMAGE, BadRow, Conversation, Message
from surefoot.data.oddities import Oddity, opens_thought
from surefoot.data.render import Rendered, Renderer, find_shared_system
from surefoot.data.renderer_source import RendererSource
from surefoot.data.template import Text
from surefoot.data.turn_spans import MARK
from surefoot.errors import DataError
from tests.data.families import EMPTY_THOUGHT, FAMILIES, tokenizer_of

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "北京", "n": 2}}}
OTHER_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo <b>", "n": None}}}


def talk(*texts: str, system: str | None = None) -> tuple[Message, ...]:
    first = [Message("system", system)] if system is not None else []
    return (*first, *(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)))


SHAPES = {
    "one turn": talk("hi", "hello"),
    "system": talk("hi", "hello", system="be brief"),
    "six turns": talk(*"a b c d e f g h i j k l".split()),
    "empty answer": talk("hi", ""),
    "empty answer in the middle": talk("hi", "", "again", "yes"),
    "spaces and newlines": talk(" a ", "\n b \n\n", "c", "  d  "),
    "unicode": talk("你好，世界 🌍", "é́ עברית 中文 \u2028 x"),
    "the same words twice": talk("yes", "yes", "yes", "yes"),
    "header in the words": talk("assistant\nassistant\n", "assistant\n"),
    "reasoning": (
        Message("user", "why"),
        Message("assistant", "because", reasoning="so because"),
        Message("user", "and"),
        Message("assistant", "end", reasoning="the end comes"),
    ),
    "thoughts in the words": talk("why", "<think>\nso\n</think>\n\nbecause", "and", "<think>\nhm\n</think>\n\nend"),
}
TOOL_SHAPES = {
    "call": (Message("user", "sun?"), Message("assistant", "", (CALL,))),
    "call, result, answer": (
        *talk("sun?", system="be brief"),
        Message("assistant", "", (CALL,)),
        Message("tool", '{"sun": true}'),
        Message("assistant", "yes"),
    ),
    "parallel calls": (
        Message("user", "both?"),
        Message("assistant", "", (CALL, OTHER_CALL)),
        Message("tool", "sunny"),
        Message("tool", "rainy"),
        Message("assistant", "both"),
    ),
    "two exchanges": (
        Message("user", "sun?"),
        Message("assistant", "", (CALL,), reasoning="must look"),
        Message("tool", "sunny"),
        Message("assistant", "yes", reasoning="seen"),
        Message("user", "rain?"),
        Message("assistant", "", (OTHER_CALL,)),
        Message("tool", "rainy"),
        Message("assistant", "also", reasoning="odd"),
    ),
}
PARALLEL_SHAPES = {
    "words and parallel calls": (
        Message("user", "both?"),
        Message("assistant", "let me see", (CALL, OTHER_CALL)),
        Message("tool", "sunny"),
        Message("tool", "rainy"),
        Message("assistant", "both"),
    ),
}


def test_words_that_a_template_drops_are_not_lost_in_silence() -> None:
    conversation = Conversation(PARALLEL_SHAPES["words and parallel calls"], tools=(TOOL,))
    with pytest.raises(BadRow, match=r"message 2 \('let me see'\)"):
        renderer_of("mistral").render(conversation)


def renderer_of(name: str, **options: Any) -> Renderer:
    options = {"parse_special_tokens": False, **options}
    return Renderer(RendererSource.of(tokenizer_of(name), FAMILIES[name].kwargs, **options))


def tokenized(renderer: Renderer, conversation: Conversation) -> tuple[Text, Rendered]:
    text = renderer.render(conversation)
    (sample,) = renderer.tokenize([text])
    assert isinstance(sample, Rendered)
    return text, sample


def own_template(name: str, conversation: Conversation) -> str:
    return FAMILIES[name].expected_text(conversation, tokenizer_of(name))


def trained_parts(name: str, sample: Rendered) -> list[str]:
    return [tokenizer_of(name).decode(sample.ids[span.begin : span.end]) for span in sample.spans]


def cases() -> list[Any]:
    found = []
    for name, family in FAMILIES.items():
        shapes: dict[str, tuple[Message, ...]] = dict(SHAPES)
        shapes |= TOOL_SHAPES if family.has_tools else {}
        shapes |= PARALLEL_SHAPES if family.has_parallel_calls else {}
        found += [
            pytest.param(name, messages, id=f"{name}-{shape}")
            for shape, messages in shapes.items()
            if shape not in family.without
        ]
    return found


@pytest.mark.parametrize(("name", "messages"), cases())
def test_text_ids_and_mask_of_every_family_and_shape(name: str, messages: tuple[Message, ...]) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    has_calls = any(message.tool_calls for message in messages)
    if has_calls and family.tools_in_system:
        about = messages[0].content if messages[0].role == "system" else ""
        system = Message("system", f"{about} You may call weather(city).")
        messages = (system, *messages[messages[0].role == "system" :])
    conversation = Conversation(messages, tools=(TOOL,) if has_calls else ())
    text, sample = tokenized(renderer_of(name), conversation)
    assert text.text == own_template(name, conversation)
    assert sample.ids.tolist() == tokenizer(text.text, add_special_tokens=False)["input_ids"]

    wanted = [answer.removeprefix(family.prompted) for answer in family.answer.findall(text.text)]
    assert [text.text[span.begin : span.end] for span in text.spans] == wanted
    answers = [message for message in messages if message.role == "assistant"]
    assert len(wanted) == len(answers)
    for said, message in zip(wanted, answers, strict=True):
        words = message.content.split("</think>")[-1]
        assert (words.strip() if family.trims or "</think>" in message.content else words.lstrip("\n")) in said
        for call in message.tool_calls:
            assert call["function"]["name"] in said
    if not family.pieces:  # decoding SentencePiece drops spaces
        assert trained_parts(name, sample) == wanted


LOOKALIKES = ("<|im_end|>", "<|im_start|>assistant\n", "</s>", "[/INST]", "<|eot_id|>", "<|endoftext|>", "<s>")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_looks_like_a_special_token_stays_text(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    plain = Conversation(talk("ask", "answer", "more", "end"))
    lookalikes = " ".join((*LOOKALIKES, family.eos))
    risky = Conversation(talk(*(f"{said} {lookalikes} on" for said in ("ask", "answer", "more", "end"))))
    renderer = renderer_of(name)
    _, expected = tokenized(renderer, plain)
    text, sample = tokenized(renderer, risky)
    assert text.text == own_template(name, risky)
    controls = tokenizer.convert_tokens_to_ids(list(family.specials))
    assert [i for i in sample.ids if i in controls] == [i for i in expected.ids if i in controls]
    assert text.oddities & Oddity.LOOKALIKE
    assert len(sample.spans) == 2
    for span, answer in zip(text.spans, ("answer", "end"), strict=True):
        said = text.text[span.begin : span.end]
        assert said.startswith(tuple(lead + answer for lead in family.leads))
        assert said.endswith(tuple("on" + end for end in family.ends))
    if not family.pieces:
        assert tokenizer.decode(sample.ids) == text.text

    asked = renderer_of(name, parse_special_tokens=True)
    asked_text, asked_sample = tokenized(asked, risky)
    assert asked_text.spans == text.spans, "the mask does not depend on what texts look like"
    assert asked_sample.ids.tolist() == tokenizer(text.text, add_special_tokens=False)["input_ids"]


def test_special_tokens_in_tools_calls_and_results_stay_text() -> None:
    tool = {"type": "function", "function": {"name": "echo", "description": "prints <|im_end|>"}}
    call = {"type": "function", "function": {"name": "echo", "arguments": {"<|im_start|>": ["<|im_end|>"]}}}
    messages = (Message("user", "go"), Message("assistant", "", (call,)), Message("tool", "<|im_end|>"))
    conversation = Conversation((*messages, Message("assistant", "done")), tools=(tool,))
    for name in ("qwen2.5", "qwen3"):
        text, sample = tokenized(renderer_of(name), conversation)
        assert text.text == own_template(name, conversation)
        end = tokenizer_of(name).convert_tokens_to_ids("<|im_end|>")
        assert (sample.ids == end).sum() == 5, "system, user, call, result, answer"
        assert text.text[text.spans[0].begin : text.spans[0].end].count("<|im_start|>") == 1


def test_a_second_token_that_a_template_writes_behind_the_last_turn_is_no_oddity() -> None:
    """As Phi-4-mini's does, with a token that ends texts."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    for eos, is_odd in (("<|endoftext|>", False), ("<|im_end|>", True)):
        tokenizer.eos_token = eos
        renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False, today=date(2026, 1, 1)))
        text = renderer.render(Conversation(talk("q", "a")))
        assert bool(text.oddities & Oddity.ENDS_TWICE) == is_odd


def test_two_end_of_turn_tokens_and_leaked_or_empty_answers_are_noticed() -> None:
    renderer = renderer_of("qwen2.5")
    answer = "the long answer to everything"
    assert renderer.render(Conversation(talk("q", "a<|im_end|>"))).oddities & Oddity.ENDS_TWICE
    assert renderer.render(Conversation(talk(f"q {answer}", answer))).oddities & Oddity.ANSWER_IN_PROMPT
    healthy = renderer.render(Conversation(talk("q", answer)))
    assert not healthy.oddities
    thought = Conversation((Message("user", "q"), Message("assistant", "a", reasoning="because")))
    assert renderer.render(thought).oddities & Oddity.LOST_REASONING
    assert renderer.render(Conversation(talk("q", " "))).oddities & Oddity.EMPTY_ANSWER
    assert not any(
        renderer.render(one).oddities & Oddity.EMPTY_ANSWER for one in (thought, Conversation(talk("q", "0")))
    )
    assert not renderer_of("qwen3").render(thought).oddities & Oddity.LOST_REASONING


def test_answers_without_the_thought_that_a_template_begins_are_noticed() -> None:
    thought = Message("assistant", "a", reasoning="because")
    answers = [
        (Message("assistant", "a"), True), (thought, False), (Message("assistant", "because</think>a"), False),
        (Message("assistant", "a", weight=0.0), False), (Message("assistant", ""), False),
    ]  # fmt: skip
    for name, begins in (("qwen3.5", True), ("r1-distill", True), ("qwen3", False), ("qwen2.5", False)):
        for answer, has_none in answers:
            text = renderer_of(name).render(Conversation((Message("user", "q"), answer)))
            assert bool(text.oddities & Oddity.NO_THOUGHT) == (begins and has_none), (name, answer)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True), ("<|CHATBOT_TOKEN|><|START_THINKING|>", True),
        ("<|START_THINKING|><|END_THINKING|>", False), ("<think>\n\n</think>\n\n", False), ("assistant\n", False),
        ("Write <think> first.<|assistant|>", False), ("[/INST][THINK]", True), ("< I think that a >", False),
    ],
)  # fmt: skip
def test_the_beginning_of_a_thought_is_the_end_of_a_prompt(prompt: str, opens: bool) -> None:
    assert opens_thought(prompt) == opens


@pytest.mark.parametrize("name", FAMILIES)
def test_the_system_message_that_rendered_conversations_share_is_found(name: str) -> None:
    """Also where a template writes the date or one of its own; Mistral's is part of the user's message."""
    today, tokenizer, kwargs = date(2024, 7, 26), tokenizer_of(name), FAMILIES[name].kwargs
    renderer = renderer_of(name, today=today)

    def render(*systems: str | None) -> list[str]:
        starts = ((Message("system", system),) if system else () for system in systems)
        questions = ("Classify.\n\nGood", "Classify.\n\nBad")
        return [
            renderer.render(Conversation((*start, *talk(question, "answer")))).text
            for start, question in zip(starts, questions, strict=False)
        ]

    can_tell = name not in ("mixtral", "mistral")
    assert find_shared_system(render("Be exact.", "Be exact."), tokenizer, kwargs, today) == (
        "Be exact." if can_tell else None
    )
    for systems in ((None, None), ("Be exact.", "Be brief."), ("Be exact.", None), ("Be exact.",), ()):
        assert find_shared_system(render(*systems), tokenizer, kwargs, today) is None


def test_thoughts_of_earlier_turns_that_a_template_drops_are_noticed() -> None:
    def turns(**changes: Any) -> Conversation:
        first = Message("assistant", "one", reasoning="because of this", **changes)
        second = (Message("user", "why"), Message("assistant", "two", reasoning="because of that"))
        return Conversation((Message("user", "q"), first, *second))

    for name, is_dropped, is_lost in (("qwen3", True, False), ("qwen2.5", False, True)):
        text = renderer_of(name).render(turns())
        assert text.oddities == is_dropped * Oddity.DROPPED_REASONING | is_lost * Oddity.LOST_REASONING
    assert not renderer_of("qwen3").render(turns(weight=0.0)).oddities & Oddity.DROPPED_REASONING
    alone = Conversation((Message("user", "q"), Message("assistant", "a", reasoning="because")))
    assert not renderer_of("qwen3").render(alone).oddities & Oddity.DROPPED_REASONING


def test_two_beginning_of_sequence_tokens_are_noticed() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("llama3"))
    conversation = Conversation(talk("a", "b"))
    for template, flags in (
        (tokenizer.chat_template, 0),
        ("{{ bos_token }}" + tokenizer.chat_template, Oddity.BEGINS_TWICE),
    ):
        tokenizer.chat_template = template
        _, sample = tokenized(Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False)), conversation)
        assert sample.flags == flags


def with_template(template: str | None) -> Renderer:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = template
    return Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))


UNSAFE = {
    "no template": (None, r"no chat template.*chat_template: FILE"),
    "syntax error": ("{% for %}", r"Jinja: line 1: Expected an expression"),
    "forgets earlier answers": (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        r"message 3 \('two'\)",
    ),
    "refuses": ("{{ raise_exception('no system turns please') }}", r"chat template .*: no system turns please"),
    "no end of turn": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        r"no end-of-turn token.*or take generation_config\.json of the model's release",
    ),
    "changes a list": (
        "{{ messages.append(1) }}",
        r"transformers forbids templates: .*append.*changes no list or object",
    ),
    "no generation prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        r"'<\|im_start\|>assistant' .*add_generation_prompt",
    ),
    "no generation prompt, header of plain text": (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n"
        "{% endfor %}",
        r"'### assistant:' .*add_generation_prompt",
    ),
    "system within the answers": (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        r"cannot be separated",
    ),
    "system before and within the answers": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        r"cannot be separated",
    ),
    "drops the system": (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        r"message 1 \(system: 'SECRET'\)",
    ),
    "divides by zero": ("{{ 1 // 0 }}", r"chat template .*: ZeroDivisionError"),
    "misses a variable": ("{{ nothing.at_all }}", r"chat template .*: 'nothing' is undefined"),
    "changes the words": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        r"message 3 \('two'\)",
    ),
}


@pytest.mark.parametrize(("template", "message"), UNSAFE.values(), ids=UNSAFE)
def test_a_template_that_cannot_be_masked_safely_is_refused(template: str | None, message: str) -> None:
    with pytest.raises((DataError, BadRow), match=message):
        with_template(template).render(Conversation(talk("one", "two", "three", "four", system="SECRET")))


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    conversation = Conversation(TOOL_SHAPES["call"], tools=(TOOL,))
    with pytest.raises(BadRow, match="tool 'weather'"):
        renderer_of("qwen1.5").render(conversation)


def test_a_call_or_a_tool_that_is_only_mentioned_is_not_shown() -> None:
    words = "let me check the weather"
    called = Conversation((Message("user", "weather?"), Message("assistant", words, (CALL,))))
    with pytest.raises(BadRow, match="call of 'weather' in message 2"):
        renderer_of("qwen1.5").render(called)
    with pytest.raises(BadRow, match="tool 'weather'"):
        renderer_of("qwen1.5").render(Conversation(talk("weather?", "weather!"), tools=(TOOL,)))
    first_only = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(BadRow, match="2 calls of 'weather'"):
        with_template(first_only).render(Conversation(TOOL_SHAPES["parallel calls"], tools=(TOOL,)))


def test_words_around_thoughts_are_not_taken_for_thoughts() -> None:
    with pytest.raises(BadRow, match=r"message 2 \('Wrap thoughts"):
        renderer_of("qwen3").render(Conversation(talk("how?", "Wrap thoughts in <think> and </think> tags.")))


def test_an_answer_that_begins_like_the_rest_of_the_generation_prompt() -> None:
    """DeepSeek-R1's prompt opens a thought that earlier turns do not show."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
        "{% else %}<|im_end|>{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|><think>\n{% endif %}"
    )
    renderer = with_template(template)
    for answer in ("<table>x", "", "<think>", "<|im_e"):
        text = renderer.render(Conversation(talk("q", answer, "more", "yes")))
        first = text.spans[0]
        assert text.text[first.begin : first.end] == answer + "<|endoftext|>"


def test_a_call_that_ends_with_a_token_of_its_own_ends_there() -> None:
    """As in gpt-oss; what the tool answers is not trained."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function | tojson }}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}"
        "{{ tools | tojson if tools else '' }}{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"
    )
    template = "{{ tools | tojson if tools else '' }}" + template.replace("{{ tools | tojson if tools else '' }}", "")
    renderer = with_template(template)
    for shape in ("call, result, answer", "call"):
        text = renderer.render(Conversation(TOOL_SHAPES[shape], tools=(TOOL,)))
        said = [text.text[span.begin : span.end] for span in text.spans]
        assert said[0].endswith("}<|endoftext|>")
        assert said[0].count("<|") == 1
        assert said[1:] == ["yes<|im_end|>"][: len(said) - 1]


def test_special_tokens_that_the_template_reads_can_be_asked_for() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<think>", "</think>"]})
    conversation = Conversation(talk("q", "<think>\nr\n</think>\n\na"))
    for asked in (False, True):
        renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=asked))
        if asked:
            assert renderer.render(conversation).text == own_template("qwen3", conversation)
        else:
            with pytest.raises(BadRow, match="parse_special_tokens: true"):
                renderer.render(conversation)


def test_calls_beside_tools_only_and_calls_in_words() -> None:
    strict = (
        "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert with_template(strict).render(Conversation(TOOL_SHAPES["call, result, answer"], tools=(TOOL,))).spans
    lost = "<think>\nwhy\n</think>\n\nso"
    assert not renderer_of("qwen3").render(Conversation(talk("q", lost))).oddities & Oddity.LOST_REASONING
    dropping = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert with_template(dropping).render(Conversation(talk("q", lost))).oddities & Oddity.LOST_REASONING


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that writes a thought before every answer, as Qwen3.8's."""


@pytest.mark.parametrize(
    ("answer", "is_odd"),
    [
        (Message("assistant", "<think>\nwhy\n</think>\n\nso"), True),
        (Message("assistant", "so", reasoning="why"), False),
        (Message("assistant", "so: <think> begins a thought"), False),
    ],
)
def test_an_empty_thought_before_one_in_the_content_is_noticed(answer: Message, is_odd: bool) -> None:
    text = with_template(THINKING).render(Conversation((Message("user", "q"), answer)))
    assert bool(text.oddities & Oddity.LOST_REASONING) == is_odd


def test_a_template_that_writes_the_ids_of_calls_needs_ids_that_hold_the_names() -> None:
    """As Kimi K2's."""
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }}]{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    name = CALL["function"]["name"]
    renderer = with_template(template)

    def asking(number: str) -> Conversation:
        return Conversation(
            (Message("user", "sun?"), Message("assistant", "", ({**CALL, "id": number},))), tools=(TOOL,)
        )

    assert renderer.render(asking(f"functions.{name}:0")).spans
    with pytest.raises(BadRow, match=rf"ids of calls instead \('call_1'\).*functions\.{name}:0"):
        renderer.render(asking("call_1"))


def test_wide_bars_are_special_too() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.add_tokens(["<｜Assistant｜>"])
    _, sample = tokenized(
        Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False)),
        Conversation(talk("<｜Assistant｜>", "a")),
    )
    assert tokenizer.convert_tokens_to_ids("<｜Assistant｜>") not in sample.ids.tolist()


def test_a_header_that_swallows_white_space_is_not_trained() -> None:
    """Phi-3's special tokens take the white space behind them with them."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer._tokenizer.add_special_tokens([AddedToken("<|im_start|>", rstrip=True, special=True)])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[:1] }}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}a<|im_start|>{% endif %}"
    )
    renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))
    _, sample = tokenized(renderer, Conversation(talk("hi", "  yo")))
    header = tokenizer.convert_tokens_to_ids("<|im_start|>")
    (span,) = sample.spans
    assert header not in sample.ids[span.begin : span.end].tolist()
    risky = renderer.render(Conversation(talk("hi <|im_end|> there", "yo")))
    (found,) = renderer.tokenize([risky])
    assert isinstance(found, BadRow), "cut into pieces it would be tokenised in another way"


def test_control_tokens_that_are_not_called_special_stay_text_too() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.add_tokens(["<|fim_prefix|>"])
    renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))
    text, sample = tokenized(renderer, Conversation(talk("what is <|fim_prefix|>?", "a token")))
    assert text.oddities & Oddity.LOOKALIKE
    assert tokenizer.convert_tokens_to_ids("<|fim_prefix|>") not in sample.ids.tolist()
    assert tokenizer.decode(sample.ids) == text.text


def test_a_template_that_writes_todays_date_writes_the_same_one_tomorrow() -> None:
    template = (
        "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = template
    source = RendererSource.of(tokenizer, {}, parse_special_tokens=False, today=date(2025, 3, 1))
    assert Renderer(source).render(Conversation(talk("a", "b"))).text.startswith("01 Mar 2025<|im_start|>")


def test_an_endless_template_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.data.template_source.RENDER_DEADLINE_S", 0.3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=" 0 s .*endless loop"):
        with_template(endless).render(Conversation(talk("a", "b")))


WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters=[MARK, IMAGE]), max_size=30)
RISKY = st.one_of(WORDS, st.sampled_from(LOOKALIKES), st.tuples(WORDS, st.sampled_from(LOOKALIKES), WORDS).map("".join))


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    texts=st.lists(st.tuples(RISKY, RISKY), min_size=1, max_size=4),
    system=st.one_of(st.none(), RISKY),
)
def test_any_conversation_keeps_every_word_and_its_mask(
    name: str, texts: list[tuple[str, str]], system: str | None
) -> None:
    messages = talk(*(text for pair in texts for text in pair), system=system)
    conversation = Conversation(messages)
    text, sample = tokenized(renderer_of(name), conversation)
    assert text.text == own_template(name, conversation)
    at = 0
    assert (system or "").strip() in text.text
    for message in messages[system is not None :]:  # every word, in order
        words = message.content.strip()
        found = text.text.find(words, at)
        assert found >= 0
        at = found + len(words)
    assert len(text.spans) == len(sample.spans) == len(texts)
    for span, (_, answer) in zip(text.spans, texts, strict=True):
        said = text.text[span.begin : span.end]
        assert answer.strip() in said
        assert said.endswith(FAMILIES[name].ends)
        assert len(said) <= len(answer) + max(map(len, (*FAMILIES[name].leads, EMPTY_THOUGHT))) + 50
    for one, next_one in zip(sample.spans, sample.spans[1:], strict=False):
        assert one.end <= next_one.begin
    if not FAMILIES[name].pieces:
        assert tokenizer_of(name).decode(sample.ids) == text.text
    assert np.all(sample.ids >= 0)


def test_plain_pairs_begin_and_end_as_the_tokenizer_does_and_only_once() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer_of("llama3"))
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.bos_token_id)]
    )
    renderer = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))
    for prompt in ("2 + 2 =", "<|begin_of_text|>2 + 2 ="):
        for completion in (" 4", " 4<|eot_id|>"):
            pair = Conversation((Message("user", prompt), Message("assistant", completion)), "completion")
            text, sample = tokenized(renderer, pair)
            assert sample.ids.tolist() == [*tokenizer("2 + 2 = 4")["input_ids"], tokenizer.eos_token_id]
            assert text.text[text.spans[0].begin : text.spans[0].end] == " 4<|eot_id|>"
    text, sample = tokenized(renderer, Conversation((Message("assistant", "all of it"),), "text"))
    assert text.text[text.spans[0].begin :] == "all of it<|eot_id|>"
    assert sample.ids[0] == tokenizer.bos_token_id


def test_only_answers_after_the_prompt_are_trained() -> None:
    conversation = replace(Conversation(talk("a", "b", "c", "d")), first_trained=3)
    text = renderer_of("qwen2.5").render(conversation)
    assert [text.text[span.begin : span.end] for span in text.spans] == ["d<|im_end|>"]
