"""Writer and reader of PEFT's adapter files for Surefoot's LoRA parameters.

`peft_layout` says how the files name and lay out what the model has. What is trained in full, such as routers, is
stored in full with its buffers, as PEFT's `modules_to_save`.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.pytorch_utils import Conv1D

from surefoot.errors import ModelError
from surefoot.models.adapter_files import (
    CONFIG,
    PATTERNS,
    PREFIX,
    SCORES,
    WEIGHTS,
    WRAPPED,
    describe_targets,
    join_shared,
    load_for_model,
)
from surefoot.models.hubs import MODELSCOPE
from surefoot.models.lora import OF_ONE_EXPERT, LoraSettings, is_lora
from surefoot.models.peft_layout import LORA, PeftLayout, split_targets
from surefoot.models.safetensors_writer import tensor_file
from surefoot.models.score_head import head_of


def write_adapter(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    values: Iterable[tuple[str, Tensor]],
    settings: LoraSettings,
    base_model: str,
    model: PreTrainedModel,
) -> None:
    """Write trained parameters as a PEFT adapter into an existing empty folder.

    `shapes`: shapes of all parameters, by the model's names, and of the `tensors_beside` them. `values` come
    in the same order; none is kept. `model` is read for its names alone.
    """
    layout, places = PeftLayout(model), _list_places(model, shapes)

    def convert(first: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the keys and values of a tensor, in each place of the model that shares it."""
        for name in places[first]:
            key, as_stored = layout.convert_to_file(name, value, shapes)
            yield f"{PREFIX}{layout.spell(key)}", as_stored

    empty = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    specs = dict(item for name, spec in empty.items() for item in convert(name, spec))
    with tensor_file(folder / WEIGHTS, specs) as file:
        for first, value in values:
            for item in convert(first, value.detach().float()):
                file.write(*item)
    names = [name for first in shapes for name in places[first]]
    config = _build_peft_config(names, settings, base_model, model, is_shared=len(names) > len(shapes))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _list_places(model: PreTrainedModel, trained: Collection[str]) -> dict[str, list[str]]:
    """Return the names of each trained tensor and of other places that share it: output layers may share embeddings.

    Two tensors that are both trained are not shared, whatever the config says: the files hold two versions.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    others = {shared[0]: shared[1:] for shared in names.values()}
    return {name: [name, *(other for other in others.get(name, ()) if other not in trained)] for name in trained}


def tensors_beside(model: PreTrainedModel, trained: Collection[str]) -> list[str]:
    """Return what else the modules hold that are trained in full: PEFT stores such modules with all they hold.

    A router of DeepSeek-V3 has a buffer that it adds to its scores.
    """
    owners = tuple(f"{name.rpartition('.')[0]}." for name in trained if not is_lora(name))
    return [name for name in model.state_dict() if name.startswith(owners) and name not in trained]


def get_tensor(model: PreTrainedModel, name: str) -> Tensor:
    """Return a parameter or a buffer."""
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), leaf)
    return tensor


def _build_peft_config(
    parameters: Collection[str], settings: LoraSettings, base_model: str, model: PreTrainedModel, *, is_shared: bool
) -> dict[str, Any]:
    """Return the content of adapter_config.json. `is_shared`: whether the model has a parameter in two places."""
    linears = {name.removesuffix(".lora_A") for name in parameters if name.endswith(".lora_A")}
    stacks = {name.removesuffix("_lora_A") for name in parameters if name.endswith("_lora_A")} - linears
    saved = {name.rpartition(".")[0] for name in parameters if not is_lora(name)}
    routers = {name for name in saved if not any(name.startswith(f"{owner}.") for owner in saved)}
    modules, target_parameters = split_targets(model, linears, stacks)
    auto_mapping = _name_class(model)
    task = "CAUSAL_LM" if head_of(model) is None else SCORES
    return {
        "peft_type": "LORA",
        **({"task_type": None, "auto_mapping": auto_mapping} if auto_mapping else {"task_type": task}),
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0 if target_parameters else settings.dropout,  # PEFT has no dropout on parameters
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(model.get_submodule(name), Conv1D) for name in linears),
        "target_modules": sorted(modules),
        "target_parameters": sorted(target_parameters) or None,
        "modules_to_save": sorted({_name_for_peft(name, routers, model) for name in routers}) or None,
        **({"ensure_weight_tying": True} if is_shared else {}),
    }


def _name_class(model: PreTrainedModel) -> dict[str, str] | None:
    """Return the class that an adapter is of, as PEFT writes it, if AutoModelForCausalLM would not open it.

    It opens the language model of some vision-language checkpoints (Qwen3.5, Llama 4), whose modules have other names,
    and knows most others not at all. PEFT's automatic classes then open the class that is named here.
    """
    trained, opened = (
        mapping.get(type(model.config), None)
        for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    )
    if trained is None or opened is trained or head_of(model) is not None:
        return None
    return {"base_model_class": trained.__name__, "parent_library": trained.__module__}


def _name_for_peft(router: str, routers: Collection[str], model: PreTrainedModel) -> str:
    """Return the end of a router's name by which PEFT finds it, or all of it if the end also names another module."""
    end = ".".join(router.split(".")[-2:])
    is_shared = any(name.endswith(end) and name not in routers for name, _ in model.named_modules())
    return router if is_shared else end


def read_adapter(
    folder: Path, expected_shapes: Mapping[str, torch.Size], settings: LoraSettings, model: PreTrainedModel
) -> dict[str, Tensor]:
    """Read a PEFT adapter into the model's names and shapes. `model` is read for its names alone.

    `expected_shapes`: the model's trainable parameters, by name. The file must contain all of them and nothing else
    but the `tensors_beside` them, which are the base's.
    Raises: ModelError if the folder is not an adapter, or its settings, names or shapes differ.
    """
    layout = PeftLayout(model)
    config, stored = load_for_model(folder, layout)
    join_shared(stored, model)
    _check_can_be_continued(folder, config, stored)
    run_values = {
        "lora_rank": settings.rank,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
    }
    adapter_values = {
        "lora_rank": config["r"],
        "lora_alpha": config["lora_alpha"],
        "use_rslora": config.get("use_rslora", False),
        "use_dora": bool(config.get("use_dora")),
    }
    different = [
        f"{name}={run_values[name]} but the adapter has {adapter_values[name]}"
        for name in run_values
        if run_values[name] != adapter_values[name]
    ]
    if different:
        raise ModelError(f"init_adapter={folder}: {'; '.join(different)}. Set the same values.")
    keys = {
        name: layout.convert_to_file(name, torch.empty(shape, device="meta"), expected_shapes)
        for name, shape in expected_shapes.items()
    }
    _check_targets(folder, {key for key, _ in keys.values()}, stored.keys(), config, settings, model)
    values = {}
    for name, (key, as_stored) in keys.items():
        value = stored.pop(key)
        if value.shape != as_stored.shape:
            raise ModelError(
                f"init_adapter={folder}: {PREFIX}{key} has shape {tuple(value.shape)} there, "
                f"{tuple(as_stored.shape)} here. Is it the model this adapter was trained on?"
            )
        values[name] = layout.convert_from_file(name, value, expected_shapes[name])
    return values


def _check_can_be_continued(folder: Path, config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raise ModelError for an adapter that is more than the low-rank pairs of one rank, which a run trains."""
    reasons = [f"{name}={config[name]!r} gives some modules their own" for name in PATTERNS if config.get(name)]
    reasons += [
        f"it holds {PREFIX}{key}, a whole layer beside its pair" for key in stored if WRAPPED in key and LORA not in key
    ]
    if reasons:
        raise ModelError(
            f"init_adapter={folder}: {'; '.join(reasons)}. A run trains pairs of one lora_rank and lora_alpha, and "
            f"nothing beside them. `surefoot export {folder} MODEL --merge` writes a model that can be trained on."
        )


def _check_targets(
    folder: Path,
    expected: Collection[str],
    stored: Collection[str],
    config: Mapping[str, Any],
    settings: LoraSettings,
    model: PreTrainedModel,
) -> None:
    """Raise ModelError, with both lists of targets, unless an adapter holds exactly the tensors that a run trains."""
    in_full = tuple(f"{key.rpartition('.')[0]}." for key in expected if LORA not in key)
    missing = sorted(set(expected) - set(stored))
    surplus = sorted(key for key in set(stored) - set(expected) if not key.startswith(in_full))
    if not missing and not surplus:
        return
    details = [f"it has no {PREFIX}{missing[0]} (one of {len(missing)})"] if missing else []
    details += [f"it also adapts {PREFIX}{surplus[0]} (one of {len(surplus)})"] if surplus else []
    owners = (key.partition(".lora_")[0].removesuffix(".base_layer") for key in surplus)
    modules = {name for name, _ in model.named_modules()}
    absent = next((owner for owner in owners if owner not in modules and not OF_ONE_EXPERT.search(f"{owner}.")), None)
    if absent is not None:
        raise ModelError(
            f"init_adapter={folder}: it adapts {absent}, which this model does not have. Its base is "
            f"{config.get('base_model_name_or_path')}: set model to that, or give an adapter of this model."
        )
    raise ModelError(
        f"init_adapter={folder}: the adapter was trained with {describe_targets(config)}, and this run trains "
        f"target_modules={list(settings.targets)}"
        f"{f', modules_to_save={list(settings.modules_to_save)}' if settings.modules_to_save else ''}: "
        f"{'; '.join(details)}. Set both to what the adapter has."
    )


def base_name(source: str, base: Path) -> str:
    """Return the adapter's name of its base: the hub id, which is valid everywhere, or else the local folder."""
    return str(base) if source.startswith(("pypi:", MODELSCOPE)) or Path(source).is_dir() else source
