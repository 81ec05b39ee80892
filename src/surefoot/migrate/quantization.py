"""Quantised base weights of a run of another program: bitsandbytes in four or eight bits."""

from collections import ChainMap
from types import EllipsisType
from typing import Any

from surefoot.migrate.parsed_run import ParsedRun
from surefoot.migrate.values import is_null, parse_number

FORMATS = {4: "nf4", 8: "int8"}
"""Bits of a weight -> format."""
BITS = ("quantization_bit", "quant_bits")
SWITCHES = {"load_in_4bit": 4, "load_in_8bit": 8}
METHODS = ("quant_method", "quantization_method")
OF_BITSANDBYTES = ("bnb", "bitsandbytes")
KINDS = ("bnb_4bit_quant_type", "quantization_type")
DOUBLE = ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")
OF_ARITHMETIC = (
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "quantization_device_map", "llm_int8_threshold",
    "llm_int8_skip_modules",
)  # fmt: skip
"""Settings of the arithmetic, which follows from `dtype`."""

Mapped = dict[str, Any] | None | EllipsisType


def find_bits(run: ParsedRun) -> int | None:
    """Return the bits of a run's frozen weights; None for weights in a float type."""
    for name, bits in SWITCHES.items():
        if run.settings.get(name) is True or (name == "load_in_4bit" and run.settings.get("adapter") == "qlora"):
            return bits
    numbers = [parse_number(run.settings[name]) for name in BITS if not is_null(run.settings.get(name))]
    return numbers[0] if numbers and isinstance(numbers[0], int) else None


def _uses_bitsandbytes(run: ParsedRun) -> bool:
    """Return whether a run says nothing of another library that quantises."""
    return all(is_null(run.settings.get(name)) or run.settings[name] in OF_BITSANDBYTES for name in METHODS)


def map_quantization(run: ParsedRun, name: str, value: Any) -> Mapped:
    """Return the settings for one option, None for one that is left out, or `...` if it is none of quantisation.

    Raises: ConfigError for a number of bits that no format has.
    """
    if name in (*SWITCHES, *BITS):
        bits = find_bits(run)
        if bits is not None and bits not in FORMATS and _uses_bitsandbytes(run):
            raise run.make_value_error(name, value, f"{' or '.join(map(str, FORMATS))} bits")
        is_on = value is True if name in SWITCHES else not is_null(value)
        return {"quantization": FORMATS[bits]} if bits in FORMATS and is_on else {}
    if name == "bnb_config_kwargs" and isinstance(value, dict):  # axolotl's
        mapped = [map_quantization(run, key, option) for key, option in value.items()]
        carried = [settings for settings in mapped if isinstance(settings, dict)]
        return dict(ChainMap(*carried)) if len(carried) == len(mapped) else None
    if name in DOUBLE:
        return {"double_quantization": value} if find_bits(run) == 4 and isinstance(value, bool) else {}
    if name in METHODS or name in KINDS:
        return {} if note_quantization(run, name, value) is None else None
    return {} if name in OF_ARITHMETIC else ...


def note_quantization(run: ParsedRun, name: str, value: Any) -> str | None:
    """Return why a part of quantisation is not carried; None if all of it is."""
    if name in METHODS and not is_null(value) and value not in OF_BITSANDBYTES:
        bits = find_bits(run)
        instead = (
            f"{FORMATS[bits]}, as bitsandbytes has it, stands for it" if bits in FORMATS else "nothing is quantised"
        )
        return f"this kind of quantisation is not available: {instead}"
    if name in KINDS and find_bits(run) == 4 and value != "nf4":
        return "four bits are NF4, whose steps fit weights better than FP4's"
    return None
