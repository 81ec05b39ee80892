"""Tiny models of every architecture on the device against transformers' own, one sample at a time, in float32.

A packed row of three samples, in full and with LoRA on every layer: its loss and all gradients, in float32 and in
bfloat16, whose difference is judged by that of transformers' own model in bfloat16. Each architecture has a process of
its own: an error of the device stops its process for good.
"""

import math
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from part import Row, failure, main
from tests.models.architectures import ARCHITECTURES, tiny_model
from tests.support.model_check import (
    Reference,
    by_one_name,
    low_rank_change,
    packed_batch,
    sample_tokens,
    train_two_steps,
    wanted_of,
)
from torch import Tensor

from surefoot.models.build import build_model
from surefoot.models.lora import LoraSettings
from surefoot.models.pretrained import quiet_transformers

PROCESSES = min(8, os.cpu_count() or 1)
MODES = {"full": None, "LoRA": LoraSettings(rank=2, alpha=3.0, targets=("all",))}
EXACT = (1e-5, 1e-3)
"""Largest relative difference of the loss and of all gradients together in float32."""
TIMES, LEAST = 2.0, (5e-3, 0.03)
"""In bfloat16: so many times the difference of transformers' own model in bfloat16, and a little more."""
NAMES = "SUREFOOT_GPU_ARCHITECTURES"
"""Environment variable: names of architectures, with commas, instead of all."""


def architectures(device: torch.device) -> Iterator[Row]:
    """A row for each type of numbers and way to train, and one for each architecture beyond its limits."""
    wanted = os.environ.get(NAMES, "").split(",")
    names = [name for name, line in ARCHITECTURES.items() if line.reason is None and (wanted == [""] or name in wanted)]
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(PROCESSES, maxtasksperchild=1) as pool:
        results = pool.starmap(compare, [(name, str(device)) for name in names], chunksize=1)
    for key in dict.fromkeys(key for result in results for key in result):
        good = sum(result[key][0] for result in results if key in result)
        yield Row(f"architectures, {key}", f"{good} of {len(names)} within the limits", "all", good == len(names))
    for name, result in zip(names, results, strict=True):
        for key, (passed, text) in result.items():
            if not passed:
                yield Row(f"{name}, {key}", text, "", False)


def compare(name: str, device: str) -> dict[str, tuple[bool, str]]:
    """Return whether an architecture is within the limits, and how far it is, by type of numbers and way to train."""
    found: dict[str, tuple[bool, str]] = {}
    place = torch.device(device)
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory(prefix="surefoot-gpu-") as folder, quiet_transformers():
            key = str(dtype).removeprefix("torch.")
            try:
                tiny_model(name).to(dtype).save_pretrained(folder)
                reference = Reference(Path(folder), place)
                for mode, lora in MODES.items():
                    found[f"{key}, {mode}"] = compare_mode(Path(folder), lora, reference, place, dtype)
            except Exception as error:  # noqa: BLE001 - the row tells of it
                found[f"{key}, {mode if found else 'full'}"] = (False, failure(name, error).result)
    return found


def compare_mode(
    folder: Path, lora: LoraSettings | None, reference: Reference, device: torch.device, dtype: torch.dtype
) -> tuple[bool, str]:
    """Compare one way to train with transformers in float32."""
    built = build_model(folder, lora=lora, device=device, dtype=dtype)
    wanted_loss, wanted = wanted_of(built, lora, reference)
    changes = low_rank_change(built, lora.scaling) if lora is not None else {}  # before a step changes them
    losses, gradients, _ = train_two_steps(built, packed_batch(sample_tokens()), device=device, learning_rate=1e-3)
    loss, gradient = abs(losses[0] - wanted_loss) / wanted_loss, difference(gradients, wanted)
    loss_within, gradient_within = EXACT
    if dtype != torch.float32:
        own_loss, own_gradient = rounding_of(folder, reference, changes, device, dtype)
        loss_within, gradient_within = LEAST[0] + TIMES * own_loss, LEAST[1] + TIMES * own_gradient
    text = f"loss {losses[0]:.4f}, wanted {wanted_loss:.4f} within {loss_within:.1e}; "
    text += f"gradients differ by {gradient:.1e}, within {gradient_within:.1e}"
    return loss <= loss_within and gradient <= gradient_within, text


def rounding_of(
    folder: Path, reference: Reference, changes: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Return how far transformers' own model in `dtype` is from float32: its loss and its gradients."""
    wanted_loss, wanted = reference.loss(sample_tokens(), changes)
    loss, gradients = Reference(folder, device, dtype).loss(sample_tokens(), changes)
    return abs(float(loss - wanted_loss)) / float(wanted_loss), difference(gradients, wanted)


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to their norm. Missing ones count."""
    once = {name: value.double() for name, value in by_one_name(wanted, found).items()}
    error = sum(
        float((value - found.get(name, torch.zeros_like(value))).square().sum()) for name, value in once.items()
    )
    return math.sqrt(error / max(sum(float(value.square().sum()) for value in once.values()), 1e-30))


if __name__ == "__main__":
    main(architectures)
