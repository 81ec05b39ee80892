"""Checks for who asks before a run starts: what it would go on from, and its chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import surefoot
from surefoot.config import load_config
from surefoot.doctor.check import Check
from surefoot.doctor.examine import examine
from tests.doctor.test_checks import LAPTOP


def asked(name: str, settings: dict[str, Any], **changes: Any) -> Check:
    loaded = load_config(None, (), {**settings, **changes})
    assert name not in {check.name for check in examine(LAPTOP, loaded)}, "a start does not wait for it"
    (check,) = [check for check in examine(LAPTOP, loaded, asked=True) if check.name == name]
    return check


def test_a_run_that_begins(settings: dict[str, Any]) -> None:
    assert asked("resume", settings).text.startswith("no checkpoint in")
    assert asked("resume", settings, resume_from_checkpoint=False).text == "the run begins anew"
    assert asked("resume", settings, overwrite_output_dir=True).text == "the run begins anew"


def test_a_run_that_goes_on(settings: dict[str, Any]) -> None:
    settings = {**settings, "max_steps": 2, "save_steps": 1}
    result = surefoot.train(settings)
    newest = result.run_folder / "checkpoints" / "step-00000002"
    check = asked("resume", settings)
    assert (check.status, check.text.split()[:2]) == ("ok", ["from", "step-00000002"])

    for changes in ({"learning_rate": 0.5}, {"learning_rate": 0.5, "resume_from_checkpoint": str(newest)}):
        check = asked("resume", settings, **changes)
        assert check.finding is not None
        assert check.finding.code == "SF739"
        assert "learning_rate: " in check.text
        assert "-> 0.5" in check.text

    (newest / "state.json").rename(newest / "elsewhere")
    check = asked("resume", settings)
    assert (check.status, check.text) == ("warning", f"{newest} lacks state.json")
    for text in ("{", "{}", "[]", '{"files": 3, "config": {}}'):
        (newest / "manifest.json").write_text(text)
        assert "has no manifest that can be read" in asked("resume", settings).text, text


def test_a_template_is_tried(settings: dict[str, Any], tmp_path: Path) -> None:
    check = asked("chat template", settings)
    assert (check.status, check.text) == ("ok", "of an answer it trains 'It is two.<|im_end|>'")

    hides = tmp_path / "hides.jinja"
    hides.write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    check = asked("chat template", settings, chat_template=str(hides))
    assert check.finding is not None
    assert (check.status, check.finding.code) == ("warning", "SF740")

    folder = tmp_path / "model"
    shutil.copytree(settings["model"], folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    assert asked("chat template", settings, model=str(folder)).status == "not applicable"
