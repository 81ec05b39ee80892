"""Check of one architecture: two steps on packed samples against transformers' own forward of each sample alone."""

import copy
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from surefoot.data.collate import MicroBatch
from surefoot.distributed.artifact import write_trained_adapter, write_trained_model
from surefoot.distributed.process_group import SINGLE_PROCESS
from surefoot.errors import SurefootError
from surefoot.methods.base import BatchTotals, TrainContext
from surefoot.methods.sft.method import SftObjective
from surefoot.models.build import BuiltModel, build_model, load_config, meta_model, model_class, trainable_parameters
from surefoot.models.expert_layouts import can_be_shared_out
from surefoot.models.export import merge_adapter
from surefoot.models.lora import LoraSettings
from surefoot.models.peft_layout import find_unreadable
from surefoot.training.step import train_step
from tests.support.vision import KINDS
from tests.support.vision_families import FAMILIES

CPU = torch.device("cpu")
LENGTHS = (13, 7, 17)
"""Tokens of the samples in the packed row: longer and shorter than the windows of the tiny models."""
LONG, LONG_TIMES = (41, 20, 45), 4
"""The same, with windows LONG_TIMES as large: longer than the row of the probe that finds layers which mix samples."""
LOSS_WITHIN, GRADIENT_WITHIN, EXPORT_WITHIN = 1e-5, 1e-4, 1e-4
NEGLIGIBLE = 1e-3
"""Share of the norm of all gradients below which a gradient is compared with that share instead of its own norm."""
IMAGES_ARE_TESTED = {*KINDS, *FAMILIES}
"""Architectures that tests/vision trains on images."""
MODES: dict[str, tuple[str, ...] | None] = {
    "full": None,
    "attention": ("attention",),
    "experts": ("experts",),
    "all": ("all",),
}
"""LoRA targets of each run; None trains every weight."""


@dataclass
class ModeResult:
    """Result of one way to train an architecture."""

    state: str = "trains"
    """trains, empty (the target group has no members), refused, wrong or traceback."""
    message: str = ""
    loss: float = math.nan
    loss_difference: float = math.nan
    gradient_difference: float = math.nan
    worst_gradient: str = ""
    export_difference: float = math.nan
    peft_difference: float = math.nan
    peft_message: str = ""
    taken_apart: list[str] = field(default_factory=list)
    """Classes of the layers that run once per sample."""


@dataclass
class Result:
    """Result of an architecture."""

    name: str
    class_name: str
    modes: dict[str, ModeResult] = field(default_factory=dict)
    has_experts: bool = False
    shares_experts: bool = False
    """Whether ranks can hold a part of the experts each."""
    seconds: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether it trains in full and with LoRA. A group of targets that only other models have may be empty."""
        states = {mode: result.state for mode, result in self.modes.items()}
        can_be_empty = states.pop("attention", "trains") in ("trains", "empty")
        return can_be_empty and bool(states) and all(state == "trains" for state in states.values())

    @property
    def problems(self) -> list[str]:
        """What does not hold, a line for each mode."""
        lines = [f"{mode}: {result.state} {result.message}" for mode, result in self.modes.items()]
        return [line for line, result in zip(lines, self.modes.values(), strict=True) if result.state != "trains"]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "trains": self.trains}

    def as_row(self) -> dict[str, Any]:
        """Return what docs/models.json keeps of it."""
        compared = [result for result in self.modes.values() if not math.isnan(result.loss_difference)]
        apart = sorted({name for result in compared for name in result.taken_apart})
        experts = self.modes.get("experts")
        adapters = [result for mode, result in self.modes.items() if mode != "full" and result.state == "trains"]
        return {
            "type": self.name,
            "class": self.class_name,
            "trains": self.trains,
            "experts": None if experts is None else experts.state == "trains",
            "packing": f"taken apart: {', '.join(apart)}" if apart else "told",
            "expert_parallel": self.shares_experts if self.has_experts else None,
            "peft": bool(adapters) and all(result.peft_difference <= EXPORT_WITHIN for result in adapters),
            "images": self.name in IMAGES_ARE_TESTED,
            "loss": max((result.loss_difference for result in compared), default=None),
            "gradient": max((result.gradient_difference for result in compared), default=None),
        }


def sample_tokens(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 119, (length,), generator=generator) for length in lengths]


def packed_batch(samples: list[Tensor]) -> MicroBatch:
    lengths = [len(sample) for sample in samples]
    ids = torch.cat(samples)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    last = set((ends[1:] - 1).tolist())
    trained = torch.tensor([at for at in range(len(ids)) if at not in last])
    return MicroBatch(
        ids[None],
        positions[None],
        lengths,
        ends.to(torch.int32),
        trained,
        ids[trained + 1],
        None,
        ("data:1",),
        torch.zeros_like(trained),
    )


def has_experts(model: nn.Module) -> bool:
    return any(
        "expert" in name.rsplit(".", 1)[-1].lower() and "shared" not in name for name, _ in model.named_modules()
    )


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention function of transformers that a model is compared with.

    Falcon adds ALiBi twice in `eager`: to its scores, and within its mask.
    """
    return "sdpa" if config.model_type == "falcon" else "eager"


class Reference:
    """transformers' own model of a folder, one sample at a time."""

    def __init__(self, folder: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
        config = load_config(folder)
        self.model: PreTrainedModel = model_class(folder, config).from_pretrained(
            folder, dtype=dtype, attn_implementation=attention_of(config), experts_implementation="eager"
        )
        self.model.to(device).train()
        self._initial = copy.deepcopy(self.model.state_dict())

    def loss(self, samples: list[Tensor], changes: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of all trained tokens and its gradients, with `changes` added to the weights."""
        if changes:
            _untie_layers(self.model)
        self.model.load_state_dict(self._initial)
        parameters = _all_parameters(self.model)
        with torch.no_grad():
            for name, change in changes.items():
                parameters[name].add_(change)
        self.model.zero_grad(set_to_none=True)
        loss = mean_loss(self.model, samples)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _untie_layers(model: PreTrainedModel) -> None:
    """Give linear layers that share a weight one each: each of them has a low-rank pair of its own, as in PEFT."""
    for name in model.all_tied_weights_keys:
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear) and owner is not model.get_output_embeddings():
            owner.weight = nn.Parameter(owner.weight.detach().clone())


def mean_loss(model: nn.Module, samples: list[Tensor]) -> Tensor:
    """Return the mean loss of the samples' tokens, each sample in a forward of its own."""
    losses = []
    for sample in samples:
        _forget_longest_position(model)
        logits = model(input_ids=sample[None].to(next(model.parameters()).device), use_cache=False).logits[0]
        targets = sample[1:].to(logits.device)
        losses.append(F.cross_entropy(logits[:-1].float(), targets, reduction="sum"))
    return torch.stack(losses).sum() / sum(len(sample) - 1 for sample in samples)


def _forget_longest_position(model: nn.Module) -> None:
    """Give position embeddings that grow with the longest sample so far the frequencies that they began with."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq, module.max_seq_len_cached = module.original_inv_freq, module.original_max_seq_len


class _RecordingAdamW(torch.optim.AdamW):
    """AdamW that keeps the gradients of its first step."""

    first: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.first is None:
            self.first = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]
        return super().step(closure)


def low_rank_change(built: BuiltModel, scaling: float) -> dict[str, Tensor]:
    """Return what the low-rank pairs add to each weight of the base."""
    parameters, changes = _all_parameters(built.model), {}
    for name, a in parameters.items():
        if name.endswith("lora_A"):
            b, weight = parameters[f"{name[:-1]}B"], _base_name(name)
            change = scaling * (b @ a).detach()
            is_transposed = _is_transposed(built.model, weight, change)
            stored = change.mT if is_transposed else change
            changes[weight] = stored.reshape(parameters[weight].shape)
    return changes


def _all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by all their names: a tied one has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def _base_name(name: str) -> str:
    """Return the name of the weight that a low-rank parameter adapts."""
    owner, leaf = name.rpartition(".")[::2]
    return f"{owner}.weight" if leaf.startswith("lora_") else f"{owner}.{leaf[:-7]}"


def _is_transposed(model: nn.Module, weight: str, change: Tensor) -> bool:
    """Return whether a weight is stored as [.., in, out], where its change is [.., out, in]."""
    owner, _, leaf = weight.rpartition(".")
    module = model.get_submodule(owner)
    if change.dim() == 2:
        return isinstance(module, Conv1D)
    return bool(getattr(module, leaf).shape[-1] != change.shape[-1])


def low_rank_gradients(built: BuiltModel, scaling: float, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of trained parameters that follow from those of the merged weights."""
    parameters, wanted = _all_parameters(built.model), {}
    for name in trainable_parameters(built.model):
        if not name.endswith(("lora_A", "lora_B")):
            wanted[name] = gradients.get(name, torch.zeros_like(parameters[name]))
            continue
        a, b = parameters[f"{name[:-1]}A"].detach(), parameters[f"{name[:-1]}B"].detach()
        gradient = gradients.get(_base_name(name), torch.zeros_like(parameters[_base_name(name)])).float()
        merged = b @ a
        if _is_transposed(built.model, _base_name(name), merged):
            gradient = gradient.reshape(merged.mT.shape).mT
        gradient = gradient.reshape(merged.shape)
        is_a = name.endswith("lora_A")
        wanted[name] = scaling * (b.mT @ gradient if is_a else gradient @ a.mT)
    return wanted


def by_one_name(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each gradient once: a tied one, which has several names, by that in `found`."""
    names = {id(value): name for name, value in wanted.items()}
    names |= {id(wanted[name]): name for name in found if name in wanted}
    return {name: wanted[name] for name in names.values()}


def worst_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of gradients, and where it is. One that is not found differs by all."""
    total = math.sqrt(sum(float(value.double().square().sum()) for value in wanted.values()))
    worst, where = 0.0, ""
    for name, value in found.items():
        expected = wanted.get(name, torch.zeros_like(value))
        difference = float((value - expected).norm()) / max(float(expected.norm()), NEGLIGIBLE * total)
        if not difference <= worst:
            worst, where = difference, name
    unseen = [name for name, value in by_one_name(wanted, found).items() if name not in found and value.any()]
    return (math.inf, unseen[0]) if unseen else (worst, where)


def train_two_steps(
    built: BuiltModel, batch: MicroBatch, *, device: torch.device = CPU, learning_rate: float = 1e-2
) -> tuple[list[float], dict[str, Tensor], Callable[[], float]]:
    """Take two steps; return their losses, the first gradients, and a function for the loss afterwards."""
    parameters = trainable_parameters(built.model)
    objective = SftObjective(built, 0.0)
    optimizer = _RecordingAdamW(parameters.values(), lr=learning_rate, weight_decay=0.0)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=built.autocast)
    context = TrainContext(
        built.model, parameters, optimizer, objective, SINGLE_PROCESS, device, forward_context=lambda: autocast
    )
    batch = batch.to(device)
    totals = BatchTotals(batch.num_tokens, batch.num_trained, batch.trained_weight)
    losses = [
        train_step([batch], totals, context, learning_rate=learning_rate, max_grad_norm=0.0).loss for _ in range(2)
    ]
    assert optimizer.first is not None

    def loss_now() -> float:
        with torch.no_grad():
            return float(objective.loss(batch, totals).total)

    return losses, dict(zip(parameters, optimizer.first, strict=True)), loss_now


def _open(folder: Path, stock: type[PreTrainedModel]) -> PreTrainedModel:
    """Open a folder as users do."""
    attention = attention_of(load_config(folder))
    auto = AutoModelForCausalLM if "CausalLM" in stock.__name__ or "LMHead" in stock.__name__ else None
    opened: PreTrainedModel
    try:
        opened, info = (auto or AutoModelForImageTextToText).from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
    except ValueError:
        opened, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return opened.eval()


def wanted_of(
    built: BuiltModel, settings: LoraSettings | None, reference: Reference
) -> tuple[float, dict[str, Tensor]]:
    """Give the low-rank pairs values; return the loss of the samples and the gradients of all trained parameters."""
    if settings is None:
        loss, gradients = reference.loss(sample_tokens(), {})
        return float(loss), gradients
    generator = torch.Generator().manual_seed(11)
    for name, parameter in trainable_parameters(built.model).items():
        if name.endswith(("lora_A", "lora_B")):
            parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2
    loss, gradients = reference.loss(sample_tokens(), low_rank_change(built, settings.scaling))
    return float(loss), low_rank_gradients(built, settings.scaling, gradients)


def check_mode(
    folder: Path, work: Path, targets: tuple[str, ...] | None, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> ModeResult:
    """Train one mode and compare it. Raises whatever the program raises."""
    samples = sample_tokens()
    settings = LoraSettings(rank=2, alpha=3.0, targets=targets) if targets else None
    built = build_model(folder, lora=settings, device=CPU, dtype=torch.float32)
    wanted_loss, wanted = wanted_of(built, settings, reference)
    losses, gradients, loss_now = train_two_steps(built, packed_batch(samples))
    taken_apart = sorted(built.isolation.apart)
    result = ModeResult(loss=losses[0], taken_apart=taken_apart, loss_difference=abs(losses[0] - wanted_loss))
    result.gradient_difference, result.worst_gradient = worst_difference(gradients, wanted)
    if not (result.loss_difference <= LOSS_WITHIN and result.gradient_difference <= GRADIENT_WITHIN):
        result.state = "wrong"
        return result
    trained_loss = loss_now()
    target = work / "artifact"
    if settings is None:
        artifact = write_trained_model(target, built.model, tokenizer, folder)
    else:
        artifact = write_trained_adapter(target, built.model, tokenizer, settings, str(folder))
    exported = merge_adapter(folder, artifact, work / "merged") if settings else artifact
    with torch.no_grad():
        stock = type(reference.model)
        result.export_difference = abs(float(mean_loss(_open(exported, stock), samples)) - trained_loss)
        if not result.export_difference <= EXPORT_WITHIN:
            result.state, result.message = "wrong", "the exported model has another loss"
        if settings is not None:
            _open_in_peft(result, artifact, _open(folder, stock), samples, trained_loss)
            is_unreadable = bool(find_unreadable(meta_model(folder), settings.targets))
            if is_unreadable == (result.peft_difference <= EXPORT_WITHIN):
                result.state, result.message = "wrong", f"PEFT: {result.peft_message}; was told so: {is_unreadable}"
    return result


def _open_in_peft(
    result: ModeResult, adapter: Path, base: PreTrainedModel, samples: list[Tensor], trained_loss: float
) -> None:
    try:
        opened = PeftModel.from_pretrained(base, adapter)
        result.peft_difference = abs(float(mean_loss(opened, samples)) - trained_loss)
    except Exception as error:  # noqa: BLE001 - whatever PEFT raises is its answer
        result.peft_message = f"{type(error).__name__}: {error}"[:300]


def check_architecture(
    name: str, model: PreTrainedModel, work: Path, tokenizer: PreTrainedTokenizerBase, modes: Mapping[str, Any] = MODES
) -> Result:
    """Save a tiny model, train it in each mode, and compare."""
    began = time.monotonic()
    shares_experts = any(can_be_shared_out(module) for module in model.modules())
    result = Result(name, type(model).__name__, {}, has_experts(model), shares_experts)
    folder = work / "base"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference: Reference | None = None
    for mode, targets in modes.items():
        if mode == "experts" and not result.has_experts:
            continue
        try:
            reference = reference or Reference(folder)
            result.modes[mode] = check_mode(folder, work / mode, targets, reference, tokenizer)
        except SurefootError as error:
            state = "empty" if "is empty in" in str(error) else "refused"
            result.modes[mode] = ModeResult(state, str(error))
        except Exception as error:  # noqa: BLE001 - the suite reports every traceback
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            result.modes[mode] = ModeResult("traceback", f"{type(error).__name__}: {str(error)[:300]} ({where})")
    result.seconds = round(time.monotonic() - began, 2)
    return result
