"""Shell scripts and launchers around the command of a run."""

import shlex
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.migrate.convert import convert
from surefoot.migrate.parse_input import parse_run
from tests.support.imports import get_values, import_file


def test_accelerates_precision_is_the_runs(tmp_path: Path) -> None:
    command = (
        "accelerate launch --mixed_precision fp16 --num_processes 2 sft.py --model_name_or_path m --dataset_name d"
    )
    run = import_file(tmp_path / "a.sh", command)
    assert [finding.evidence["asked"] for finding in run.findings] == [["fp16: true"]]


def test_a_file_that_the_script_writes_is_read(tmp_path: Path) -> None:
    script = (
        "cat > train.yaml <<'END'\nmodel_name_or_path: m\ndataset: d\ncutoff_len: 99\nlora_rank: $RANK\nEND\n"
        "docker run -e NPROC_PER_NODE=2 --env=NCCL_DEBUG=INFO image bash -c 'llamafactory-cli train ./train.yaml'\n"
    )
    run = import_file(tmp_path / "run.sh", script)
    assert (get_values(run)["max_length"], get_values(run)["nproc_per_node"]) == (99, 2)
    assert run.variables == {"NCCL_DEBUG": "INFO"}
    assert "lora_rank" not in run.settings
    assert "lora_rank = $RANK" in run.left_out
    run = import_file(tmp_path / "b.sh", 'ssh node1 "NPROC_PER_NODE=2 swift sft --model m --dataset d"')
    assert get_values(run)["nproc_per_node"] == 2


def test_a_file_that_a_command_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("model: m\ndataset: d\nlearning_rate: 3e-5\n")
    run = import_file(tmp_path / "run.sh", "swift sft --config t.yaml --num_train_epochs 2\n")
    assert run.program == "ms-swift"
    assert {name: run.settings[name][0] for name in ("model", "dataset", "learning_rate", "num_train_epochs")} == {
        "model": "m", "dataset": ["d"], "learning_rate": 3e-5, "num_train_epochs": 2,
    }  # fmt: skip


def test_other_commands_of_a_script_are_named(tmp_path: Path) -> None:
    script = "swift rollout --model m &\nswift sft --model m --dataset d\nswift sft --model other --dataset d\n"
    run = import_file(tmp_path / "run.sh", script)
    assert run.settings["model"][0] == "m"
    others = [what for what in run.left_out if what.startswith("swift ")]
    assert others == ["swift rollout --model m", "swift sft --model other --dataset d"]


def test_options_that_a_comment_cuts_off_are_named(tmp_path: Path) -> None:
    script = "swift sft --model m \\\n  --dataset d \\\n  # --seed 1 \\\n  --lora_rank 64 --max_length 99\n"
    run = import_file(tmp_path / "run.sh", script)
    assert "lora_rank" not in get_values(run)  # a shell does not pass it either
    assert "a comment or an empty line above it ends the command" in run.left_out["--lora_rank 64 --max_length 99"]


@pytest.mark.parametrize(
    "word", ["\u2014-lora_rank", "\u2014lora_rank", "\uff0d\uff0dseed", "\u2013\u2013lora_rank=8", "-\u2013seed"]
)
def test_an_option_with_another_dash_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"begins with a dash that is not `-`.*Write --(lora_rank|seed)\."):
        parse_run(["swift", "sft", "--model", "m", "--dataset", "d", word, "8"])


def test_a_word_in_other_quotes_is_refused() -> None:
    words = ["swift", "sft", "--model", "m", "--dataset", "\u201cd.jsonl\u201d"]
    with pytest.raises(ConfigError, match=r"these quotes are none to a shell"):
        parse_run(words)
    assert parse_run([*words[:-1], "d", "--system", "\u201cYes\u201d is all you say"]).settings["dataset"] == "d"


def test_a_dash_in_a_value_is_a_value() -> None:
    run = parse_run(["swift", "sft", "--model", "m", "--dataset", "d", "--system", "\u2014answer", "\u2014"])
    assert run.settings["system"] == ["\u2014answer", "\u2014"]


def test_a_shell_script_is_read_as_a_shell_reads_it(tmp_path: Path) -> None:
    script = """
    MODEL=${MODEL:-Qwen/Qwen3-0.6B}
    LR=4e-5
    cat > notes <<EOF
    it's a text
    swift sft --model other --dataset d
    EOF
    NPROC_PER_NODE=${GPUS:-8}
    export NPROC_PER_NODE WANDB_API_KEY=abc123 TOKENIZERS_PARALLELISM=false # two
    FREE= MORE=""
    MAX_PIXELS=64000 USE_FLUX=1 swift sft --model $MODEL --dataset swift/self-cognition#500 \\
        --learning_rate ${LR:-1e-4} --lora_rank 64 --output_dir out $MORE < /dev/null &>train.log; echo done
    """
    run = import_file(tmp_path / "a.sh", script)
    known = {"model": "Qwen/Qwen3-0.6B", "learning_rate": 4e-5, "lora_rank": 64, "output_dir": "out",
             "nproc_per_node": 8, "max_pixels": 64000,
             "dataset": [{"path": "swift/self-cognition", "split": "[:500]"}]}  # fmt: skip
    assert {name: get_values(run)[name] for name in known} == known
    assert run.variables == {"WANDB_API_KEY": "(not shown)", "TOKENIZERS_PARALLELISM": "false"}
    assert run.unknown == ["the variable USE_FLUX"]
    assert "abc123" not in run.as_yaml()


def test_what_a_script_does_not_say_is_listed_and_numbers_are_left_out(tmp_path: Path) -> None:
    script = (
        'NNODES=$WORLD_SIZE CUDA_VISIBLE_DEVICES=0,1 swift sft --model $1 --dataset a.jsonl --learning_rate 3e-4 "$@" '
        "--max_steps $STEPS --output_dir out/$(date +%F) --seed 7\n"
    )
    run = import_file(tmp_path / "a.sh", script)
    found = get_values(run)
    assert (found["model"], found["output_dir"]) == ("$1", "out/$(date +%F)")
    assert (found["learning_rate"], found["seed"], found.get("max_steps"), found.get("nnodes")) == (3e-4, 7, None, None)
    assert {"$@", "model = $1", "max_steps = $STEPS", "output_dir = out/$(date +%F)", "NNODES = $WORLD_SIZE"} <= (
        run.left_out.keys()
    )


def test_what_a_branch_sets_is_to_be_looked_at(tmp_path: Path) -> None:
    script = "LR=1e-4\nif [ $DEBUG ]; then\n LR=1\nfi\nswift sft --model m --dataset a.jsonl --learning_rate $LR\n"
    run = import_file(tmp_path / "a.sh", script)
    assert get_values(run)["learning_rate"] == 1e-4
    assert "$LR = 1e-4" in run.left_out


def test_the_launchers_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "z3.yaml").write_text(
        "num_processes: 8\nnum_machines: 2\nmixed_precision: bf16\nmain_process_ip: 10.0.0.9\nmachine_rank: 0\n"
        "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, gradient_accumulation_steps: auto}\n"
    )
    (tmp_path / "scripts").mkdir()
    monkeypatch.chdir(tmp_path)  # where scripts in a folder of their own are started
    script = "accelerate launch --config_file configs/z3.yaml sft.py --model_name_or_path m --dataset_name d\n"
    run = import_file(tmp_path / "scripts" / "run.sh", script)
    found = get_values(run)
    wanted = {
        "nproc_per_node": 4, "nnodes": 2, "zero_stage": 3, "offload": "cpu", "dtype": "bfloat16",
        "rdzv_endpoint": "10.0.0.9:29500",
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted
    assert not [what for what in run.left_out if "config_file" in what]
    for options, ranks in (("--num_processes 16", (8, 2)), ("--num_machines 4", (2, 4)), ("--num_machines 1", (8, 1))):
        told = script.replace("launch", f"launch {options}")
        found = get_values(import_file(tmp_path / "scripts" / "run.sh", told))
        assert (found["nproc_per_node"], found["nnodes"]) == ranks
    told = script.replace("launch", "launch --zero_stage 2")
    assert get_values(import_file(tmp_path / "scripts" / "run.sh", told))["zero_stage"] == 2, (
        "options win over the file"
    )
    (tmp_path / "configs" / "z3.yaml").write_text("deepspeed_config: z3.json\n")
    with pytest.raises(ConfigError, match=r"z3\.yaml: deepspeed_config='z3\.json'"):
        import_file(tmp_path / "scripts" / "run.sh", script)
    (tmp_path / "configs" / "z3.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"z3\.yaml: "):
        import_file(tmp_path / "scripts" / "run.sh", script)
    options = "accelerate launch --config_file configs/z3.yaml src/train.py --learning_rate 1\n"
    with pytest.raises(ConfigError, match=r"run\.sh: .*no command"):  # a script of another program
        import_file(tmp_path / "scripts" / "run.sh", options)


@pytest.mark.parametrize(
    "script",
    [
        "docker run --gpus all image bash -c 'export NPROC_PER_NODE=2; swift sft --model m --dataset rows.jsonl'",
        'srun --ntasks 1 bash -lc "NPROC_PER_NODE=2 swift sft --model m --dataset rows.jsonl > log 2>&1"',
    ],
)
def test_what_another_shell_is_given_is_read(script: str, tmp_path: Path) -> None:
    run = import_file(tmp_path / "train.sh", script)
    assert (run.program, get_values(run)["nproc_per_node"], get_values(run)["model"]) == ("ms-swift", 2, "m")
    assert get_values(convert(parse_run(shlex.split(script))))["nproc_per_node"] == 2


def test_machines_of_a_hostfile_are_counted(tmp_path: Path) -> None:
    script = "deepspeed --hostfile hosts src/train.py --stage sft --model_name_or_path a/b --dataset c\n"
    left_out = import_file(tmp_path / "run.sh", script).left_out
    assert any("hostfile" in what and "nnodes" in why for what, why in left_out.items())
    (tmp_path / "hosts").write_text("one slots=8\ntwo slots=8  # a comment\n# three slots=8\n")
    run = import_file(tmp_path / "run.sh", script)
    assert get_values(run).items() >= {"nnodes": 2, "nproc_per_node": 8}.items()
    assert not any("hostfile" in name for name in run.left_out)


def test_what_a_script_writes_wins_over_a_file_that_lies_there(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model_name_or_path: old/model\nstage: sft\ndataset: old\n")
    written = "cat > train.yaml <<'EOF'\nmodel_name_or_path: new/model\nstage: sft\ndataset: new\ntemplate: qwen\nEOF\n"
    added = "cat >> train.yaml <<-EOF\n\tlearning_rate: 3e-5\n\tEOF\n"
    run = import_file(tmp_path / "run.sh", f"{written}{added}llamafactory-cli train train.yaml\n")
    assert get_values(run).items() >= {"model": "new/model", "dataset": "new", "learning_rate": 3e-5}.items()


def test_a_shell_may_have_options_before_its_text(tmp_path: Path) -> None:
    run = import_file(tmp_path / "run.sh", 'bash -x -c "swift sft --model a/b --dataset rows.jsonl"\n')
    assert get_values(run)["model"] == "a/b"


def test_a_file_with_the_system_message_is_read(tmp_path: Path) -> None:
    """ms-swift reads a name that ends in .txt; as a text it would be trained as the system message."""
    (tmp_path / "prompt.txt").write_text("Answer in <answer> tags.")
    command = "swift sft --model Qwen/Qwen3-8B --dataset train.jsonl --system {}"
    imported = import_file(tmp_path / "train.sh", command.format("prompt.txt"))
    assert get_values(imported)["system"] == "Answer in <answer> tags."
    missing = import_file(tmp_path / "other.sh", command.format("gone/prompt.txt"))
    assert "system" not in get_values(missing)
    assert "system = gone/prompt.txt" in missing.as_yaml()
    text = import_file(tmp_path / "text.sh", command.format("'Be brief.'"))
    assert get_values(text)["system"] == "Be brief."
