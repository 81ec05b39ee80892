"""The command line as a user meets it: exit statuses, messages, JSON."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot import cli, train
from surefoot.config import load_config
from surefoot.config.describe import settings_as_text
from surefoot.findings import CATALOGUE
from surefoot.launch.run_verb import run_verb, train_and_print
from surefoot.training.run_summary import RunResult
from tests.support.data import counting_rows, write_jsonl
from tests.support.processes import surefoot


def config_file(tmp_path: Path, settings: dict[str, Any]) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


Here = Callable[..., Any]


def test_help_loads_no_torch() -> None:
    code = "import sys, surefoot.cli as cli; cli.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
    shown = surefoot("--help")
    assert shown.returncode == 0
    assert all(verb in shown.stdout for verb in ("train", "export", "chat", "upcycle", "settings"))


@pytest.mark.parametrize(
    "words",
    [
        ("train", "no.yaml"),
        ("plan", "no.yaml"),
        ("plan", "r.yaml", "price=x"),
        ("data", "r.yaml"),
        ("data", "no_data.yaml"),
        (),
        ("doctor", "r.yaml"),
        ("chat", "./no"),
        ("train", "no_data.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_before_torch_is_imported(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text("model: .\ndataset: .\noutput_dir: run\nlora_rank: eight\n")
    (tmp_path / "no_data.yaml").write_text("model: .\ndataset: no.jsonl\noutput_dir: run\npreflight: false\n")
    code = "import sys, surefoot.cli as cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the same command resumes"), ({"overwrite_output_dir": True}, "with overwrite_output_dir=false resumes"),
        ({"resume_from_checkpoint": False}, "with resume_from_checkpoint=auto resumes"),
        ({"resume_from_checkpoint": "run/checkpoints/step-00000002"}, "with resume_from_checkpoint=auto resumes"),
    ],
)  # fmt: skip
def test_what_resumes_an_interrupted_run_is_said(
    changes: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command deletes the run where `overwrite_output_dir` is set."""
    result = RunResult("interrupted", Path("run"), 3, 1.0, None, 0, {}, True, None)
    monkeypatch.setattr("surefoot.train_loaded", lambda _: result)
    loaded = load_config(None, [], {"model": ".", "dataset": "a.jsonl", "output_dir": "run", **changes})
    train_and_print(loaded, as_json=False)
    assert words in capsys.readouterr().out


def test_settings_are_listed() -> None:
    schema = json.loads(surefoot("settings", "--json").stdout)
    assert schema["seed"]["default"] == 42
    shown = surefoot("settings").stdout
    assert 'learning_rate: "auto"  (number from 0 | auto)\n    Peak learning rate.' in shown
    assert f"adam_epsilon: 1e-08  (number above 0)\n    {schema['adam_epsilon']['description']}" in shown
    assert 'optim: "adamw"  (adamw | adamw_8bit | adafactor | muon | lion | sgd)' in shown
    assert "offload: null  (cpu | null)" in shown
    groups = [line for line in shown.splitlines() if line and line[0].isupper()]
    assert groups[:2] == ["Model and data", "What is trained"]
    assert "Only with method grpo" in groups


def test_settings_are_found_by_words_and_fit_the_terminal() -> None:
    named = surefoot("settings", "lora", "rank").stdout
    assert "lora_rank: 8" in named
    assert "learning_rate" not in named
    narrow = settings_as_text(["vision"], 60)
    assert max(map(len, narrow.splitlines())) <= 60
    refused = surefoot("settings", "nonsense")
    assert (refused.returncode, "nonsense" in refused.stderr) == (2, True)


def test_train_export_and_chat(tmp_path: Path, settings: dict[str, Any], here: Here) -> None:
    done = surefoot("train", config_file(tmp_path, settings), "--json", "max_steps=2", "--logging_steps=1")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert "step 2/2  loss" in done.stderr
    assert "tok/s" in done.stderr
    assert "ETA 0:00" in done.stderr
    assert "per_device_train_batch_size" not in done.stderr, "the model's output layer is all that makes its logits"
    adapter = here("export", settings["output_dir"], str(tmp_path / "copy"))
    assert "an adapter; with --merge" in adapter.stdout
    merged = surefoot("export", settings["output_dir"], str(tmp_path / "merged"), "--merge")
    assert "a whole model" in merged.stdout
    assert merged.returncode == 0, merged.stderr
    assert (tmp_path / "merged" / "config.json").is_file()
    again = here("export", settings["output_dir"], str(tmp_path / "merged"), "--merge")
    assert again.returncode == 2
    assert str(tmp_path / "merged") in again.stderr
    run, base = settings["output_dir"], settings["model"]
    sources = [[run], [str(tmp_path / "merged")], [f"{run}/adapter"], [base, "--adapter", run]]
    replies = set()
    for source in sources:
        chat = here("chat", *source, "--prompt", "Count", "--max-new-tokens", "3", "--json")
        assert chat.returncode == 0, chat.stderr
        assert json.loads(chat.stdout)["prompt"] == "Count"
        replies.add(json.loads(chat.stdout)["completion"])
    assert len(replies) == 1
    odd = here(
        "chat", settings["output_dir"], "--prompt", "Count\udcff", "--system", "\udcfe", "--max-new-tokens=9999999"
    )
    assert odd.returncode == 0, odd.stderr  # bytes that are no text; more tokens than the model's context has
    for option, named in (
        ("--max-new-tokens=-3", "max_new_tokens=-3"),
        ("--temperature=-1", "temperature=-1"),
        ("--temperature=1e-40", "temperature=1e-40"),
        ("--temperature=nan", "temperature=nan"),
        (f"--system={'one ' * 300}", "new conversation"),
    ):
        refused = here("chat", settings["output_dir"], "--prompt", "Count", option)
        assert refused.returncode == 2
        assert named in refused.stderr
    talk = subprocess.run(
        [sys.executable, "-m", "surefoot", "chat", settings["output_dir"], "--max-new-tokens", "3"],
        input=b"one\ncaf\xe9\n\n/clear\n/system Be brief.\n/nonsense\ntwo\n/exit\nnever read\n",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=120,
    )
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.count(b"> ") == 8
    assert b"/nonsense is not known" in talk.stderr
    (tmp_path / "project").mkdir()
    config_file(tmp_path / "project", settings)
    for refused in (here("chat", str(tmp_path / "project")), here("export", str(tmp_path / "project"), "copy")):
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1, "a config of a user's own is no run"


def test_a_folder_that_was_deleted_meanwhile_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from surefoot.cli import main; sys.exit(main())"
    for verb in (["settings"], ["import", "--", "trl", "sft"], ["train", "run.yaml"]):
        (tmp_path / "gone").mkdir(exist_ok=True)
        ended = subprocess.run(
            [sys.executable, "-c", code, *verb], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=60
        )
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr


@pytest.mark.matrix
def test_the_cache_may_have_any_name_and_its_errors_name_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    arguments = ["data", config_file(tmp_path, settings), "--show", "9" * 30]
    done = surefoot(*arguments, env={"SUREFOOT_CACHE": f"{tmp_path}/cache\udcff"})
    assert done.returncode == 0, done.stderr
    (tmp_path / "file").touch()
    refused = surefoot(*arguments, env={"SUREFOOT_CACHE": str(tmp_path / "file")})
    assert refused.returncode != 0
    assert "SUREFOOT_CACHE" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_artifact_that_is_damaged_is_not_exported(tmp_path: Path, settings: dict[str, Any], here: Here) -> None:
    run = Path(train(settings | {"max_steps": 1}).run_folder)
    weights = run / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused = here("export", str(run), str(tmp_path / "copy"))
    assert refused.returncode == 2
    assert "adapter_model.safetensors" in refused.stderr
    assert not (tmp_path / "copy").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "verb", ["train", *(pytest.param(verb, marks=pytest.mark.matrix) for verb in ("export", "watch"))]
)
def test_a_pipe_in_the_place_of_a_file_of_the_run_is_not_waited_for(
    tmp_path: Path, settings: dict[str, Any], verb: str
) -> None:
    train(settings | {"max_steps": 1})
    run = Path(settings["output_dir"])
    for name in ("run.yaml", "metrics.jsonl", "adapter/adapter_model.safetensors"):
        (run / name).unlink()
        os.mkfifo(run / name)
    (run / "events").mkdir(exist_ok=True)
    (run / "events/rank-0.ring").unlink(missing_ok=True)
    os.mkfifo(run / "events/rank-0.ring")
    arguments = {
        "export": ["export", str(run), str(tmp_path / "copy")],
        "watch": ["watch", str(run), "--once"],
        "train": ["train", config_file(tmp_path, settings)],
    }
    ended = surefoot(*arguments[verb])
    assert ended.returncode == {"export": 2, "watch": 0, "train": 2}[verb], ended.stderr
    assert verb != "train" or "metrics.jsonl, run.yaml" in ended.stderr


@pytest.mark.long
def test_upcycle(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    made = surefoot("upcycle", str(model_folder("llama")), str(tmp_path / "moe"), "--experts", "3", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["experts"] == 3
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["num_local_experts"] == 3


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "roles": ({"messages": [{"role": "assistant", "content": "a"}] * 2}, r"bad\.jsonl:3: .* 1 of 2: assistant"),
    "no assistant": ({"messages": [{"role": "user", "content": "a"}]}, r"bad\.jsonl:3: .*\(roles: user\)"),
    "no format": ({"story": "a"}, r"bad\.jsonl:3: .*\(story\)"),
    "mixed": ({"text": "a"}, r"bad\.jsonl:3: .* text, .*messages"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_end_with_status_2(tmp_path: Path, settings: dict[str, Any], kind: str, here: Here) -> None:
    row, message = BAD_ROWS[kind]
    data = write_jsonl(tmp_path / "bad.jsonl", [*counting_rows(2), row])
    done = here("train", config_file(tmp_path, {**settings, "dataset": str(data)}))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rat": 1}, r"'learning_rat'.*'learning_rate'.*\(run\.yaml:\d+\)"),
        ({"lora_rank": "big"}, r"lora_rank='big': .*\(run\.yaml:\d+\)"),
        ({"model": "./nowhere"}, r"/nowhere: .*\(run\.yaml:\d+\)"),
        ({"dataset": "nowhere.jsonl"}, r"/nowhere\.jsonl .*\(run\.yaml:\d+\)"),
        ({"nproc_per_node": 10000, "preflight": False}, r"nproc_per_node=10000 .*\(run\.yaml:\d+\)"),
        ({"target_modules": ["q_prj"]}, r"'q_prj' .*Qwen2MoeForCausalLM.* q_proj"),
        ({"max_length": 50}, r"max_length=50\b.*train\.jsonl:\d+"),
    ],
)
def test_bad_settings_end_with_status_2(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], message: str, here: Here
) -> None:
    done = here("train", config_file(tmp_path, {**settings, **changes}))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert re.search(message, done.stderr), done.stderr


def test_an_output_inside_the_data_is_refused(tmp_path: Path, settings: dict[str, Any], here: Here) -> None:
    write_jsonl(tmp_path / "train.jsonl", counting_rows(4))
    done = here("train", config_file(tmp_path, {**settings, "dataset": str(tmp_path)}))
    assert done.returncode == 2
    assert re.search(r"output_dir=.*inside dataset .*run\.yaml:\d", done.stderr), done.stderr


@pytest.mark.long
def test_bad_input_ends_the_supervised_run_with_status_2_and_no_traceback(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    for changes in ({"learning_rat": 1}, {"target_modules": ["q_prj"]}):
        done = surefoot("train", config_file(tmp_path, {**settings, **changes}))
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error: ") == 1
        assert "Traceback" not in done.stderr


def test_a_folder_that_is_no_model(tmp_path: Path, settings: dict[str, Any], here: Here) -> None:
    (tmp_path / "empty").mkdir()
    done = here("train", config_file(tmp_path, {**settings, "model": str(tmp_path / "empty")}))
    assert done.returncode == 2
    assert re.search(rf"{tmp_path}/empty .*config\.json", done.stderr)


def test_a_model_without_chat_template(
    tmp_path: Path, settings: dict[str, Any], model_folder: Callable[[str], Path], here: Here
) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(model_folder("llama"), folder)
    (folder / "chat_template.jinja").unlink()
    done = here("train", config_file(tmp_path, {**settings, "model": str(folder)}))
    assert done.returncode == 2
    assert re.search(r"train\.jsonl:1: .*chat template.*chat_template: FILE", done.stderr)
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    given = here("train", config_file(tmp_path, {**settings, "model": str(folder), "chat_template": str(template)}))
    assert given.returncode == 0, given.stderr


@pytest.mark.long
def test_a_finding_ends_with_status_3(tmp_path: Path, settings: dict[str, Any]) -> None:
    done = surefoot("train", config_file(tmp_path, {**settings, "learning_rate": 1e30}))
    assert done.returncode == 3, done.stderr
    assert "SF40" in done.stderr
    assert "rows: train.jsonl:" in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_prints_the_page_of_a_code_and_lists_all() -> None:
    page = surefoot("explain", "sf104").stdout
    assert f"SF104 {CATALOGUE['SF104'].title}" in page
    assert all(f"https://github.com/{one.replace('#', '/issues/')}" in page for one in CATALOGUE["SF104"].cases)
    listed = surefoot("explain").stdout
    assert all(code in listed for code in CATALOGUE)
    assert json.loads(surefoot("explain", "SF104", "--json").stdout)["SF104"]["severity"] == "error"


def test_explain_of_a_code_that_is_not_there(here: Here) -> None:
    said = here("explain", "SF999")
    assert said.returncode == 2
    (line,) = said.stderr.splitlines()
    assert re.match("error: .*SF999.*`surefoot explain`", line)


def test_explain_says_why_a_run_failed(settings: dict[str, Any], tmp_path: Path, here: Here) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": None}])
    assert here("train", config_file(tmp_path, {**settings, "dataset": str(bad)})).returncode == 2
    said = here("explain", settings["output_dir"])
    assert said.returncode == 0
    assert "  error: bad.jsonl:1" in said.stdout


@pytest.mark.long
def test_explain_tells_what_a_folder_says(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = train(settings, screen=False).run_folder
    said = surefoot("explain", str(folder))
    assert said.returncode == 0
    assert all(words in said.stdout for words in ("completed", "rank 0", "no findings"))
    shown = surefoot("watch", str(folder))  # it has ended, and so does the view
    assert shown.returncode == 0
    assert all(words in shown.stdout for words in ("completed", "has ended", "forward", "loss"))
    later = {"code": "SF999", "cause": "", "evidence": {}, "fix": "", "confidence": 1}
    lines = ["broken", json.dumps(later), json.dumps({**later, "code": "SF101", "evidence": None})]
    (folder / "findings.jsonl").write_text("\n".join(lines) + "\n")
    missing = json.loads(surefoot("explain", str(folder), "--json").stdout)["missing"]
    assert [text.partition(" ")[0] for text in missing] == [f"findings.jsonl:{number}" for number in (1, 2, 3)]
    (folder / "events" / "gpus-0.jsonl").write_bytes(
        b'\xff\n{"time_s": 1, "gpus": [[0, 0.5, 71.0, 700.0, 1980, 1073741824, null, []]]}\n'
    )
    (folder / "metrics.jsonl").write_bytes(b'5\n\xff\n{"loss": 1}\n{"step": 1, "loss": null}\n')
    shown = surefoot("watch", str(folder), "--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"0: 50%.* 71 W .*700 W.* 1\.0 GiB", shown.stdout)
    assert surefoot("report", str(folder)).returncode == 0
    nothing = surefoot("explain", str(tmp_path / "nowhere"))
    assert nothing.returncode == 2
    assert "holds no run" in nothing.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT "),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "nproc_per_node=2"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "LOCAL_RANK": "", "WORLD_SIZE": "2"}, "LOCAL_RANK=''"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x'"),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK=2 with WORLD_SIZE=2",
        ),
    ],
)
def test_half_of_what_a_launcher_says_starts_no_job_of_its_own(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: Here,
    variables: dict[str, str],
    said: str,
) -> None:
    settings = {**settings, "nproc_per_node": 1 if said.startswith("WORLD_SIZE=") else 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = here("train", config_file(tmp_path, settings))
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.long
def test_the_command_says_what_a_launcher_left_out(settings: dict[str, Any], tmp_path: Path) -> None:
    config = config_file(tmp_path, {**settings, "nproc_per_node": 2})
    done = surefoot("train", config, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_may_not_be_read_is_named_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> int:
        raise PermissionError(13, "Permission denied", "/data/rows.jsonl")

    assert run_verb(refused) == 2
    assert "error: /data/rows.jsonl: Permission denied." in capsys.readouterr().err


@pytest.mark.long
def test_modules_in_the_current_folder_are_imported_by_no_process_of_a_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """A cloned dataset may hold a yaml.py. Every process that a run starts is started here, by the console script."""
    here = tmp_path / "clone"
    here.mkdir()
    for name in ("yaml", "psutil", "numpy", "torch", "rich", "vl_convert", "random"):
        (here / f"{name}.py").write_text("open('was_imported', 'w')")
    (tmp_path / "reward.py").write_text(
        "def length(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    rewards = [f"{tmp_path / 'reward.py'}:length"]
    grpo = {"method": "grpo", "reward_funcs": rewards, "num_generations": 2, "max_completion_length": 4}
    more = {"nproc_per_node": 2, "dataset_num_proc": 2, "report": True, "max_steps": 1, "global_batch_size": 2}
    (tmp_path / "run.json").write_text(json.dumps({**settings, **grpo, **more}))
    environment = {name: value for name, value in os.environ.items() if name != "SUREFOOT_SUPERVISED"}
    done = subprocess.run(
        [Path(sys.executable).with_name("surefoot"), "train", tmp_path / "run.json"],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (Path(settings["output_dir"]) / "report.html").is_file()
    assert not (here / "was_imported").exists()


def test_python_m_surefoot_imports_no_file_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("yaml", "pydantic", "pathlib", "psutil"):
        (tmp_path / f"{name}.py").write_text("open('was_imported', 'w')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", "surefoot", "settings"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was_imported").exists()


def test_a_command_that_is_ended_by_a_signal_leaves_no_part_of_what_it_wrote(tmp_path: Path) -> None:
    code = """
import os, signal, sys, surefoot.cli
from pathlib import Path
from surefoot.system.atomic_io import new_folder

def export(*_arguments, **_options):
    with new_folder(Path("merged")) as folder:
        (folder / "part").write_text("x")
        os.kill(os.getpid(), signal.SIGTERM)
        return folder

surefoot.export = export
sys.argv = ["surefoot", "export", "run", "merged"]
sys.exit(surefoot.cli.main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["upcycle", "a", "b", "--to", "2"], None),
        (["upcycle", "a", "b", "--topk", "2"], "did you mean --top-k?"),
        (["chat", "a", "--adaptor", "b"], "did you mean --adapter?"),
        (["train", "run.yaml", "--max_steps", "2"], "key=value"),
        (["train", "run.yaml", "--jsn"], "did you mean --json?"),
    ],
)
def test_an_option_that_is_not_known_gets_a_suggestion_and_none_is_abbreviated(
    arguments: list[str], suggestion: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert (suggestion or "unrecognized arguments: --to 2") in capsys.readouterr().err
