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
    assert all(what in listed for what in ("rows.map(", "warmup_steps = int(0.1 * 100)", "**more", "load_in_4bit"))
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


@pytest.mark.parametrize(
    ("rows", "arguments", "wanted"),
    [
        (
            "rows = load_dataset('json', data_files='a.jsonl', split='train').remove_columns(['id'])\n"
            "parts = rows.train_test_split(test_size=0.1, seed=42)",
            "train_dataset=parts['train'], eval_dataset=parts['test']",
            {"dataset": "a.jsonl", "eval_fraction": 0.1},
        ),
        (
            "parts = load_dataset('owner/rows', split='train').train_test_split(train_size=0.8)",
            "train_dataset=parts['train'], eval_dataset=parts['test'].select(range(9))",
            {"dataset": [{"path": "owner/rows", "split": "train"}], "eval_fraction": 0.2},
        ),
        (
            "rows = load_dataset('owner/rows')", "train_dataset=rows['train'], eval_dataset=rows['dev']",
            {"dataset": "owner/rows", "eval_dataset": {"path": "owner/rows", "split": "dev"}},
        ),
        (
            "rows = load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})",
            "train_dataset=rows['train'], eval_dataset=rows['test']", {"dataset": "a.jsonl", "eval_dataset": "b.jsonl"},
        ),
        (
            "a = load_dataset('owner/rows', split='train[:9]')\nb = load_dataset('owner/others', split='test')",
            "train_dataset=a, eval_dataset=b.map(f)",
            {
                "dataset": [{"path": "owner/rows", "split": "train[:9]"}],
                "eval_dataset": {"path": "owner/others", "split": "test"},
            },
        ),
        (
            "rows = load_dataset('owner/rows')", "train_dataset=rows['train'], eval_dataset=None",
            {"dataset": "owner/rows"},
        ),
    ],
)  # fmt: skip
def test_the_evaluation_data_of_a_script_are_those_of_its_trainer(
    tmp_path: Path, rows: str, arguments: str, wanted: dict[str, Any]
) -> None:
    run, values = run_of(tmp_path, EVALUATED.format(rows, arguments))
    assert {name: value for name, value in values.items() if "dataset" in name or "eval_fraction" in name} == wanted
    assert not any("eval_dataset" in name or "train_test_split" in name for name in run.source.notes)


def test_evaluation_data_that_a_script_computes_are_named(tmp_path: Path) -> None:
    run, values = run_of(
        tmp_path,
        EVALUATED.format("rows = load_dataset('owner/rows')\nb = make(b)", "train_dataset=rows, eval_dataset=b"),
    )
    assert "eval_dataset" not in values
    assert any(name.startswith("eval_dataset, line ") for name in run.source.notes)
    text = EVALUATED.format(
        "parts = load_dataset('owner/rows').train_test_split(test_size=200)", "eval_dataset=parts['test']"
    )
    assert "eval_fraction" not in run_of(tmp_path, text)[1]


def test_arguments_of_the_model_are_read_from_the_config(tmp_path: Path) -> None:
    text = "SFTTrainer(model='m', args=SFTConfig(model_init_kwargs={'torch_dtype': 'bfloat16'}))"
    assert run_of(tmp_path, text)[1]["dtype"] == "bfloat16"
