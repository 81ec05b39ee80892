"""Quantised base weights of other programs become `quantization`, or are named."""

from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.migrate.convert import convert
from surefoot.migrate.imported_run import ImportedRun
from surefoot.migrate.parse_input import parse_run

SWIFT = "swift sft --model m --dataset d.jsonl"
FACTORY = "llamafactory-cli train --model_name_or_path m --dataset d --dataset_dir online --finetuning_type lora"
TRL = "trl sft --model_name_or_path m --dataset_name d --use_peft"
AXOLOTL = "base_model: m\ndatasets:\n  - {path: a.jsonl, type: alpaca}\n"
WITHOUT_QUANTISATION = {"quantization": None, "double_quantization": None}


def read(words: str, tmp_path: Path) -> tuple[ImportedRun, dict[str, Any]]:
    if words.startswith(("base_model", "from", "import")):
        path = tmp_path / ("run.yaml" if words.startswith("base_model") else "train.py")
        path.write_text(words)
        run = convert(parse_run(str(path)))
    else:
        run = convert(parse_run(words.split()))
    return run, {name: value for name, (value, _) in run.settings.items()}


SCRIPT = """from trl import SFTTrainer, SFTConfig
model = {model}
trainer = SFTTrainer(model=model, args=SFTConfig(), train_dataset=load_dataset("owner/rows", split="train"),
                     peft_config=LoraConfig(r=8))
"""
HALF_BYTES = SCRIPT.format(
    model='AutoModelForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=True, '
    'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16))'
)
UNSLOTH = SCRIPT.format(model='FastLanguageModel.from_pretrained(model_name="m", max_seq_length=512{more})')


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (f"{SWIFT} --quant_method bnb --quant_bits 4", {"quantization": "nf4", "double_quantization": None}),
        (f"{SWIFT} --quant_bits 8", {"quantization": "int8"}),
        (f"{SWIFT} --quant_bits 4 --bnb_4bit_use_double_quant false --bnb_4bit_compute_dtype bfloat16",
         {"quantization": "nf4", "double_quantization": False}),
        (SWIFT, WITHOUT_QUANTISATION),
        (f"{FACTORY} --quantization_bit 4 --quantization_method bnb", {"quantization": "nf4"}),
        (f"{FACTORY} --quantization_bit 8 --double_quantization true",
         {"quantization": "int8", "double_quantization": None}),
        (f"{TRL} --load_in_4bit", {"quantization": "nf4", "double_quantization": False}),
        (f"{TRL} --load_in_4bit --use_bnb_nested_quant --bnb_4bit_quant_type nf4",
         {"quantization": "nf4", "double_quantization": True}),
        (f"{TRL} --load_in_8bit", {"quantization": "int8"}),
        (TRL, WITHOUT_QUANTISATION),
        (f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\n", {"quantization": "nf4", "tuning": "lora"}),
        (f"{AXOLOTL}adapter: lora\nload_in_8bit: true\n", {"quantization": "int8"}),
        (f"{AXOLOTL}adapter: lora\nload_in_8bit: false\nload_in_4bit: false\n", WITHOUT_QUANTISATION),
        (HALF_BYTES, {"quantization": "nf4", "double_quantization": True}),
        (UNSLOTH.format(more=""), {"quantization": "nf4", "double_quantization": True}),
        (UNSLOTH.format(more="").replace("FastLanguageModel", "FastVisionModel"), {"quantization": "nf4"}),
        (UNSLOTH.format(more=", load_in_4bit=False"), WITHOUT_QUANTISATION),
        (UNSLOTH.format(more=", full_finetuning=True"), WITHOUT_QUANTISATION),
        (f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: {{bnb_4bit_use_double_quant: false}}\n",
         {"quantization": "nf4", "double_quantization": False}),
    ],
)  # fmt: skip
def test_bits_are_carried(words: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    run, values = read(words, tmp_path)
    assert {name: values.get(name) for name in wanted} == wanted
    assert run.unknown == []
    assert not any("quant" in name or "bit" in name for name in run.left_out), run.left_out


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (f"{SWIFT} --quant_bits 4 --quant_method hqq", "quant_method = hqq"),
        (f"{SWIFT} --quant_method fp8", "quant_method = fp8"),
        (f"{SWIFT} --quant_method hqq --quant_bits 2", "quant_method = hqq"),
        (f"{FACTORY} --quantization_bit 4 --quantization_type fp4", "quantization_type = fp4"),
        (HALF_BYTES.replace("nf4", "fp4"), "bnb_4bit_quant_type = fp4"),
        (f"{TRL} --load_in_4bit".replace(" --use_peft", ""), "load_in_4bit = nf4"),
    ],
)
def test_what_differs_is_listed(words: str, listed: str, tmp_path: Path) -> None:
    assert listed in read(words, tmp_path)[0].left_out


def test_bits_that_no_format_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quant_bits='3', but expected 4 or 8 bits"):
        read(f"{SWIFT} --quant_bits 3", tmp_path)
