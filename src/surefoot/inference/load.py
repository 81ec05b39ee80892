"""Loading of a trained model for generation: a run folder, an adapter, or a model, with an adapter or without."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.data.render import answer_ends
from surefoot.errors import ModelError
from surefoot.models.adapter_files import CONFIG, find_base, gives_scores
from surefoot.models.attention import own_implementation
from surefoot.models.frozen_model import load_frozen
from surefoot.models.generate import end_tokens
from surefoot.models.pretrained import load_tokenizer_of
from surefoot.models.resolve_model import local_path, read_json_object, resolve_model
from surefoot.models.score_head import is_scorer
from surefoot.models.vision import attention_of
from surefoot.training.export import export, read_run_config


@dataclass(frozen=True)
class ModelFiles:
    """The files of a trained model."""

    base: Path
    """Folder of a whole model."""
    adapter: Path | None
    """Folder of an adapter of it, in PEFT's format."""
    name: str
    """Name to call the model by: that of the run, or of the folder."""
    run: Path | None = None
    """Folder of the run that trained it, if that was given."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template with which the run's rows were rendered."""


def find_model(source: str, adapter: str | Path | None = None) -> ModelFiles:
    """Return the files of a run folder, of an adapter, which names its base, or of a model; with `adapter` of a model.

    `adapter`: a folder of its own, or that of a run. Raises: ModelError if there is no such model, or the run is
    unfinished.
    """
    folder, adapter = local_path(source), Path(adapter) if adapter is not None else None
    if (folder / "run.yaml").is_file():
        if adapter is not None:
            raise ModelError(
                f"{folder} is a run folder with an adapter of its own; give its base model with --adapter."
            )
        artifact = _find_artifact(folder)
        if not artifact.is_dir():
            raise ModelError(
                f"{folder} is unfinished. `surefoot chat` talks to its newest checkpoint, and `surefoot export "
                f"{folder} FOLDER` writes what that holds, with --merge as a whole model."
            )
        return _files_of_run(folder, artifact)
    if adapter is not None and (adapter / "run.yaml").is_file() and (adapter / "adapter").is_dir():
        adapter = adapter / "adapter"
    name = (adapter or folder).resolve().name
    if adapter is None and (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        adapter, source = folder, find_base(folder)
    return ModelFiles(resolve_model(source, source), adapter, name)


@contextmanager
def open_model(source: str, adapter: str | Path | None = None) -> Iterator[ModelFiles]:
    """Yield the files of a model as `find_model` does, also of an unfinished run: of its newest checkpoint.

    The adapter or model of a checkpoint is written into a temporary folder, which is removed at the end.
    """
    folder = local_path(source)
    if adapter is not None or not (folder / "run.yaml").is_file() or _find_artifact(folder).is_dir():
        yield find_model(source, adapter)
        return
    with TemporaryDirectory(prefix="surefoot-") as scratch:
        artifact = export(folder, Path(scratch) / "model", merge=False, step=None)
        yield _files_of_run(folder, artifact)


def _find_artifact(run: Path) -> Path:
    """Return the folder of the adapter or model that a run writes at its end."""
    return run / ("model" if read_run_config(run).tuning == "full" else "adapter")


def _files_of_run(folder: Path, artifact: Path) -> ModelFiles:
    config = read_run_config(folder)
    is_full = config.tuning == "full"
    source = str(artifact) if is_full else config.model
    return ModelFiles(
        base=resolve_model(source, source),
        adapter=None if is_full else artifact,
        name=config.run_name or folder.resolve().name,
        run=folder,
        template_variables=config.template_variables,
    )


class _NoWriter(ModelError):
    """The model gives scores, and writes nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} is a reward model: it gives answers a number and writes none. A run with `method: grpo` can "
            f"learn from it: reward_funcs: [model:{folder}]."
        )


def load(files: ModelFiles) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer for generation: on the GPU in bfloat16 if there is one, else in float32.

    Raises: ModelError for files that do not belong together, and for a reward model.
    """
    if files.adapter is not None and gives_scores(files.adapter):
        raise _NoWriter(files.run or files.adapter)
    if is_scorer(read_json_object(files.base / "config.json")):
        raise _NoWriter(files.run or files.base)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_frozen(files.base, files.adapter, device=device, dtype=dtype, for_packed_rows=False)
    # Attention over packed samples needs the samples of a row, which callers do not have.
    model.set_attn_implementation(attention_of(model.config, own_implementation(type(model), model.config)))
    tokenizer = load_tokenizer_of(files.adapter, files.base)
    # As trained: a base model's generation_config.json need not name the token with which the template ends answers.
    model.generation_config.eos_token_id = sorted(end_tokens(model, tokenizer) | answer_ends(tokenizer))
    return model, tokenizer
