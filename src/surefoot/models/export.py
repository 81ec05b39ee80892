"""Export of plain HF folders: a base model with an adapter merged in, or weights that were trained in full.

Merging holds one tensor in memory at a time, writing fully trained weights one decoder layer. The merged files have
the base's names, shapes, types and layout (`stored_layout`): each base file's header is copied and its tensors follow,
merged where the adapter has an update. A quantised base is written in bfloat16.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from itertools import groupby, islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from surefoot.errors import ModelError
from surefoot.models import score_head
from surefoot.models.adapter_contents import read_contents, refuse_shared
from surefoot.models.build import load_config, meta_model
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.pretrained import drop_processor_templates
from surefoot.models.quantization.released import find_quantization
from surefoot.models.resolve_model import read_json_object, weight_files
from surefoot.models.safetensors_writer import INDEX, write_files
from surefoot.models.stored_layout import Place, StoredLayout
from surefoot.models.vision import vision_names
from surefoot.models.weight_loading import output_layer_names
from surefoot.system.atomic_io import new_folder, write_json, write_text
from surefoot.system.safetensors_header import read_header

LAYER = re.compile(r"^.*\.layers\.\d+(?=\.)")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of models that read images, besides those that their tokenizer saves. The chat template is the tokenizer's, in
chat_template.jinja, which processors read, too."""


def write_model(
    folder: Path,
    base: Path,
    shapes: Mapping[str, torch.Size],
    values: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
    *,
    has_score: bool = False,
) -> None:
    """Write weights that were trained in full into an existing empty folder, as a plain HF folder.

    `shapes`: shapes of all stored tensors, by the model's names, in the order of `in_layers`. `values` come in that
    order. They are stored in `dtype`, or else the type of `base` (float32 for what the model keeps in float32), under
    the names that transformers saves. `has_score`: whether they are of the reward model that is built on `base`.
    """
    model = meta_model(base, has_score=has_score)
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
    if not shapes.keys() <= {*dict(model.named_parameters()), *buffers}:
        model.config.tie_word_embeddings = False
    _write_config(folder, base, model)


def _write_config(folder: Path, base: Path, model: PreTrainedModel) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    for name in PROCESSOR_FILES:
        if (base / name).is_file():
            shutil.copy2(base / name, folder)
    drop_processor_templates(folder)
    if model.can_generate() and (base / "generation_config.json").is_file():
        shutil.copy2(base / "generation_config.json", folder)
    elif model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def name_ends(folder: Path, ends: Collection[int]) -> None:
    """Add tokens to the end tokens that generation_config.json of a written model names."""
    path = folder / "generation_config.json"
    about = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    named = about.get("eos_token_id")
    if named is None:
        named = getattr(load_config(folder).get_text_config(), "eos_token_id", None)
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


def untrained_names(model: PreTrainedModel, trained: Container[str]) -> list[str]:
    """Return the names of what full fine-tuning leaves unchanged: buffers, a frozen vision tower."""
    return [*stored_buffers(model), *(name for name in vision_names(model) if name not in trained)]


def _get_layer(name: str) -> str:
    """Return the decoder layer that a parameter belongs to; empty for parameters outside all layers."""
    match = LAYER.match(name)
    return match[0] if match else ""


def merge_adapter(
    base: Path,
    adapter: Path,
    target: Path,
    finish: Callable[[Path], None] = lambda _: None,
    *,
    has_score: bool = False,
) -> Path:
    """Write `base` with `adapter` merged in to the new folder `target`; `finish` adds to it before it appears.

    `has_score`: whether the adapter makes a reward model of `base`.
    Raises: ModelError if a part of the adapter has no place in the base, so that no fine-tuning is lost silently.
    """
    if target.exists():
        raise ModelError(f"{target} exists already; it was not touched. Give a new folder.")
    files = weight_files(base)
    if not files:
        raise ModelError(f"{base} has no *.safetensors weights to merge into.")
    merger = _Merger(adapter, base, StoredLayout(base, has_score=has_score))
    gets_score = has_score and not score_head.is_scorer(read_json_object(base / "config.json"))
    is_rewritten = gets_score or find_quantization(base / "config.json") is not None
    with new_folder(target) as temporary:
        if is_rewritten:
            _merge_rewritten(base, temporary, merger, gets_score=gets_score)
        for path in files if not is_rewritten else ():
            try:
                _merge_file(path, temporary / path.name, merger)
            except (SafetensorError, ValueError) as error:  # an invalid header is invalid JSON
                raise ModelError(f"{path}: is no whole safetensors file: {error}. Fetch the model again.") from error
        merger.check_complete(base)
        written = {path.name for path in temporary.iterdir()} | ({INDEX} if is_rewritten else set())
        for path in sorted(base.iterdir()):
            if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf") and path.name not in written:
                shutil.copy2(path, temporary / path.name)
        finish(temporary)
    return target


class _Merger:
    """Adder of an adapter to the weights it belongs to, stored tensor by stored tensor."""

    def __init__(self, adapter: Path, base: Path, layout: StoredLayout) -> None:
        self._folder, self._base, self._layout = adapter, base, layout
        self._content = read_contents(adapter, layout.model)
        self._merged: Counter[tuple[str, ...]] = Counter()
        """Number of stored elements by the parameters that they belong to."""

    @property
    def parameters(self) -> dict[str, torch.Size]:
        """Shapes of the parameters of the merged model."""
        return {name: parameter.shape for name, parameter in self._layout.model.named_parameters()}

    def merge(self, stored: str, value: Tensor) -> Tensor:
        """Return a stored tensor plus its part of the adapter."""
        place = self._layout.find_place(stored)
        self._merged[place.parameters] += value.numel()
        name = place.parameters[0]
        ties: dict[str, str] = self._layout.model.all_tied_weights_keys
        full_weight = self._content.find_whole(name, ties)
        if full_weight is not None and place.converter is None:
            self._check_shape(name, full_weight.shape, value.shape)
            if ties.get(name, name) not in self._content.joined and not self._is_stored_twice(name):
                refuse_shared(self._folder, self._layout.model, name, full_weight, value)
            value = full_weight.to(value.dtype)
        if not any(name in self._content.low_rank for name in place.parameters):
            return value
        updates = {name: self._compute_update(place, name) for name in place.parameters}
        update = self._layout.convert_to_stored(place, updates, value.shape)
        self._check_shape(place.parameters[0], update.shape, value.shape)
        total = value.float() + update
        pair = self._content.low_rank.get(place.parameters[0])
        if pair is not None and pair.magnitude is not None:
            if place.converter is not None:
                raise ModelError(
                    f"{self._folder}: {place.stored} is another matrix in the files than {place.parameters[0]} in the "
                    "model, and the lengths of its rows (use_dora) cannot be merged. Nothing was written."
                )
            total = pair.scale_rows(total)
        return total.to(value.dtype)

    def _compute_update(self, place: Place, parameter: str) -> Tensor:
        """Return the update of a parameter, or of the place's expert in it, in float32."""
        shape, pair, expert = self._layout.get_shape(parameter), self._content.low_rank.get(parameter), place.expert
        if pair is None:
            return torch.zeros(shape if expert is None else shape[1:])
        self._check_shape(parameter, pair.shape, shape)
        if expert is not None and expert >= shape[0]:
            raise ModelError(f"{place.stored} is expert {expert} of {shape[0]}. Nothing was written.")
        return pair.multiply(expert)

    def _is_stored_twice(self, name: str) -> bool:
        """Return whether the files hold both names of a weight that the model may share, or it shares none."""
        stored, ties = CheckpointWeights(self._base).weights, self._layout.model.all_tied_weights_keys.items()
        return all(tied in stored and source in stored for tied, source in ties if name in (tied, source))

    def _check_shape(self, parameter: str, update: torch.Size, weight: torch.Size) -> None:
        if update != weight:
            raise ModelError(
                f"{self._folder}: its part for {parameter} has shape {tuple(update)}, the base's weight "
                f"{tuple(weight)}. Nothing was written. Is it the base this adapter was trained on?"
            )

    def check_complete(self, base: Path) -> None:
        """Raise ModelError if any part of the adapter was not merged."""
        complete = {
            name
            for parameters, count in self._merged.items()
            if count == sum(self._layout.get_shape(name).numel() for name in parameters)
            for name in parameters
        }
        lost = sorted({*self._content.low_rank, *self._content.whole} - complete)
        ties: dict[str, str] = self._layout.model.all_tied_weights_keys
        if tied := next((name for name in lost if name in ties), None):
            is_pair = tied in self._content.low_rank
            raise ModelError(
                f"{self._folder}: {tied} and {ties[tied]} are one weight in {base}, which the adapter changes "
                "differently in the two places, so it cannot be merged. Nothing was written. "
                f"{'PEFT, `surefoot chat` and `surefoot serve` open it' if is_pair else 'PEFT opens it'} as it is."
            )
        if lost:
            raise ModelError(
                f"{self._folder}: {len(lost)} parts of the adapter found no weight in {base}, the first is {lost[0]}. "
                "Nothing was written. Is it the base this adapter was trained on?"
            )


def _merge_rewritten(base: Path, folder: Path, merger: _Merger, *, gets_score: bool) -> None:
    """Write merged weights in new files, and the config.json that belongs to them.

    Quantised ones are read back to bfloat16. With `gets_score` the output layer is left out, and the head is added.
    """
    stored = CheckpointWeights(base)
    names = sorted(stored.weights, key=dot_natural_key)
    specs = {
        name: torch.empty(stored.weights[name].shape, dtype=stored.get_dtype(name), device="meta") for name in names
    }
    if gets_score:
        for name in output_layer_names(base) - {*merger.parameters}:
            specs.pop(name, None)
        specs[score_head.WEIGHT] = torch.empty(merger.parameters[score_head.WEIGHT], device="meta")
    names = list(specs)

    def merge(number: int) -> dict[str, Tensor]:
        name = names[number]
        value = stored.read(name) if name in stored.weights else torch.zeros(specs[name].shape)
        return {name: merger.merge(name, value)}

    write_files(folder, [{name: specs[name]} for name in names], merge)
    config = read_json_object(base / "config.json")
    if find_quantization(base / "config.json") is not None:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part.pop("quantization_config", None)
                part |= dict.fromkeys({"dtype", "torch_dtype"} & part.keys(), "bfloat16")
        config = config if "torch_dtype" in config else {**config, "dtype": "bfloat16"}
    if gets_score:
        score_head.describe_scorer(config, load_config(base, has_score=True))
    # Infinity stays as the base has it: transformers reads it (Mamba's time_step_limit).
    write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _merge_file(source: Path, target: Path, merger: _Merger) -> None:
    """Copy one safetensors file, merging tensor by tensor. The header (names, types, offsets) is unchanged."""
    header = read_header(source)
    with open(source, "rb") as file:
        header_as_stored = file.read(header.num_bytes)
    with open(target, "wb") as out, safe_open(source, framework="pt") as tensors:
        out.write(header_as_stored)
        for name in sorted(header.tensors, key=lambda n: header.tensors[n].begin):
            merged = merger.merge(name, tensors.get_tensor(name))
            out.write(merged.reshape(-1).contiguous().view(torch.uint8).numpy().data)
