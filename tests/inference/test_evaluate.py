"""Benchmarks of `surefoot evaluate`, with tasks of their own."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from surefoot.inference.evaluate import EvaluationSettings, evaluate
from surefoot.inference.load import find_model
from surefoot.models.generate import complete
from surefoot.training.run_summary import read_result
from tests.models.architectures import tiny_model
from tests.support.data import write_jsonl
from tests.support.processes import surefoot

pytestmark = pytest.mark.long

ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{until: [], max_gen_toks: 6}}
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
metric_list: [{{metric: exact_match}}]
"""
TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [red, blue]
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    rows = [{"question": f"Colour {number}?", "answer": number % 2} for number in range(6)]
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text(TASK.format(rows=write_jsonl(tmp_path / "colours.jsonl", rows)))
    return folder


def test_scores_are_printed_and_kept_in_the_summary_and_the_report(finished_run: Path, tasks: Path) -> None:
    command = ("evaluate", str(finished_run), "--tasks", "colours", "--tasks-folder", str(tasks))
    done = surefoot(*command, "--json", timeout_s=300)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert 0 <= scores["colours"]["acc"] <= 1
    result = read_result(finished_run)
    assert result is not None
    assert result.benchmarks == scores
    written = surefoot("report", str(finished_run))
    assert written.returncode == 0, written.stderr
    assert "colours" in (finished_run / "report.html").read_text()


@pytest.mark.matrix
def test_an_unknown_task_is_refused_with_the_nearest(finished_run: Path, tasks: Path) -> None:
    done = surefoot("evaluate", str(finished_run), "--tasks", "colour", "--tasks-folder", str(tasks), timeout_s=300)
    assert done.returncode == 2
    assert "did you mean colours?" in done.stderr


@pytest.mark.matrix
def test_data_that_cannot_be_fetched_are_named(finished_run: Path) -> None:
    done = surefoot("evaluate", str(finished_run), "--tasks", "gsm8k", "--limit", "1", timeout_s=300)
    assert done.returncode == 2
    assert "--tasks gsm8k: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.matrix
def test_answers_do_not_depend_on_their_batch(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Padding would change the answers of this model, whose positions depend on the length of the row."""
    model = tiny_model("phi3+longrope", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    questions = ["one", "one two", "three four", " ".join(["one two three four"] * 8)]
    prompts = [tokenizer.encode(question) for question in questions]
    answers = [complete(model, tokenizer, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    rows = [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)]
    (tmp_path / "answers.yaml").write_text(ANSWERS.format(rows=write_jsonl(tmp_path / "answers.jsonl", rows)))
    settings = EvaluationSettings(["answers"], str(tmp_path), chat=False)
    assert evaluate(find_model(str(tmp_path / "model")), settings)["answers"]["exact_match"] == 1.0
