"""Python scripts of TRL are read without running them."""

from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.migrate.convert import convert
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.parse_input import parse_run

SFT = """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

raise SystemExit("this script is never run")
MODEL = "owner/model"
rows = load_dataset("json", data_files={"train": "train.jsonl", "test": "test.jsonl"}, split="train")
rows = rows.map(lambda row: row)
model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
tokenizer = AutoTokenizer.from_pretrained("owner/other")
lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", bias="none")
args = SFTConfig(output_dir="out", learning_rate=2e-4, packing=True, warmup_steps=int(0.1 * 100), **more)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=lora)
trainer.train()
"""
GRPO = """
import trl

def short(completions, **columns):
    return [0.0 for _ in completions]

if __name__ == "__main__":
    trainer = trl.GRPOTrainer(
        model="owner/model", reward_funcs=[short], train_dataset=load_dataset("owner/rows", split="train[:9]"),
        args=trl.GRPOConfig(num_generations=4, use_vllm=True),
    )
"""
UNSLOTH = """
model, tokenizer = FastLanguageModel.from_pretrained(model_name="owner/model", max_seq_length=512, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, target_modules=["q_proj"])
trainer = SFTTrainer(model=model, train_dataset=load_dataset("owner/rows", split="train"), args=TrainingArguments())
"""


def run_of(tmp_path: Path, text: str) -> tuple[ImportedRun, dict[str, Any]]:
    (tmp_path / "train.py").write_text(text)
    run = convert(parse_run(str(tmp_path / "train.py")))
    return run, {name: value for name, (value, _) in run.settings.items()}


def test_a_script_of_sft_is_read(tmp_path: Path) -> None:
    run, values = run_of(tmp_path, SFT)
    wanted = {
        "model": "owner/model", "dataset": "train.jsonl", "output_dir": "out", "tuning": "lora", "lora_rank": 16,
        "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "learning_rate": 2e-4,
        "packing": True,
    }  # fmt: skip
    assert {name: values.get(name) for name in wanted} == wanted
    assert run.settings["learning_rate"][1] == "learning_rate of train.py:14"
    listed = " ".join(run.left_out)
    assert all(what in listed for what in ("rows.map(", "warmup_steps = int(0.1 * 100)", "**more", "fp4"))
    assert run.unknown == []


def test_a_script_of_grpo_is_read(tmp_path: Path) -> None:
    run, values = run_of(tmp_path, GRPO)
    wanted = {
        "method": "grpo", "model": "owner/model", "dataset": [{"path": "owner/rows", "split": "train[:9]"}],
        "num_generations": 4, "rollout_engine": "vllm", "tuning": "full",
    }  # fmt: skip
    assert {name: values.get(name) for name in wanted} == wanted
    assert "reward_funcs = short" in run.left_out


def test_a_script_of_unsloth_is_read(tmp_path: Path) -> None:
    _, values = run_of(tmp_path, UNSLOTH)
    wanted = {
        "model": "owner/model", "max_length": 512, "lora_rank": 8, "lora_alpha": 16, "target_modules": "q_proj",
        "learning_rate": 5e-5, "gradient_checkpointing": False,
    }  # fmt: skip
    assert {name: values.get(name) for name in wanted} == wanted


def test_a_model_that_the_script_computes_is_listed(tmp_path: Path) -> None:
    text = "model = LlamaForCausalLM.from_pretrained(options.model)\nmodel = PeftModel.from_pretrained(model, 'old')\n"
    run, values = run_of(
        tmp_path, f"{text}SFTTrainer(model=model, args=SFTConfig(report_to=[tracker], **options), formatting_func=f)\n"
    )
    assert "model" not in values
    listed = {"model_name_or_path = options.model", "**options", "report_to = [tracker]", "formatting_func, line 3"}
    assert listed <= run.left_out.keys()


@pytest.mark.parametrize(
    ("text", "message"), [("print(1)", r"train\.py: makes no trainer of TRL"), ("SFTTrainer(", r"train\.py: .*Python")]
)
def test_other_scripts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, text)


EVALUATED = "args = SFTConfig(output_dir='out', eval_strategy='steps')\n{}\nSFTTrainer(model='m', args=args, {})"
TAKEN = "train_dataset=d['train'], eval_dataset=d['test']"


@pytest.mark.parametrize(
    ("rows", "arguments", "wanted"),
    [
        (
            "d = load_dataset('json', data_files='a.jsonl', split='train').remove_columns(['id'])\n"
            "d = d.train_test_split(test_size=0.1, seed=42)",
            TAKEN, {"dataset": "a.jsonl", "eval_fraction": 0.1},
        ),
        (
            "d = load_dataset('json', data_files='a.jsonl', split='train')\nd = d.train_test_split(0.3)",
            TAKEN, {"dataset": "a.jsonl", "eval_fraction": 0.3},
        ),
        (
            "d = load_dataset('owner/rows', split='train').train_test_split(train_size=0.8)",
            "train_dataset=d['train'], eval_dataset=d['test'].select(range(9))",
            {"dataset": [{"path": "owner/rows", "split": "train"}], "eval_fraction": 0.2},
        ),
        (
            "d = load_dataset('owner/rows')", "train_dataset=d['train_sft'], eval_dataset=d['dev']",
            {
                "dataset": [{"path": "owner/rows", "split": "train_sft"}],
                "eval_dataset": {"path": "owner/rows", "split": "dev"},
            },
        ),
        (
            "d = load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})",
            TAKEN, {"dataset": "a.jsonl", "eval_dataset": "b.jsonl"},
        ),
        (
            "e = load_dataset('owner/rows', 'main', split='test')\nd = load_dataset('owner/rows', split='train[:9]')",
            "train_dataset=d, eval_dataset=e.map(f)",
            {
                "dataset": [{"path": "owner/rows", "split": "train[:9]"}],
                "eval_dataset": {"path": "owner/rows", "subset": "main", "split": "test"},
            },
        ),
        (
            "d = load_dataset('owner/rows', 'main')", TAKEN,
            {
                "dataset": [{"path": "owner/rows", "subset": "main", "split": "train"}],
                "eval_dataset": {"path": "owner/rows", "subset": "main", "split": "test"},
            },
        ),
        ("d = load_dataset('owner/rows')", "train_dataset=prepare(d), eval_dataset=None", {"dataset": "owner/rows"}),
        ("d = load_dataset('owner/rows')\nd = ((\nd).shuffle())", "train_dataset=d", {"dataset": "owner/rows"}),
        ("d, e = load_dataset('owner/rows'), None", "train_dataset=prepare(d)", {"dataset": "owner/rows"}),
    ],
)  # fmt: skip
def test_the_rows_of_a_script_are_those_of_its_trainer(
    tmp_path: Path, rows: str, arguments: str, wanted: dict[str, Any]
) -> None:
    run, values = run_of(tmp_path, EVALUATED.format(rows, arguments))
    assert {name: value for name, value in values.items() if "dataset" in name or "eval_fraction" in name} == wanted
    assert not any("_dataset" in name or "train_test_split" in name for name in run.source.notes)


@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        ("d = load_dataset('owner/rows')\ne = make(e)", "train_dataset=d, eval_dataset=e"),
        ("d = load_dataset('owner/rows')", "train_dataset=d['train'], eval_dataset=d[options.test]"),
        ("d = load_dataset('owner/rows')['train']", "train_dataset=d, eval_dataset=d.select(range(9))"),
        ("d = load_dataset('a')\ne = load_dataset('json', data_files=options.file)", "train_dataset=d, eval_dataset=e"),
        (
            "d = load_dataset('a')\ne = load_dataset('json', data_files=['a', 'b'], split='train[:5]')",
            "train_dataset=d, eval_dataset=e",
        ),
        ("d = load_dataset('a').train_test_split(train_size=1000)", TAKEN),
        ("d = load_dataset('a').train_test_split(test_size=options.share)", TAKEN),
    ],
)
def test_evaluation_data_that_a_script_computes_are_named(tmp_path: Path, rows: str, arguments: str) -> None:
    run, values = run_of(tmp_path, EVALUATED.format(rows, arguments))
    assert values.keys().isdisjoint({"eval_dataset", "eval_fraction"})
    assert any(name.startswith("eval_dataset, line ") for name in run.source.notes)


def test_what_is_left_out_of_the_rows_of_a_script_is_named(tmp_path: Path) -> None:
    held_out = "d = load_dataset('owner/rows').train_test_split(test_size={})"
    run, values = run_of(tmp_path, EVALUATED.format(held_out.format(200), TAKEN))
    assert "eval_fraction" not in values
    assert any("eval_fraction" in name and "a number of rows" in why for name, why in run.left_out.items())
    run, _ = run_of(tmp_path, EVALUATED.format(held_out.format(0.2), "train_dataset=d['train']"))
    assert any("eval_fraction" in why for name, why in run.source.notes.items() if "train_test_split" in name)
    loads = "d = load_dataset('owner/rows')\ne = load_dataset('owner/others')"
    run, _ = run_of(tmp_path, EVALUATED.format(loads, "train_dataset=concatenate([d, e])"))
    assert any("owner/others" in name for name in run.source.notes)


@pytest.mark.parametrize(("strategy", "steps"), [("epoch", None), ("steps", 500)])
def test_a_strategy_of_epochs_leaves_no_interval_of_the_peer(tmp_path: Path, strategy: str, steps: int | None) -> None:
    text = f"SFTTrainer(model='m', args=SFTConfig(output_dir='o', save_strategy={strategy!r}))"
    assert run_of(tmp_path, text)[1].get("save_steps") == steps


def test_arguments_of_the_model_are_read_from_the_config(tmp_path: Path) -> None:
    text = "SFTTrainer(model='m', args=SFTConfig(model_init_kwargs={'torch_dtype': 'bfloat16'}))"
    assert run_of(tmp_path, text)[1]["dtype"] == "bfloat16"
