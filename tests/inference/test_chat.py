"""Conversations of `surefoot chat`."""

import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import surefoot
import surefoot.inference.chat
from surefoot.cli import main
from surefoot.data.render import tokenize_prompts
from surefoot.errors import ModelError
from surefoot.inference.chat import Chat, find_system
from surefoot.inference.load import find_model
from surefoot.models.build import load_tokenizer
from surefoot.models.generate import complete
from tests.models.architectures import tiny_model
from tests.support.data import counting_rows, write_jsonl


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

    def record(tokenizer: Any, rendered: list[list[dict[str, str]]], _: Any) -> list[list[int]]:
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


@pytest.mark.parametrize(
    ("systems", "setting", "wanted"),
    [
        (["Answer in a word."], None, "Answer in a word."), ([None], None, None), (["A.", "B."], None, None),
        (["A.", None], None, None), ([None], "Be brief.", "Be brief."),
    ],
)  # fmt: skip
def test_a_chat_begins_with_the_system_text_of_the_rows(
    systems: list[str | None],
    setting: str | None,
    wanted: str | None,
    settings: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the setting, or the one that all rows have; not one that the template writes by itself."""
    rows = [
        {"messages": [*([{"role": "system", "content": system}] if system else []), *row["messages"]]}
        for system, row in zip(cycle(systems), counting_rows(8), strict=False)
    ]
    data = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    run = surefoot.train(settings, dataset=data, max_steps=1, system=setting, screen=False).run_folder
    files = find_model(str(run))
    assert find_system(files, load_tokenizer(files.base, None)) == wanted
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    sentence = f"It was trained with this system message, which is not part of it: {wanted}\n"
    assert capsys.readouterr().out.endswith(sentence if wanted is not None else "needs no other\n")


def test_an_unfinished_run_answers_from_its_newest_checkpoint(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[{"role": "user", "content": "Count"}]]
    run = surefoot.train(settings, save_steps=2, save_total_limit=None, screen=False).run_folder
    surefoot.export(run, tmp_path / "two", step=2)
    expected = surefoot.complete(*surefoot.load(tmp_path / "two"), prompts, max_new_tokens=6)
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    before = sorted(run.iterdir())
    assert main(["chat", str(run), "--prompt", "Count", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.strip() == expected[0].strip()
    assert surefoot.complete(*surefoot.load(run), prompts, max_new_tokens=6) == expected
    assert sorted(run.iterdir()) == before
    with pytest.raises(ModelError, match="surefoot chat"):
        find_model(str(run))


def test_a_run_is_talked_to_with_the_variables_of_its_template(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = surefoot.train(settings, max_steps=1, enable_thinking=False, screen=False).run_folder
    variables = []

    def record(tokenizer: Any, rendered: list[list[dict[str, str]]], kwargs: Any) -> list[list[int]]:
        variables.append(kwargs)
        return tokenize_prompts(tokenizer, rendered, kwargs)

    monkeypatch.setattr(surefoot.inference.chat, "tokenize_prompts", record)
    assert main(["chat", str(run), "--prompt", "Count", "--max-new-tokens", "1"]) == 0
    assert variables == [{"enable_thinking": False}]


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


def test_a_short_prompt_has_its_own_room_beside_a_long_one(tokenizer: Any) -> None:
    """An answer ends where the model's context does, and that of another prompt does not matter."""
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.config.max_position_embeddings = 64
    prompts = [list(range(20, 32)), list(range(20, 65))]
    alone = [complete(model, tokenizer, [prompt], max_new_tokens=30)[0] for prompt in prompts]
    assert complete(model, tokenizer, prompts, max_new_tokens=30) == alone
    assert len(alone[0]) > len(alone[1])
