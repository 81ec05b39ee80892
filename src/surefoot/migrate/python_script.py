"""Reading of TRL's Python scripts: the arguments of its trainers and configs, of LoraConfig and of load_dataset.

The script is parsed and never run. Values that it computes are unknown, and listed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError
from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.script_rows import Origin, Source, Variables, name_of

TRAINERS = {
    "SFTTrainer": "sft", "GRPOTrainer": "grpo", "DPOTrainer": "dpo", "KTOTrainer": "kto", "ORPOTrainer": "orpo",
    "RewardTrainer": "reward", "CPOTrainer": "cpo", "RLOOTrainer": "rloo", "GKDTrainer": "gkd",
    "DistillationTrainer": "distillation",
}  # fmt: skip
"""Trainer of TRL -> its method."""
CONFIGS = tuple(trainer.replace("Trainer", "Config") for trainer in TRAINERS)
OLD_DEFAULTS = {"learning_rate": 5e-5, "gradient_checkpointing": False}
"""Defaults of transformers' TrainingArguments that differ from those of TRL's configs."""
LORA_NAMES = {
    "r": "lora_r", "target_modules": "lora_target_modules", "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
}  # fmt: skip
"""Arguments of PEFT's LoraConfig -> TRL's settings with another name."""
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of PEFT's LoraConfig. Those of TRL's command line are others."""
ROW_METHODS = ("map", "filter", "select", "rename_column", "rename_columns")
"""Methods that change the rows of a dataset."""
MODEL_NAMES = {"torch_dtype": "dtype", "revision": "model_revision"}
"""Arguments of `from_pretrained` -> TRL's settings with another name."""
OF_QUANTISATION = {"load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"}
UNSLOTH_MODEL = re.compile(r"\bFast\w*Model\b")
"""Names of Unsloth's classes of models."""
UNSLOTH_DEFAULTS = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
"""Defaults of Unsloth's `from_pretrained`."""
COMPUTED = "the script computes it: set it yourself"
NOT_MODELS = ("Tokenizer", "Processor", "Config", "PeftModel")
"""Parts of the names of classes whose `from_pretrained` makes no base model."""
NOT_SETTINGS = frozenset(
    "model args train_dataset eval_dataset peft_config processing_class tokenizer callbacks data_collator "
    "formatting_func optimizers compute_metrics task_type".split()
)
"""Arguments that are objects, or belong to another call that is read."""


def read_python_script(path: Path, text: str) -> ParsedRun | None:
    """Return the run of a script that makes a trainer of TRL; None for any other script. Raises: ConfigError."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a Python script: {error}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if name_of(call) in TRAINERS]
    if not trainers:
        return None
    script = _Script(path, tree)
    for call in trainers[1:]:
        script.run.other_commands.append(f"{name_of(call)}(...), line {call.lineno}")
    script.read_trainer(trainers[0])
    for call in sorted(calls, key=lambda call: call.lineno):
        script.read_call(call)
    script.read_rows(trainers[0])
    return script.run


class _Script:
    """A script of which calls are read into a run."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self._file = path.name
        self.run = ParsedRun("TRL", {}, {}, base=path.resolve().parent)
        self._variables = Variables(tree)
        self._loads: list[ast.Call] = []
        """Calls of `load_dataset`."""
        self._kinds_read: set[str] = set()
        """Kinds of calls of which the first was read."""

    def read_trainer(self, call: ast.Call) -> None:
        """Read the call of the trainer, which also says what the rest is for."""
        self.run.method = TRAINERS[name_of(call)]
        for name, value in self._arguments(call):
            if name == "model" and isinstance(value, str):
                self._set("model_name_or_path", value, call)
            elif name == "formatting_func":
                self.run.notes[f"formatting_func, line {call.lineno}"] = (
                    "rows are rendered by the model's chat template: write them in a format of docs/data.md"
                )
            elif name not in NOT_SETTINGS:
                self._set(name, value, call)
        for note in [note for note in self.run.notes if note.startswith("ref_model =")]:
            self.run.notes[note] = "the reference is the model without its adapter: check that this is no other model"

    def read_call(self, call: ast.Call) -> None:
        """Read another call of the script, if it is one that sets the run up."""
        name = name_of(call)
        if name in (*CONFIGS, "TrainingArguments"):
            if not self._is_first("config", call):
                return
            for key, value in self._arguments(call):
                self._set(key, value, call)
            if name == "TrainingArguments":
                self.run.add_settings(OLD_DEFAULTS, "TrainingArguments")
        elif name in ("LoraConfig", "get_peft_model") and call.keywords:
            self._read_lora(call)
        elif name == "from_pretrained":
            self._read_model(call)
        elif name == "BitsAndBytesConfig":
            arguments = {"bnb_4bit_quant_type": "fp4"} | dict(self._arguments(call))
            for key in sorted(arguments.keys() & OF_QUANTISATION):
                self._set(key, arguments[key], call)
        elif name == "load_dataset":
            self._loads.append(call)
        elif name in ROW_METHODS and self._variables.find_origin(call) is not None:
            self.run.notes[f"{ast.unparse(call)[:80]} (line {call.lineno})"] = (
                "rows are read as the file has them: write them as this makes them"
            )

    def read_rows(self, trainer: ast.Call) -> None:
        """Read what the trainer trains and evaluates on: files, splits of the hub, or a share that is held out."""
        arguments = {word.arg: word.value for word in trainer.keywords}
        training, evaluation = (
            self._variables.find_origin(arguments.get(name)) for name in ("train_dataset", "eval_dataset")
        )
        if training is None:  # made by a function of the script
            others = [call for call in self._loads if evaluation is None or call is not evaluation.call]
            training = Origin(others[0], None) if others else None
        base = self._find_base(training)
        trained = self._variables.find_source(base)
        if base is not None and trained is not None:
            values = {"name": trained.path, "config": trained.subset, "train_split": trained.split}
            for name, value in values.items():
                if value is not None:
                    self._set(f"dataset_{name}", value, base.call)
        else:
            self.run.notes["train_dataset"] = COMPUTED
        is_none = self._variables.find_literal(arguments.get("eval_dataset", ast.Constant(None))) is None
        if not is_none and not self._read_evaluation(training, evaluation, trained):
            self.run.notes[f"eval_dataset, line {trainer.lineno}"] = (
                "the script computes it: set eval_dataset to its file, or eval_fraction to the share that is held out"
            )
        self.run.add_settings({"dataset_test_split": None}, self._place(trainer))  # the script names no split
        if training is not None and training is not base and "eval_fraction" not in self.run.settings:
            self.run.notes[ast.unparse(training.call)[:80]] = "all rows are trained: set eval_fraction to hold some out"
        used = [origin.call for origin in (base, self._find_base(evaluation)) if origin is not None]
        for call in self._loads:
            if call not in used:
                self.run.notes[f"{ast.unparse(call)[:80]} (line {call.lineno})"] = "the trainer does not get these rows"

    def _read_evaluation(self, training: Origin | None, evaluation: Origin | None, trained: Source | None) -> bool:
        """Read the evaluation data of a trainer, and return whether they are known.

        Rows of the source that is trained are not: the script selects some of them.
        """
        if evaluation is None:
            return False
        if name_of(evaluation.call) == "train_test_split":
            share = self._variables.find_held_out_share(evaluation.call)
            if share is None or training is None or training.call is not evaluation.call:
                return False
            self._set("eval_fraction", share, evaluation.call)
            return True
        source = self._variables.find_source(evaluation)
        if source is None or source == trained:
            return False
        if trained is not None and (source.path, source.subset) == (trained.path, trained.subset):
            self._set("dataset_test_split", source.split, evaluation.call)
        elif source.subset or source.split:
            parts = {"path": source.path, "subset": source.subset, "split": source.split}
            self._set("eval_dataset", {name: part for name, part in parts.items() if part}, evaluation.call)
        else:
            self._set("eval_dataset", source.path, evaluation.call)
        return True

    def _find_base(self, origin: Origin | None) -> Origin | None:
        """Return the call of `load_dataset` whose rows `train_test_split` divides; any other origin as it is."""
        if origin is None or name_of(origin.call) != "train_test_split":
            return origin
        function = origin.call.func
        return self._variables.find_origin(function.value) if isinstance(function, ast.Attribute) else None

    def _is_first(self, kind: str, call: ast.Call) -> bool:
        """Return whether a call is the first of its kind; note others."""
        if kind in self._kinds_read:
            self.run.notes[f"{ast.unparse(call)[:80]} (line {call.lineno})"] = f"only the first {kind} is read"
            return False
        self._kinds_read.add(kind)
        return True

    def _read_lora(self, call: ast.Call) -> None:
        self._set("use_peft", True, call)
        for key, value in self._arguments(call):
            if key not in NOT_SETTINGS and not (key == "bias" and value == "none"):
                self._set(f"lora_{key}" if key == "bias" else LORA_NAMES.get(key, key), value, call)
        self.run.add_settings(LORA_DEFAULTS, "LoraConfig")

    def _read_model(self, call: ast.Call) -> None:
        """Read `from_pretrained` of a model: its first argument, or Unsloth's `model_name`."""
        if any(other in ast.unparse(call.func) for other in NOT_MODELS):
            return
        arguments = dict(self._arguments(call))
        source = self._variables.find_literal(call.args[0]) if call.args else arguments.get("model_name")
        if source is not None and "model_name_or_path" not in self.run.settings:
            self._set("model_name_or_path", source, call)
        if UNSLOTH_MODEL.search(ast.unparse(call.func)) and arguments.get("full_finetuning") is not True:
            arguments = UNSLOTH_DEFAULTS | arguments
        for key in sorted(arguments.keys() & OF_QUANTISATION):
            self._set(key, arguments[key], call)
        if "max_seq_length" in arguments:
            self._set("max_seq_length", arguments["max_seq_length"], call)

    def _arguments(self, call: ast.Call) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each named argument of a call; see `find_literal`."""
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, self._variables.find_literal(keyword.value)
            else:
                self.run.notes[f"**{ast.unparse(keyword.value)[:80]}"] = COMPUTED

    def _set(self, name: str, value: Any, call: ast.Call) -> None:
        """Record a setting, or that the script computes it."""
        if name == "model_init_kwargs" and isinstance(value, dict):
            for key, option in value.items():
                self._set(MODEL_NAMES.get(key, str(key)), option, call)
        elif not isinstance(value, ast.AST):
            self.run.add_settings({name: value}, self._place(call))
        elif name == "reward_funcs":  # functions, by their names
            rewards = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            self.run.add_settings({name: list(map(ast.unparse, rewards))}, self._place(call))
        elif name not in NOT_SETTINGS:
            self.run.notes[f"{name} = {ast.unparse(value)[:80]}"] = COMPUTED

    def _place(self, call: ast.Call) -> str:
        return f"{self._file}:{call.lineno}"
