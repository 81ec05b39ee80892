"""Export of plain HF folders: a base model with an adapter merged in, or weights that were trained in full.

Merging holds one tensor in memory at a time, writing fully trained weights one decoder layer. The merged files have
the base's names, shapes, types and layout: each base file's header is copied and its tensors follow, merged where the
adapter has an update. A quantised base is written in bfloat16. transformers' own conversion mapping assigns base
tensors to parameters, so hub names per expert and fused names both work.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from itertools import groupby, islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from surefoot.errors import ModelError
from surefoot.models.adapter import read_contents
from surefoot.models.build import load_config, meta_model
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.quantization.released import find_quantization
from surefoot.models.resolve_model import read_json_object, weight_files
from surefoot.models.safetensors_writer import INDEX, write_files
from surefoot.models.vision import vision_names
from surefoot.system.atomic_io import new_folder, write_json
from surefoot.system.safetensors_header import read_header

LAYER = re.compile(r"^.*\.layers\.\d+(?=\.)")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of models that read images, besides those that their tokenizer saves."""
EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def write_model(
    folder: Path,
    base: Path,
    shapes: Mapping[str, torch.Size],
    values: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights that were trained in full into an existing empty folder, as a plain HF folder.

    `shapes`: shapes of all stored tensors, by the model's names, in the order of `in_layers`. `values` come in that
    order. They are stored in `dtype`, or else the type of `base` (float32 for what the model keeps in float32), under
    the names that transformers saves.
    """
    model = meta_model(base)
    dtype = dtype or model.config.dtype or torch.float32
    model.config.dtype = dtype
    buffers: dict[str, Tensor] = dict(model.named_buffers())
    in_float32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    layers = [list(names) for _, names in groupby(shapes, _get_layer)]

    def get_type(name: str) -> torch.dtype:
        if name in buffers:
            return buffers[name].dtype
        return torch.float32 if any(module in name for module in in_float32) else dtype

    def convert_to_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        typed = {name: value.to(get_type(name)) for name, value in tensors.items()}
        stored: dict[str, Tensor] = revert_weight_conversion(model, typed)
        return stored

    specs = [convert_to_stored({name: torch.empty(shapes[name], device="meta") for name in names}) for names in layers]
    remaining_values = iter(values)

    def read_layer(number: int) -> dict[str, Tensor]:
        layer = dict(islice(remaining_values, len(layers[number])))
        assert list(layer) == layers[number]
        return convert_to_stored(layer)

    write_files(folder, specs, read_layer)
    # transformers does not tie weights that the base holds twice with different values, whatever its config sets.
    model.config.tie_word_embeddings &= shapes.keys() <= {*dict(model.named_parameters()), *buffers}
    _write_config(folder, base, model)


def _write_config(folder: Path, base: Path, model: PreTrainedModel) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    for name in PROCESSOR_FILES:
        if (base / name).is_file():
            shutil.copy2(base / name, folder)
    if (base / "generation_config.json").is_file():
        shutil.copy2(base / "generation_config.json", folder)
    elif model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def name_ends(folder: Path, ends: Collection[int]) -> None:
    """Add tokens to the end tokens that generation_config.json of a written model names."""
    path = folder / "generation_config.json"
    about = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    named = about.get("eos_token_id")
    if named is None:
        named = load_config(folder).get_text_config().eos_token_id
    named = list(named) if isinstance(named, list) else [named] if named is not None else []
    missing = sorted(set(ends) - set(named))
    if missing:
        write_json(path, {**about, "eos_token_id": [*named, *missing]})


def in_layers(names: Iterable[str]) -> list[str]:
    """Return names of parameters and buffers, those of a layer beside each other."""
    return sorted(names, key=lambda name: dot_natural_key(_get_layer(name)))


def stored_buffers(model: PreTrainedModel) -> list[str]:
    """Return the names of the buffers that belong in a checkpoint."""
    return sorted({name for name, _ in model.named_buffers()} & model.state_dict().keys())


def read_untrained(base: Path, trained: Container[str]) -> dict[str, Tensor]:
    """Read the tensors of a base model that full fine-tuning leaves unchanged: buffers, a frozen vision tower."""
    model = meta_model(base)
    untrained_names = {*stored_buffers(model), *(name for name in vision_names(model) if name not in trained)}
    if not untrained_names:
        return {}
    get_place, stored = _build_place_lookup(base), CheckpointWeights(base)
    places = {name: get_place(name)[0] for name in stored.weights}
    return {place: stored.read(name) for name, place in places.items() if place in untrained_names}


def _get_layer(name: str) -> str:
    """Return the decoder layer that a parameter belongs to; empty for parameters outside all layers."""
    match = LAYER.match(name)
    return match[0] if match else ""


def merge_adapter(base: Path, adapter: Path, target: Path, finish: Callable[[Path], None] = lambda _: None) -> Path:
    """Write `base` with `adapter` merged in to the new folder `target`; `finish` adds to it before it appears.

    Raises: ModelError if a part of the adapter has no place in the base, so that no fine-tuning is lost silently.
    """
    if target.exists():
        raise ModelError(f"{target} exists already; it was not touched. Give a new folder.")
    files = weight_files(base)
    if not files:
        raise ModelError(f"{base} has no *.safetensors weights to merge into.")
    merger = _Merger(adapter, _build_place_lookup(base))
    is_quantised = find_quantization(base / "config.json") is not None
    with new_folder(target) as temporary:
        if is_quantised:
            _merge_quantised(base, temporary, merger)
        for path in files if not is_quantised else ():
            try:
                _merge_file(path, temporary / path.name, merger)
            except (SafetensorError, ValueError) as error:  # an invalid header is invalid JSON
                raise ModelError(f"{path}: is no whole safetensors file: {error}. Fetch the model again.") from error
        merger.check_complete(base)
        written = {path.name for path in temporary.iterdir()} | ({INDEX} if is_quantised else set())
        for path in sorted(base.iterdir()):
            if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf") and path.name not in written:
                shutil.copy2(path, temporary / path.name)
        finish(temporary)
    return target


class _Merger:
    """Adder of an adapter to the weights it belongs to, piece by piece; it tracks which parts are not merged yet."""

    def __init__(self, adapter: Path, find_place: "Place") -> None:
        self._folder, self._find_place = adapter, find_place
        self._content = read_contents(adapter)
        self._left = {name: pair.numel for name, pair in self._content.low_rank.items()}
        """Number of elements of each adapted weight that are not merged yet."""
        self._left |= {name: value.numel() for name, value in self._content.whole.items()}

    def merge(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor of the base, by its stored name, plus its part of the adapter."""
        parameter, expert, piece = self._find_place(name)
        rows = slice(None) if expert is None else slice(piece * value.shape[0], (piece + 1) * value.shape[0])
        full_weight = self._content.whole.get(parameter)
        pair = self._content.low_rank.get(parameter)
        if full_weight is None and pair is None:
            return value
        if full_weight is not None:
            update = full_weight
        else:
            assert pair is not None
            a, b = (pair.a, pair.b) if expert is None else (pair.a[expert], pair.b[expert])
            update = self._content.settings.scaling * (b[..., rows, :].float() @ a.float())
        if update.shape != value.shape:
            raise ModelError(
                f"{self._folder}: its part for {parameter} has shape {tuple(update.shape)}, the base's weight "
                f"{tuple(value.shape)}. Nothing was written. Is it the base this adapter was trained on?"
            )
        self._left[parameter] -= value.numel()
        merged: Tensor = update if full_weight is not None else value.float() + update
        return merged.to(value.dtype)

    def check_complete(self, base: Path) -> None:
        """Raise ModelError if any part of the adapter was not merged."""
        lost = sorted(name for name, count in self._left.items() if count)
        if lost:
            raise ModelError(
                f"{self._folder}: {len(lost)} parts of the adapter found no weight in {base}, the first is {lost[0]}. "
                "Nothing was written. Is it the base this adapter was trained on?"
            )


Place = Callable[[str], tuple[str, int | None, int]]


def _build_place_lookup(base: Path) -> Place:
    """Return a function from a stored name to (parameter of the model, expert, index of the piece of its rows)."""
    model = meta_model(base)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()

    def find_place(stored: str) -> tuple[str, int | None, int]:
        parameter, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            return parameter, None, 0
        converter = next(c for c in converters if pattern in c.source_patterns)
        number = EXPERT_NUMBER.search(stored)
        if number is None or not all(isinstance(step, MergeModulelist | Concatenate) for step in converter.operations):
            raise ModelError(f"{base}: {stored} is stored in a layout that cannot be merged yet ({pattern}).")
        return parameter, int(number[1]), converter.source_patterns.index(pattern)

    return find_place


def _merge_quantised(base: Path, folder: Path, merger: _Merger) -> None:
    """Write the weights of a quantised base, read back to bfloat16 and merged, and its config.json without it."""
    stored = CheckpointWeights(base)
    names = sorted(stored.weights, key=dot_natural_key)
    specs = [
        {name: torch.empty(stored.weights[name].shape, dtype=stored.get_dtype(name), device="meta")} for name in names
    ]
    write_files(folder, specs, lambda number: {names[number]: merger.merge(names[number], stored.read(names[number]))})
    config = read_json_object(base / "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part |= dict.fromkeys({"dtype", "torch_dtype"} & part.keys(), "bfloat16")
    write_json(folder / "config.json", config if "torch_dtype" in config else {**config, "dtype": "bfloat16"})


def _merge_file(source: Path, target: Path, merger: _Merger) -> None:
    """Copy one safetensors file, merging tensor by tensor. The header (names, types, offsets) is unchanged."""
    header = read_header(source)
    with open(source, "rb") as file:
        header_as_stored = file.read(header.num_bytes)
    with open(target, "wb") as out, safe_open(source, framework="pt") as tensors:
        out.write(header_as_stored)
        for name in sorted(header.tensors, key=lambda n: header.tensors[n].begin):
            value: Tensor = tensors.get_tensor(name)
            merged = merger.merge(name, value)
            out.write(merged.reshape(-1).contiguous().view(torch.uint8).numpy().data)
