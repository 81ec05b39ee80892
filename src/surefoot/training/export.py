"""Export of a run's adapter or model: find, export and merge it, or load it again for completion."""

import logging
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from surefoot.config import RunConfig, read_saved
from surefoot.data.render import answer_ends
from surefoot.distributed.artifact import CARD
from surefoot.errors import ConfigError, ModelError
from surefoot.events import Emit, Notice
from surefoot.models.adapter import base_name, read_adapter, tensors_beside, write_adapter
from surefoot.models.adapter_files import CONFIG, find_base, gives_scores, load_adapter_files
from surefoot.models.build import load_tokenizer, meta_model, trainable_parameters
from surefoot.models.dtensor_blocks import load_full
from surefoot.models.export import in_layers, merge_adapter, name_ends, untrained_names, write_model
from surefoot.models.lora import LoraSettings, lora_settings
from surefoot.models.pretrained import (
    drop_processor_templates,
    is_image_text_model,
    load_config,
    load_tokenizer_of,
)
from surefoot.models.quantization.released import find_quantization
from surefoot.models.resolve_model import folder_here, read_json_object, resolve_model
from surefoot.models.score_head import is_scorer
from surefoot.models.stored_layout import StoredLayout
from surefoot.models.weight_loading import check_weights_fill
from surefoot.system.atomic_io import new_folder, write_text
from surefoot.system.json_files import DamagedFile
from surefoot.training.checkpoint import checkpoint_folder, list_checkpoints, read_state, step_of, verify
from surefoot.training.model_card import make_card
from surefoot.training.run_dir import saved_config
from surefoot.training.run_summary import read_result
from surefoot.training.sharded_tensors import ShardedTensors

LOGGER = logging.getLogger(__name__)


def export(run: Path, target: Path, *, merge: bool, step: int | None, emit: Emit = lambda _: None) -> Path:
    """Write the adapter or model of a run folder (or of its checkpoint `step`), or merge an adapter into its base.

    `emit` receives a notice if a quantised base is written in another type.
    Raises: ModelError if there is nothing to export, or `target` exists.
    """
    if target.exists():
        raise ModelError(f"{target} exists already; it was not touched. Give a new folder.")
    if (run / CONFIG).is_file():
        if step is not None:
            raise ModelError(
                f"{run} is an adapter folder, which has no steps. Give the run folder to export step {step}."
            )
        return _merge_or_copy(run, target, merge, emit)
    config = read_run_config(run)
    settings = lora_settings(config)
    if settings is None and merge:
        raise ModelError(f"{run} was trained in full: there is no adapter to merge. Leave --merge out.")
    if settings is None:
        _note_quantization(folder_here(config.model), emit)
    finished = run / ("adapter" if settings else "model")
    if step is None and finished.is_dir():
        return _merge_or_copy(finished, target, merge, emit, run)
    checkpoint = _find_checkpoint(run, step)
    if not finished.is_dir():
        LOGGER.warning("%s is not complete: its checkpoint of %s is taken", run, _describe_step(checkpoint, config))
    base = resolve_model(config.model, f"{run}/run.yaml")
    tokenizer = load_tokenizer(base, config.chat_template)
    saved = ShardedTensors(checkpoint / "model")
    whole_model = meta_model(base, has_score=config.has_score)
    is_full = settings is None
    name_others = untrained_names if is_full else tensors_beside
    untrained = StoredLayout(base, has_score=config.has_score).read(name_others(whole_model, saved.shapes))
    all_shapes = {**{name: value.shape for name, value in untrained.items()}, **saved.shapes}
    shapes = {name: all_shapes[name] for name in (in_layers(all_shapes) if is_full else all_shapes)}
    values = ((name, saved.read(name) if name in saved.shapes else untrained[name]) for name in shapes)
    if settings is None:
        with new_folder(target) as folder:
            write_model(folder, base, shapes, values, has_score=config.has_score)
            if not config.has_score:
                name_ends(folder, answer_ends(tokenizer))
            tokenizer.save_pretrained(folder)
        return target
    adapter = target if not merge else target.with_name(f".{target.name}.adapter")
    with new_folder(adapter) as folder:
        write_adapter(folder, shapes, values, settings, base_name(config.model, base), whole_model)
        tokenizer.save_pretrained(folder)
    if not merge:
        return adapter
    try:
        return _merge_into_base(base, adapter, target, emit, run)
    finally:
        shutil.rmtree(adapter)


def _make_card(run: Path, base: Path) -> str | None:
    """Return the card of a run's model with the adapter merged in; None before the run has ended."""
    result = read_result(run)
    if result is None:
        return None
    config, has_images = read_run_config(run).model_dump(mode="json"), is_image_text_model(load_config(base))
    return make_card(config, result.as_dict(), has_images=has_images, is_merged=True)


def find_artifact(folder: Path) -> Path:
    """Return the adapter or model of a run folder, or the folder itself if it is one. Raises: ModelError."""
    artifacts = (folder / "adapter", folder / "model", folder)
    artifact = next(
        (path for path in artifacts if any((path / name).is_file() for name in (CONFIG, "config.json"))), None
    )
    if artifact is None:
        raise ModelError(f"{folder} has no adapter and no model. Give the folder of a completed run, or one of those.")
    return artifact


def _note_quantization(base: Path | None, emit: Emit) -> None:
    """Emit a notice if the weights of a base are quantised: what is exported is not."""
    quantization = find_quantization(base / "config.json") if base is not None else None
    if quantization is not None:
        emit(Notice(quantization.describe_export()))


def _merge_or_copy(finished: Path, target: Path, merge: bool, emit: Emit, run: Path | None = None) -> Path:
    """`run`: the folder of the run that wrote `finished`, for the card of a merged model."""
    if not merge:
        if (finished / CONFIG).is_file():
            load_adapter_files(finished)  # a damaged one is not passed on
        else:
            check_weights_fill(finished, has_score=is_scorer(read_json_object(finished / "config.json")))
        with new_folder(target) as folder:
            shutil.copytree(finished, folder, dirs_exist_ok=True, ignore=_list_special_files)
        return target
    base = resolve_model(find_base(finished), f"{finished}/{CONFIG}")
    return _merge_into_base(base, finished, target, emit, run)


def _list_special_files(folder: str, names: list[str]) -> list[str]:
    """Return the names that are neither a file nor a folder: reading a device or a pipe may never end."""
    return [name for name in names if not Path(folder, name).is_file() and not Path(folder, name).is_dir()]


def _merge_into_base(base: Path, adapter: Path, target: Path, emit: Emit, run: Path | None) -> Path:
    """Write the base with the adapter merged in, the chat template of its training, and a card if its run is given."""
    _note_quantization(base, emit)
    card = _make_card(run, base) if run is not None else None
    has_score = gives_scores(adapter)

    def finish(folder: Path) -> None:
        own, trained = load_tokenizer(base), load_tokenizer_of(adapter, base)
        is_elsewhere = drop_processor_templates(folder)
        if trained.chat_template != own.chat_template or is_elsewhere:
            trained.save_pretrained(folder)
        if not has_score:
            name_ends(folder, answer_ends(trained))
        if card is not None:
            write_text(folder / CARD, card)

    return merge_adapter(base, adapter, target, finish, has_score=has_score)


def read_run_config(run: Path) -> RunConfig:
    """Return the config of the run in a folder; if run.yaml is damaged, that of its newest checkpoint."""
    try:
        saved, _ = saved_config(run)
    except ValueError as error:
        raise ModelError(
            f"{run} is neither a run folder (with run.yaml) nor an adapter folder (with {CONFIG}): {error}"
        ) from error
    try:
        return read_saved(saved)
    except (ConfigError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{run}/run.yaml was written by hand or by another version, not by a run of this one ({reason}). Give the "
            "output_dir of a run, a model folder or an adapter folder."
        ) from error


def _find_checkpoint(run: Path, step: int | None) -> Path:
    saved = list_checkpoints(run)
    path = saved[-1] if step is None and saved else checkpoint_folder(run, step or 0)
    if step is None and not saved:
        raise ModelError(f"{run} has no checkpoint yet: wait for the first, or set save_steps.")
    if path not in saved:
        raise ModelError(
            f"{run} has no checkpoint of step {step}. It has: {', '.join(p.name for p in saved) or 'none'}."
        )
    try:
        verify(path)
    except DamagedFile as error:
        raise ModelError(f"{error}. Choose another checkpoint with --step.") from error
    return path


def _describe_step(checkpoint: Path, config: RunConfig) -> str:
    """Return the step of a checkpoint, and how long its run is."""
    step = step_of(checkpoint)
    if config.max_steps is not None:
        return f"step {step} of {config.max_steps}"
    return f"step {step}, epoch {read_state(checkpoint).epoch:.2f} of {config.epochs:g}"


def load_adapter(folder: Path, model: PreTrainedModel, settings: LoraSettings) -> None:
    """Load the values of a PEFT adapter into a model that was built with the same LoRA settings."""
    parameters = trainable_parameters(model)
    values = read_adapter(folder, {name: parameter.shape for name, parameter in parameters.items()}, settings, model)
    for name, value in values.items():
        load_full(parameters[name], value)
