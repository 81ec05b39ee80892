"""Rendering is the model's own template byte for byte; exactly the assistant's words and end-of-turn are trained."""

import copy

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from surefoot.data.formats import Conversation, Message
from surefoot.data.render import Renderer
from surefoot.errors import DataError
from tests.conftest import CHATML

QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) "
    "or (message.role == 'assistant') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SMOLLM2 = CHATML.replace(
    "You are a helpful assistant", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
TEMPLATES = {"qwen1.5": CHATML, "qwen2.5": QWEN25, "smollm2": SMOLLM2}
SHAPES = {
    "one turn": ["hi", "hello"],
    "three turns": ["hi", "hello", "and?", "more", "thanks", "bye"],
    "empty answer": ["hi", ""],
    "spaces and newlines": [" a ", "\n b \n\n", "c", "  "],
    "unicode": ["你好，世界 🌍", "é́ עברית 中文"],
}


def conversation(texts: list[str], system: str | None = None) -> Conversation:
    turns = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    first = [Message("system", system)] if system is not None else []
    return Conversation((*first, *turns), "data.jsonl:1")


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_ids_and_mask(tokenizer: PreTrainedTokenizerFast, template: str, shape: str, system: str | None) -> None:
    chat = with_template(tokenizer, TEMPLATES[template])
    talk = conversation(SHAPES[shape], system)
    turns = [{"role": m.role, "content": m.content} for m in talk.messages]
    renderer = Renderer(chat)
    text = renderer.render(talk)
    assert text.text == chat.apply_chat_template(turns, tokenize=False)
    sample = renderer.tokenize([text])[0]
    assert sample.ids.tolist() == chat.apply_chat_template(turns, return_dict=False)

    answers = [m.content for m in talk.messages if m.role == "assistant"]
    assert [text.text[begin:end] for begin, end in text.spans] == [answer + "<|im_end|>" for answer in answers]
    runs = np.split(np.arange(len(sample.ids)), np.flatnonzero(np.diff(sample.trained.astype(int))) + 1)
    trained = [chat.decode(sample.ids[run]) for run in runs if sample.trained[run[0]]]
    assert trained == [answer + "<|im_end|>" for answer in answers]


def test_plain_pairs_end_with_the_end_token_once(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(with_template(tokenizer, None))
    for completion in (" 4", " 4<|im_end|>"):
        pair = Conversation((Message("user", "2 + 2 ="), Message("assistant", completion)), "x:1", is_plain=True)
        sample = renderer.tokenize([renderer.render(pair)])[0]
        assert tokenizer.decode(sample.ids) == "2 + 2 = 4<|im_end|>"
        assert tokenizer.decode(sample.ids[sample.trained]) == " 4<|im_end|>"


def test_plain_pairs_begin_as_the_tokenizer_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    chat = with_template(tokenizer, None)
    chat.bos_token = "<|endoftext|>"
    chat._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", chat.bos_token_id)]
    )
    renderer = Renderer(chat)
    for prompt in ("2 + 2 =", "<|endoftext|>2 + 2 ="):
        pair = Conversation((Message("user", prompt), Message("assistant", " 4")), "x:1", is_plain=True)
        sample = renderer.tokenize([renderer.render(pair)])[0]
        assert sample.ids.tolist() == [*chat("2 + 2 = 4")["input_ids"], chat.eos_token_id]


def test_chat_data_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(with_template(tokenizer, None))
    with pytest.raises(DataError, match=r"data.jsonl:1: .*no chat template. Use an instruct model"):
        renderer.render(conversation(["hi", "hello"]))


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    forgetful = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    renderer = Renderer(with_template(tokenizer, forgetful))
    with pytest.raises(DataError, match="renders earlier turns differently"):
        renderer.render(conversation(["a", "b", "c", "d"]))


def test_a_template_that_refuses_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(with_template(tokenizer, "{{ raise_exception('no system turns please') }}"))
    with pytest.raises(DataError, match="data.jsonl:1: the chat template refused .*no system turns please"):
        renderer.render(conversation(["a", "b"]))
    broken = Renderer(with_template(tokenizer, "{% for %}"))
    with pytest.raises(DataError, match="the chat template refused"):
        broken.render(conversation(["a", "b"]))
