"""Conversations of `surefoot chat`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
import surefoot.inference.chat
from surefoot.data.render import tokenize_prompts
from surefoot.errors import ModelError
from surefoot.inference.chat import Chat
from surefoot.models.generate import complete
from tests.models.architectures import tiny_model


@pytest.fixture
def chat(model_folder: Callable[[str], Path]) -> Chat:
    model, tokenizer = surefoot.load(str(model_folder("llama")))
    return Chat(model, tokenizer, "Be brief.", max_new_tokens=6, temperature=0.0)


def test_an_answer_is_shown_as_it_is_written(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    reply = chat.answer("Count", shows=True)
    assert capsys.readouterr().out.rstrip() == reply.rstrip()


def test_the_conversation_goes_on_until_it_begins_anew(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "two " * 1000, "two", "/clear", "three", "/system Be kind.", "four", "/exit", "five"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    conversations = []

    def record(tokenizer: Any, rendered: list[list[dict[str, str]]]) -> list[list[int]]:
        conversations.append([turn["content"] for turn in rendered[0] if turn["role"] != "assistant"])
        return tokenize_prompts(tokenizer, rendered)

    monkeypatch.setattr(surefoot.inference.chat, "tokenize_prompts", record)
    chat.run()
    assert [turns for turns in conversations if len(turns[-1]) < 100] == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "two"],
        ["Be brief.", "three"],
        ["Be kind.", "four"],
    ]
    assert "new conversation" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hrm_text", "xlstm"])
def test_a_model_that_transformers_cannot_generate_with_is_named(name: str, tokenizer: Any) -> None:
    model = tiny_model(name, vocab_size=len(tokenizer))
    with pytest.raises(ModelError, match=type(model).__name__):
        complete(model, tokenizer, [[5, 6, 7]], max_new_tokens=4)


@pytest.mark.parametrize("name", ["llama4_text", "recurrent_gemma", "roformer", "phi3+longrope", "glm_moe_dsa"])
def test_an_answer_does_not_depend_on_its_batch(name: str, tokenizer: Any) -> None:
    """Padding would change the answers of all of these; answers come in the order of the prompts."""
    model = tiny_model(name, vocab_size=len(tokenizer))
    prompts = [[5, 6, 7], list(range(20, 50)), [8, 9, 10], [11, 12], list(range(30, 60))]
    alone = [complete(model, tokenizer, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert complete(model, tokenizer, prompts, max_new_tokens=6) == alone
    assert len(set(alone)) > 1
