"""The model card of a trained adapter or model: README.md beside it, from the settings and the end of its run."""

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from surefoot.config.methods import settings_class
from surefoot.config.schema import HUB_ID
from surefoot.version import __version__

SHOWN = (
    "max_length", "packing", "global_batch_size", "learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay",
    "seed", "dtype",
)  # fmt: skip
"""Settings that a card lists."""
SHOWN_WITH_LORA = ("lora_rank", "lora_alpha", "target_modules")


def make_card(
    config: Mapping[str, Any], summary: Mapping[str, Any], *, has_images: bool, is_merged: bool = False
) -> str:
    """Return the card of what a run wrote, or of its adapter merged into the base. Files are named without folders.

    `config`, `summary`: run.yaml and summary.json. `has_images`: whether the model reads images.
    """
    has_adapter = config["tuning"] == "lora"
    is_adapter = has_adapter and not is_merged
    base = _name(config["model"])
    model_class, task = ("AutoModelForImageTextToText", "image-text-to-text") if has_images else (
        "AutoModelForCausalLM", "text-generation",
    )  # fmt: skip
    if settings_class(config["method"]).has_score:
        model_class, task = "AutoModelForSequenceClassification", "text-classification"
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": task,
        "tags": ["surefoot", config["method"], *(["lora"] if has_adapter else [])],
    }
    if HUB_ID.match(config["model"]):
        header["base_model"] = config["model"]
    datasets = [item["path"] for item in config["dataset"] if HUB_ID.match(item["path"])]
    if datasets:
        header["datasets"] = datasets
    tuned = f"{base} with a LoRA adapter merged in" if has_adapter else f"{base}, fine-tuned in full"
    what = f"A LoRA adapter for {base}" if is_adapter else tuned
    return "\n".join(
        [
            "---", yaml.safe_dump(header, sort_keys=False).strip(), "---", "",
            f"# {config.get('run_name') or Path(config['output_dir']).name}", "",
            f"{what}, trained by Surefoot with `method: {config['method']}`.", "",
            "## Load it", "",
            "```python", *_loading(config["model"], model_class, is_adapter=is_adapter), "```", "",
            "## Training", "", "| | |", "|---|---|",
            *(f"| {name} | {value} |" for name, value in _facts(config, summary, has_adapter=has_adapter)), "",
        ]
    )  # fmt: skip


def _name(model: str) -> str:
    """Return the name of a model: a hub id, or the last part of a path."""
    return model if HUB_ID.match(model) else Path(model).name


def _loading(model: str, model_class: str, *, is_adapter: bool) -> Iterator[str]:
    """Yield the lines of code that load an adapter of `model`, or a model. Folders of this machine are not written."""
    if is_adapter:
        yield "from peft import PeftModel"
    yield f"from transformers import {model_class}, AutoTokenizer"
    yield ""
    if is_adapter:
        base = model if HUB_ID.match(model) else "FOLDER_OF_THE_BASE_MODEL"
        labels = ", num_labels=1" if "Classification" in model_class else ""
        yield f'base = {model_class}.from_pretrained("{base}"{labels})'
        yield 'model = PeftModel.from_pretrained(base, "THIS_FOLDER")'
    else:
        yield f'model = {model_class}.from_pretrained("THIS_FOLDER")'
    yield 'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")'


def _facts(config: Mapping[str, Any], summary: Mapping[str, Any], *, has_adapter: bool) -> Iterator[tuple[str, Any]]:
    """Yield the rows of the table."""
    yield "base model", _name(config["model"])
    yield "data", ", ".join(_name(item["path"]) for item in config["dataset"])
    yield "rows of the data", summary["examples"].get("trained", 0)
    yield "steps", summary["steps"]
    if summary["train_loss"] is not None:
        yield "mean training loss", f"{summary['train_loss']:.4f}"
    for name, value in summary["evaluation"].items():
        if name != "step":
            yield name, f"{value:,}" if float(value).is_integer() else f"{value:.4f}"
    for name in (*(SHOWN_WITH_LORA if has_adapter else ()), *SHOWN):
        value = config[name]
        yield name, ", ".join(value) if isinstance(value, list) else value
    yield "surefoot", __version__
    for package in ("torch", "transformers"):
        yield package, version(package)
