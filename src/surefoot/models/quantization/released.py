"""Quantised checkpoints as they are released: which tensors of their files hold one weight, and the weight's shape.

Reads config.json and the headers of weight files, and imports no torch. `dequantize` reads the weights.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from surefoot.config.documents import shorten
from surefoot.errors import ModelError
from surefoot.models.resolve_model import read_json_object
from surefoot.system.safetensors_header import read_header

SCALE_INV, SCALE = "_scale_inv", "_scale"
"""Endings of the scales of FP8 weights; both are factors of the stored numbers."""
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
PACKED, SHAPE, ZERO_POINT, GROUP_INDEX = "_packed", "_shape", "_zero_point", "_g_idx"
ABSMAX, LEVELS, NESTED_ABSMAX, NESTED_LEVELS = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
"""Endings of the factors and levels of bitsandbytes' four bits, and of those of the factors themselves."""
BITSANDBYTES = "bitsandbytes"
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
"""Endings of the settings of such a weight, as JSON."""
OTHER_SCALE_NAMES = {".scale": SCALE_INV, ".qscale_weight": SCALE_INV, ".SCB": SCALE}
"""Names of a scale beside `.weight` in some releases, and the ending that they have here."""
OF_NO_WEIGHT = tuple(
    ".activation_scale .input_scale .input_zero_point .input_global_scale .output_scale .output_zero_point "
    ".qscale_act .k_scale .v_scale .weight_format".split()
)
"""Endings of scales of activations and of the KV cache, and of the name of a layout."""
OF_NUMBERS = (".weight", BLOCKS, PACKED)
"""Endings of tensors of whole numbers that are quantised weights; others are tables."""
INTEGERS = ("I8", "U8", "I32")
INT32_BITS = 32


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a weight file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""
    end: int

    @property
    def place(self) -> str:
        """The file and the tensor, for messages."""
        return f"{self.file}: {self.name}"

    def read_bytes(self) -> bytes:
        """Return the bytes of a small tensor, without torch."""
        with open(self.file, "rb") as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin)

    def read_integers(self) -> list[int]:
        """Return the numbers of a small tensor of signed integers, without torch."""
        stored = self.read_bytes()
        width = len(stored) // max(1, prod(self.shape))
        return [int.from_bytes(stored[at : at + width], "little", signed=True) for at in range(0, len(stored), width)]

    @property
    def is_quantised(self) -> bool:
        return self.dtype.startswith("F8") or self.dtype in INTEGERS


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a checkpoint, by the name and shape that it has without quantisation."""

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredPart]
    """The tensors that hold it, by the ending that each adds to the weight's name."""

    @property
    def is_quantised(self) -> bool:
        return self.parts.keys() != {""}

    @property
    def values(self) -> StoredPart:
        """The tensor that holds the numbers."""
        return next(part for ending, part in self.parts.items() if ending in ("", BLOCKS, PACKED))

    @property
    def scale_ending(self) -> str:
        """The ending of the tensor of scales."""
        return next(ending for ending in self.parts if ending in (SCALE_INV, SCALE, BLOCK_SCALES))


Parts = Mapping[str, StoredPart]


@dataclass(frozen=True)
class _Naming:
    """How a method names the tensors of a weight."""

    values: Collection[str]
    """Endings of the tensor that holds the numbers; one of them is there."""
    scales: Collection[str]
    """Endings of its scales; one of them is there."""
    others: Collection[str]
    get_shape: Callable[[Parts], tuple[int, ...]]


FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of safetensors that hold weights as they are."""


def _get_fp8_shape(parts: Parts) -> tuple[int, ...]:
    part = parts[""]
    if part.dtype in FLOATS:
        raise ModelError(
            f"{part.place} is stored as {part.dtype}, which is not quantised, and has scales beside it: a part of the "
            "weights was read back. Remove those scales, or give the folder as it was released."
        )
    *rows, columns = part.shape
    return (*rows, columns if part.dtype.startswith("F8") else 2 * columns)  # FP4 is packed in pairs


def _get_mxfp4_shape(parts: Parts) -> tuple[int, ...]:
    """[E, out, blocks, bytes] of two numbers each -> [E, in, out], as the model has it."""
    part = parts[BLOCKS]
    if len(part.shape) != 4:
        raise ModelError(f"{part.place} has shape {list(part.shape)}; MXFP4 blocks of experts have 4 dimensions.")
    experts, rows, blocks, num_bytes = part.shape
    return (experts, 2 * blocks * num_bytes, rows)


def _get_packed_shape(parts: Parts) -> tuple[int, ...]:
    if PACKED not in parts:
        return parts[""].shape
    packed = parts[PACKED]
    if SHAPE in parts:
        return _read_sizes(parts[SHAPE])
    if packed.dtype == "U8":  # FP4 is packed in pairs
        return (*packed.shape[:-1], 2 * packed.shape[-1])
    raise ModelError(f"{packed.place} is packed, and its shape (weight_shape) is missing. Is the folder complete?")


def _read_sizes(part: StoredPart) -> tuple[int, ...]:
    numbers = part.read_integers()
    if part.dtype not in ("I64", "I32") or len(numbers) != 2 or min(numbers) < 1:
        raise ModelError(f"{part.place} holds {shorten(numbers)}; the two sizes of a weight are needed.")
    return tuple(numbers)


def read_state(parts: Parts) -> Mapping[str, Any]:
    """Return the settings of a weight in bitsandbytes' four bits. Raises: ModelError for others than it writes."""
    part = next(parts[ending] for ending in STATES if ending in parts)
    try:
        state = json.loads(part.read_bytes())
    except ValueError as error:
        raise ModelError(f"{part.place} is no JSON: {error}. Fetch the file again.") from error
    sizes = [state.get(name) for name in ("blocksize", "nested_blocksize")] if isinstance(state, dict) else []
    shape = state.get("shape") if sizes else None
    are_sizes = bool(sizes) and all(type(size) is int and size > 0 for size in sizes if size is not None)
    is_shape = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    if not are_sizes or not is_shape or sizes[0] is None:
        raise ModelError(f"{part.place} holds {shorten(state)}; the shape and the block size of a weight are needed.")
    return state  # type: ignore[no-any-return]


def _get_bitsandbytes_shape(parts: Parts) -> tuple[int, ...]:
    if not parts.keys() & set(STATES):
        if ABSMAX in parts:
            raise ModelError(
                f"{parts[''].place}: its settings ({STATES[0]}) are missing. Is the folder complete, its config.json "
                "its own?"
            )
        return parts[""].shape
    return tuple(read_state(parts)["shape"])


_FP8 = _Naming(("",), (SCALE_INV, SCALE), (), _get_fp8_shape)
METHODS: Mapping[str, _Naming] = {
    "fp8": _FP8,
    "mxfp8": _FP8,
    "mxfp4": _Naming((BLOCKS,), (BLOCK_SCALES,), (), _get_mxfp4_shape),
    BITSANDBYTES: _Naming(
        ("",), (ABSMAX, SCALE), (NESTED_ABSMAX, NESTED_LEVELS, LEVELS, *STATES), _get_bitsandbytes_shape
    ),
    "compressed-tensors": _Naming(
        ("", PACKED), (SCALE,), (ZERO_POINT, "_global_scale", SHAPE, GROUP_INDEX), _get_packed_shape
    ),
}
"""Methods of config.json's quantization_config that can be read, by quant_method."""


PACKAGES: Mapping[str, str] = {"compressed-tensors": "compressed_tensors"}
"""Optional packages without which a method cannot be read."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are quantised."""

    method: str
    settings: Mapping[str, Any]
    """Its quantization_config."""
    place: Path
    """The config.json that describes it."""

    def describe_reading(self, dtype: str, stored_as: str | None) -> str:
        """Return what is done with its weights, for the user. `stored_as`: the format that they are stored in again."""
        again = f"and stored in {stored_as} again" if stored_as is not None else f"into {dtype}"
        return (
            f"the weights of {self.place.parent} are quantised ({self.describe()}): they are read back {again}; models "
            "are written in bfloat16"
        )

    def describe_export(self) -> str:
        """Return the type of a model that is written, for the user."""
        return (
            f"written in bfloat16, without quantization_config: the weights of {self.place.parent} are quantised "
            f"({self.describe()})"
        )

    @property
    def bitsandbytes_kind(self) -> str | None:
        """The kind of bitsandbytes' numbers: `nf4`, `fp4` or `int8`; None for weights of another method."""
        if self.method != BITSANDBYTES:
            return None
        return self.settings.get("bnb_4bit_quant_type", "fp4") if self.settings.get("load_in_4bit") else "int8"

    def describe(self) -> str:
        """Return the method in words, such as `fp8`, or `compressed-tensors, pack-quantized`."""
        if self.bitsandbytes_kind is not None:
            return f"{self.method}, {self.bitsandbytes_kind}"
        stored = self.settings.get("format")
        return f"{self.method}, {stored}" if isinstance(stored, str) else self.method


def find_quantization(path: Path) -> Quantization | None:
    """Return how a config.json says that its weights are quantised; None if they are not.

    Raises: ModelError for a method that cannot be read.
    """
    content = read_json_object(path)
    text = content.get("text_config")
    settings = content.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str) or method not in METHODS:
        name = shorten(method).strip("'") if isinstance(method, str) else "an unknown method"
        raise ModelError(
            f"{path}: its weights are quantised ({name}, quantization_config), and this method cannot be read back. "
            f"Weights of {', '.join(METHODS)} can, and those in bfloat16, float16 or float32. Take another release of "
            "the model."
        )
    if settings.get("transform_config") or _is_sparse(settings):
        raise ModelError(
            f"{path}: its weights are transformed or sparse (transform_config, sparsity_config in "
            "quantization_config), which cannot be read back. Take another release of the model."
        )
    package = PACKAGES.get(method)
    if package is not None and find_spec(package) is None:
        raise ModelError(
            f"{path}: its weights are quantised ({method}), and the package that reads them is not installed. "
            "`pip install 'surefoot[quantized]'` installs it."
        )
    return Quantization(method, settings, path)


def _is_sparse(settings: Mapping[str, Any]) -> bool:
    sparsity = settings.get("sparsity_config")
    return isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"


def find_weights(files: Iterable[Path], quantization: Quantization | None) -> dict[str, StoredWeight]:
    """Return the weights that files hold, by name.

    Raises: ModelError for quantised numbers without scales or a quantization_config, and scales without numbers.
    ValueError for a file that is incomplete.
    """
    stored = {part.name: part for path in files for part in _list_parts(path)}
    if quantization is None:
        for part in stored.values():
            if part.dtype.startswith("F8") or (part.dtype in INTEGERS and part.name.endswith(OF_NUMBERS)):
                raise ModelError(
                    f"{part.place} is quantised ({part.dtype}), and config.json has lost the quantization_config "
                    "that says how. Take the config.json of the model's release, or weights in bfloat16."
                )
        return {name: StoredWeight(name, part.shape, {"": part}) for name, part in stored.items()}
    naming = METHODS[quantization.method]
    weights: dict[str, dict[str, StoredPart]] = {}
    for part in stored.values():
        if not part.name.endswith(OF_NO_WEIGHT):
            name, ending = _split_name(part.name, naming, stored)
            weights.setdefault(name, {})[ending] = part
    return {name: _build_weight(name, parts, naming) for name, parts in weights.items()}


def _list_parts(path: Path) -> list[StoredPart]:
    header = read_header(path)
    return [
        StoredPart(
            name, path, tensor.dtype, tuple(tensor.shape), header.num_bytes + tensor.begin,
            header.num_bytes + tensor.end,
        )
        for name, tensor in header.tensors.items()
    ]  # fmt: skip


def _split_name(name: str, naming: _Naming, stored: Mapping[str, StoredPart]) -> tuple[str, str]:
    """Return the weight that a tensor belongs to, and the ending that it adds to the weight's name."""
    for other_name, ending in OTHER_SCALE_NAMES.items():
        weight = f"{name.removesuffix(other_name)}.weight"
        if ending in naming.scales and name.endswith(other_name) and weight in stored and stored[weight].is_quantised:
            return weight, ending
    for ending in filter(None, (*naming.values, *naming.scales, *naming.others)):
        weight = name.removesuffix(ending)
        if name.endswith(ending) and (
            weight.endswith(".weight") or any(weight + values in stored for values in naming.values)
        ):
            return weight, ending
    return name, ""


def _build_weight(name: str, parts: Parts, naming: _Naming) -> StoredWeight:
    first = next(iter(parts.values()))
    is_table = first.dtype in INTEGERS and not name.endswith(".weight")
    if parts.keys() == {""} and (is_table or not first.is_quantised):
        return StoredWeight(name, first.shape, parts)
    values = [parts[ending] for ending in naming.values if ending in parts]
    if len(values) != 1:
        raise ModelError(f"{first.place}: {'two tensors hold' if values else 'no tensor holds'} the numbers of {name}.")
    if not parts.keys() & set(naming.scales):
        wanted = " or ".join(name + ending for ending in naming.scales)
        raise ModelError(
            f"{values[0].place} is stored as {values[0].dtype}, and its scales ({wanted}) are missing. Without them "
            "its numbers mean nothing. Is the folder complete, its config.json its own?"
        )
    if not values[0].shape:
        raise ModelError(f"{values[0].place} is a single quantised number, which no weight is.")
    return StoredWeight(name, naming.get_shape(parts), parts)
