"""Reading of TRL's Python scripts: the arguments of its trainers and configs, of LoraConfig and of load_dataset.

The script is parsed and never run. Values that it computes are unknown, and listed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError
from surefoot.migrate.parsed_run import ParsedRun

TRAINERS = {
    "SFTTrainer": "sft", "GRPOTrainer": "grpo", "DPOTrainer": "dpo", "KTOTrainer": "kto", "ORPOTrainer": "orpo",
    "RewardTrainer": "rm", "CPOTrainer": "cpo", "RLOOTrainer": "rloo",
}  # fmt: skip
"""Trainer of TRL -> its method."""
CONFIGS = ("SFTConfig", "GRPOConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "RewardConfig", "CPOConfig", "RLOOConfig")
OLD_DEFAULTS = {"learning_rate": 5e-5, "gradient_checkpointing": False}
"""Defaults of transformers' TrainingArguments that differ from those of TRL's configs."""
LORA_NAMES = {
    "r": "lora_r", "target_modules": "lora_target_modules", "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
}  # fmt: skip
"""Arguments of PEFT's LoraConfig -> TRL's settings with another name."""
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of PEFT's LoraConfig. Those of TRL's command line are others."""
FILE_LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""First arguments of `load_dataset` with which it reads `data_files`."""
ROW_METHODS = ("map", "filter", "select", "train_test_split", "rename_column", "rename_columns")
"""Methods that change the rows of a dataset."""
DEFAULT_TEST_SIZE = 0.25
"""Share that `train_test_split` of datasets holds out by itself."""
MODEL_NAMES = {"torch_dtype": "dtype", "revision": "model_revision"}
"""Arguments of `from_pretrained` -> TRL's settings with another name."""
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
    trainers = [call for call in calls if _name_of(call) in TRAINERS]
    if not trainers:
        return None
    script = _Script(path, tree)
    for call in trainers[1:]:
        script.run.other_commands.append(f"{_name_of(call)}(...), line {call.lineno}")
    script.read_trainer(trainers[0])
    for call in sorted(calls, key=lambda call: call.lineno):
        script.read_call(call)
    script.read_evaluation(trainers[0])
    return script.run


def _name_of(call: ast.Call) -> str:
    """Return the last part of the name of what is called: `from_pretrained` of AutoModel.from_pretrained."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


class _Script:
    """A script of which calls are read into a run."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self._file = path.name
        self.run = ParsedRun("TRL", {}, {}, base=path.resolve().parent)
        self._values: dict[str, ast.expr | None] = {}
        """Variable -> its value; None for one that is assigned several times."""
        self._datasets: set[str] = set()
        """Variables that hold what `load_dataset` returned."""
        self._evaluation: ast.Call | None = None
        """The call that makes the trainer's `eval_dataset`."""
        self._evaluation_split: Any = None
        """The part of it that is taken: "test" in `rows["test"]`."""
        self._kinds_read: set[str] = set()
        """Kinds of calls of which the first was read."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        is_first = target.id not in self._values
                        self._values[target.id] = node.value if is_first else None
                        self._datasets |= {target.id} if "load_dataset(" in ast.unparse(node.value) else set()

    def read_trainer(self, call: ast.Call) -> None:
        """Read the call of the trainer, which also says what the rest is for."""
        self.run.method = TRAINERS[_name_of(call)]
        for name, value in self._arguments(call):
            if name == "model" and isinstance(value, str):
                self._set("model_name_or_path", value, call)
            elif name == "eval_dataset":
                self._evaluation, self._evaluation_split = self._find_origin(value)
            elif name == "formatting_func":
                self.run.notes[f"formatting_func, line {call.lineno}"] = (
                    "rows are rendered by the model's chat template: write them in a format of docs/data.md"
                )
            elif name not in NOT_SETTINGS:
                self._set(name, value, call)

    def read_call(self, call: ast.Call) -> None:
        """Read another call of the script, if it is one that sets the run up."""
        name = _name_of(call)
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
            for key, value in self._arguments(call):
                if key in ("load_in_4bit", "load_in_8bit"):
                    self._set(key, value, call)
        elif name == "load_dataset":
            self._read_dataset(call)
        elif call is self._evaluation:
            pass  # see read_evaluation
        elif name in ROW_METHODS and isinstance(call.func, ast.Attribute) and self._is_dataset(call.func.value):
            self.run.notes[f"{ast.unparse(call)[:80]} (line {call.lineno})"] = (
                "rows are read as the file has them: write them as this makes them"
            )

    def read_evaluation(self, trainer: ast.Call) -> None:
        """Read the trainer's `eval_dataset`: another split, other files, or a share of the rows."""
        call, split = self._evaluation, self._evaluation_split
        if call is not None and _name_of(call) == "train_test_split":
            sizes = dict(self._arguments(call))
            rest = 1 - sizes["train_size"] if isinstance(sizes.get("train_size"), float) else DEFAULT_TEST_SIZE
            self._set("eval_fraction", sizes.get("test_size", round(rest, 6)), call)
        elif call is not None:
            source, split = self._find_rows(call, split)
            if source == self.run.settings.get("dataset_name"):
                self._set("dataset_test_split", split, call)
            else:
                self._set("eval_dataset", {"path": source, "split": split} if split else source, call)
        elif any(keyword.arg == "eval_dataset" and not _is_none(keyword.value) for keyword in trainer.keywords):
            self.run.notes[f"eval_dataset, line {trainer.lineno}"] = (
                "the script computes it: set eval_dataset to its file, or eval_fraction to the share that is held out"
            )
        self.run.add_settings({"dataset_test_split": None}, self._place(trainer))  # the script names no split

    def _find_origin(self, node: Any) -> tuple[ast.Call | None, Any]:
        """Return the call that makes the rows of an expression, and the part that is taken of what it returns.

        Methods of a dataset, such as `map`, are looked through. None if another call makes them.
        """
        part, followed = None, set()
        while isinstance(node, ast.Name | ast.Subscript | ast.Call):
            if isinstance(node, ast.Call):
                if _name_of(node) in ("load_dataset", "train_test_split"):
                    return node, part
                node = node.func.value if isinstance(node.func, ast.Attribute) else None
            elif isinstance(node, ast.Subscript):
                part, node = self._value(node.slice), node.value
            elif node.id in followed:
                break
            else:
                followed.add(node.id)
                node = self._values.get(node.id)
        return None, None

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
        source = self._value(call.args[0]) if call.args else arguments.get("model_name")
        if source is not None and "model_name_or_path" not in self.run.settings:
            self._set("model_name_or_path", source, call)
        if arguments.get("load_in_4bit") is True:
            self._set("load_in_4bit", True, call)
        if "max_seq_length" in arguments:
            self._set("max_seq_length", arguments["max_seq_length"], call)

    def _read_dataset(self, call: ast.Call) -> None:
        """Read the first call of `load_dataset`."""
        if ("dataset" in self._kinds_read and call is self._evaluation) or not self._is_first("dataset", call):
            return
        source, split = self._find_rows(call)
        if source is not None:
            self._set("dataset_name", source, call)
        subset = self._value(call.args[1]) if len(call.args) > 1 else dict(self._arguments(call)).get("name")
        if subset is not None:
            self._set("dataset_config", subset, call)
        if split is not None:
            self._set("dataset_train_split", split, call)

    def _find_rows(self, call: ast.Call, part: Any = None) -> tuple[Any, Any]:
        """Return the files or the id that a call of `load_dataset` reads, and the split that is to be named, or None.

        `part`: the part that is taken of what it returns.
        """
        arguments = dict(self._arguments(call))
        name = self._value(call.args[0]) if call.args else arguments.get("path")
        files, split = arguments.get("data_files"), part or arguments.get("split")
        if name not in FILE_LOADERS:
            return name, split
        if isinstance(files, dict):
            files = files.get(str(split or "train").partition("[")[0])
        return files, split if "[" in str(split) else None

    def _is_dataset(self, node: ast.expr) -> bool:
        """Return whether an expression is, or is made of, what `load_dataset` returned."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return "load_dataset" in names or not names.isdisjoint(self._datasets)

    def _arguments(self, call: ast.Call) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each named argument of a call; see `_value`."""
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, self._value(keyword.value)
            else:
                self.run.notes[f"**{ast.unparse(keyword.value)[:80]}"] = COMPUTED

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a literal or of a variable that is one; the node of anything that is computed."""
        if isinstance(node, ast.Name) and self._values.get(node.id) is not None:
            node = self._values[node.id] or node
        try:
            return ast.literal_eval(node)
        except (TypeError, ValueError):
            return node

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
