"""What the docs say of the repository is there: files, links, codes, tests."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import surefoot
from surefoot.diagnostics.fault_injection import FAULTS
from surefoot.findings import CATALOGUE
from surefoot.migrate.convert import convert
from surefoot.migrate.parse_input import parse_run

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / link).exists(), link


def test_the_page_of_the_code_is_made_from_the_docstrings() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "list_modules.py"))["list_modules"]()
    assert (ROOT / "docs" / "code.md").read_text("utf-8") == made, "python docs/list_modules.py"
    assert ": ." not in made, "a module has no docstring"


@pytest.mark.parametrize("page", ["docs/health.md", "docs/zh-CN/health.md"])
def test_the_page_of_a_run_lists_every_code_of_it(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    listed = set(re.findall(r"SF\d+", text))
    for first, last in re.findall(r"SF(\d+) – SF(\d+)", text):
        listed |= {f"SF{number}" for number in range(int(first), int(last) + 1)}
    assert {code for code in CATALOGUE if code[:3] in ("SF1", "SF2", "SF3", "SF4", "SF8")} <= listed


def test_the_page_is_made_from_the_catalogue() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "coverage.py"))["coverage"]()
    assert (ROOT / "docs" / "coverage.md").read_text() == made, "python docs/coverage.py"


def test_the_pages_of_models_are_made_from_the_results_of_the_suite() -> None:
    for name, made in runpy.run_path(str(ROOT / "docs" / "list_models.py"))["pages"]().items():
        assert (ROOT / "docs" / name).read_text("utf-8") == made, "python docs/list_models.py"


def test_the_curves_are_drawn_from_the_tables() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "draw_curves.py"))
    curves = made["read_means"]((ROOT / "docs" / "grpo.md").read_text("utf-8"))
    assert [(name, len(points)) for name, points in curves] == [("local", 8), ("vLLM 0.32 on the CPU", 6)]
    assert all(max(value for _, value in points) - points[0][1] >= 0.25 for _, points in curves)
    assert made["read_steps"]("| step | 1 | 4 |\n|---|---|---|\n| `a` | 0.5 | |\n| b | -1 | 2 |\n", "`a`", "b") == [
        ("a", [(1.0, 0.5)]),
        ("b", [(1.0, -1.0), (4.0, 2.0)]),
    ]
    pictures = made["pictures"]()
    assert [picture.count("<polyline") for picture in pictures.values()] == [2, 2, 1]
    for name, picture in pictures.items():
        assert (ROOT / "docs" / name).read_text("utf-8") == picture, "python docs/draw_curves.py"


def test_what_is_claimed_names_a_test() -> None:
    for cause in yaml.safe_load((ROOT / "docs" / "causes.yaml").read_text()):
        is_claimed = cause["how"] in ("named", "prevented")
        assert is_claimed == ("test" in cause), cause["case"]
        if is_claimed:
            path, _, name = cause["test"].split(" ")[0].partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), cause["case"]
            assert "codes" in cause or "why" in cause, cause["case"]
            struck = re.search(r"\((.+)\)", cause["test"])
            if struck and FAULTS[struck[1]].code:
                assert FAULTS[struck[1]].code in cause["codes"], cause["case"]


def test_pages_of_findings_link_the_cases_they_name() -> None:
    for cause in yaml.safe_load((ROOT / "docs" / "causes.yaml").read_text()):
        for code in cause.get("codes", ()):
            assert cause["case"] in CATALOGUE[code].cases, (code, cause["case"])


@pytest.mark.parametrize("name", ["settings.md", "findings.md", "commands.md"])
def test_reference_pages_are_made_from_the_code(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))["PAGES"][name]()
    assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == made, "python docs/generate_reference.py"


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/zh-CN/troubleshooting.md"])
def test_codes_of_the_troubleshooting_page_exist(page: str) -> None:
    codes = set(re.findall(r"SF\d+", (ROOT / page).read_text("utf-8")))
    assert len(codes) > 20
    assert codes <= CATALOGUE.keys()


def blocks_of(page: str, language: str = "") -> list[str]:
    """Return the blocks of code of a page that are in a language, or in none."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    return [text for name, text in blocks if name == language]


def commands_of(page: str) -> list[str]:
    """Return the commands of a page in their order."""
    return [line for block in blocks_of(page) for line in block.splitlines()]


def test_the_lesson_is_the_same_in_both_languages() -> None:
    lessons = ("docs/get-started.md", "docs/zh-CN/get-started.md")
    assert commands_of(lessons[0]) == commands_of(lessons[1])
    run = yaml.safe_load((ROOT / "examples/orders-dense-lora.yaml").read_text("utf-8"))
    for lesson in lessons:
        assert [yaml.safe_load(block) for block in blocks_of(lesson, "yaml")] == [run]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/from/*.md")), ids=lambda page: "-".join(page.parts[-3:]))
def test_an_imported_run_is_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page shows a file of another program, and what `surefoot import` makes of it."""
    files = re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', page.read_text("utf-8"), re.M | re.S)
    (name, given), (_, shown) = files
    (tmp_path / name).write_text(given)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert convert(parse_run(name)).as_yaml() == shown


@pytest.mark.matrix
def test_the_lesson_works_when_typed(tmp_path: Path) -> None:
    """All its commands but those that install; then its model has learned, and answers in JSON."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = [line for line in commands_of("docs/get-started.md") if not line.startswith(("python3 -m venv", "pip "))]
    assert len(commands) == 5
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    lines = [json.loads(line) for line in (tmp_path / "runs/orders-dense-lora/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] > 1.5
    assert [line["eval_loss"] for line in lines if "eval_loss" in line][-1] < 0.3
    row = json.loads((tmp_path / "demo/dev.jsonl").read_text().splitlines()[0])["messages"]
    answer = surefoot.complete(*surefoot.load(tmp_path / "demo/merged"), [row[:-1]], max_new_tokens=40)[0]
    assert json.loads(answer).keys() == {"item", "n", "size", "extra"}
