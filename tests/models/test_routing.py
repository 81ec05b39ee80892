"""Recorded routing, the load-balancing loss, and routing under gradient checkpointing."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func

from surefoot.data.collate import MicroBatch, collate
from surefoot.data.dataset import Sample
from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals
from surefoot.methods.grpo.batch import CompletionBatch, Trajectory, collate_completions
from surefoot.methods.grpo.loss import GrpoObjective
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.rollout.routed_experts import encode_experts
from surefoot.methods.sft.method import SftObjective
from surefoot.methods.token_loss import text_inputs
from surefoot.models.build import BuiltModel, build_model, compile_layers
from surefoot.models.lora import LoraSettings
from surefoot.models.routing import (
    KeptChoices,
    LayerRouting,
    ReplayedRouting,
    RoutingRecorder,
    check_recorded,
    expert_counts,
    load_balancing_loss,
)
from tests.support import expert_models
from tests.support.models import make_model

LORA = LoraSettings(rank=4, alpha=8, targets=("attention", "experts", "router"))


def build(folder: Path, **extra: bool) -> BuiltModel:
    torch.manual_seed(5)
    return build_model(folder, lora=LORA, device=torch.device("cpu"), dtype=torch.float32, **extra)  # type: ignore[arg-type]


def samples(count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(count):
        ids = torch.randint(3, 500, (10 + 5 * index,), generator=generator).int().numpy()
        made.append(Sample(ids, (ids > 100).astype("float32"), f"row {index}"))
    return made


def random_layers(tokens: int, experts: int, top_k: int, count: int) -> list[LayerRouting]:
    torch.manual_seed(1)
    logits = [torch.randn(tokens, experts) for _ in range(count)]
    return [LayerRouting(layer, layer.softmax(-1).topk(top_k, dim=-1).indices) for layer in logits]


def test_one_layers_loss_is_that_of_transformers() -> None:
    layers = random_layers(50, 6, 2, 1)
    ours = load_balancing_loss(layers, expert_counts(layers, 6), 50)
    theirs = load_balancing_loss_func((layers[0].logits,), 6, 2)
    torch.testing.assert_close(ours, theirs)


def test_layers_are_not_pooled_so_opposite_imbalances_do_not_cancel() -> None:
    first = torch.full((8, 2), -5.0)
    first[:, 0] = 5.0
    second = first.flip(1)
    layers = [LayerRouting(logits, logits.topk(1, dim=-1).indices) for logits in (first, second)]
    pooled = load_balancing_loss_func((first, second), 2, 1)
    ours = load_balancing_loss(layers, expert_counts(layers, 2), 8)
    assert pooled.item() == pytest.approx(1.0, abs=1e-3)
    assert ours.item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_every_moe_layer_is_recorded_once_per_forward(kind: str, model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder(kind))
    batch = collate(samples(2))
    with built.routing.recording() as layers:
        built.model.base_model(**text_inputs(batch))
    assert [layer.index.shape for layer in layers] == [(25, 2)] * 2
    assert expert_counts(layers, 6).sum(1).tolist() == [50, 50]
    built.model.base_model(**text_inputs(batch))
    assert len(layers) == 2


def test_probabilities_are_no_logits() -> None:
    layers = random_layers(50, 6, 2, 2)
    check_recorded(layers, ["a", "b"])
    with pytest.raises(ModelError, match="router_aux_loss_coef: 2 .* 3 routers"):
        check_recorded(layers, ["a", "b", "c"])
    softened = [LayerRouting(layer.logits.softmax(-1).bfloat16(), layer.index) for layer in layers]
    with pytest.raises(ModelError, match=r"router_aux_loss_coef: .*\(a\) .*probabilities"):
        check_recorded(softened, ["a", "b"])


def test_routers_that_say_nothing_cannot_be_balanced(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2_moe")
    built = build(folder)
    deaf = replace(built, routing=RoutingRecorder(build(folder).model))
    SftObjective(built, 0.1)
    SftObjective(deaf, 0.0)
    with pytest.raises(ModelError, match="router_aux_loss_coef: 0 .* 2 routers"):
        SftObjective(deaf, 0.1)


def test_a_dense_model_has_no_routers() -> None:
    assert RoutingRecorder(make_model("llama")).names == []


def aux_gradients(built: BuiltModel, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    objective = SftObjective(built, aux_loss_coef=0.5)
    totals = BatchTotals(
        sum(b.num_tokens for b in batches), sum(b.num_trained for b in batches), sum(b.trained_weight for b in batches)
    )
    built.model.zero_grad()
    objective.begin_step(batches)
    total = 0.0
    for batch in batches:
        parts = objective.loss(batch, totals)
        parts.total.backward()
        assert parts.aux is not None
        total += parts.aux.item()
    gradients = {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}
    return {"aux": torch.tensor(total), **gradients}


def test_the_loss_does_not_depend_on_accumulation(model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder("qwen2_moe"))
    rows = samples(4)
    together = aux_gradients(built, [collate(rows)])
    apart = aux_gradients(built, [collate([row]) for row in rows])
    assert together["aux"] > 0.5
    assert together.keys() == apart.keys()
    for name, value in together.items():
        torch.testing.assert_close(
            apart[name], value, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_loss_reaches_the_routers(model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder("mixtral"))
    batch = collate(samples(3))
    gradients = []
    for coefficient in (0.0, 0.5):
        objective = SftObjective(built, aux_loss_coef=coefficient)
        built.model.zero_grad()
        objective.begin_step([batch])
        objective.loss(batch, BatchTotals(batch.num_tokens, batch.num_trained, batch.trained_weight)).total.backward()
        gradients.append(built.model.model.layers[0].mlp.gate.weight.grad.clone())
    assert not torch.allclose(*gradients)


class FickleRouter:
    """Decides differently each time it is asked, as another reduction order on a GPU can."""

    def __init__(self) -> None:
        self.calls, self.noise = 0, 0.0

    def choose(self, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls += 1
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.t()
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(self.calls))
        values, index = torch.topk((logits + self.noise * noise).softmax(-1), router.top_k, dim=-1)
        return logits, values, index


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself, and fails where a warning is an error
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("is_observed", [False, True])
def test_checkpointing_uses_the_first_forwards_routing_again(
    is_observed: bool, compiled: bool, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the router was seen to choose, or its block is taken to."""
    fickle = FickleRouter()
    monkeypatch.setattr(MixtralTopKRouter, "forward", lambda self, hidden: fickle.choose(self, hidden))
    if not is_observed:
        monkeypatch.setattr(KeptChoices, "_observe", lambda *_: None)
    if compiled:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        torch._dynamo.reset()
    built = build(model_folder("mixtral"), gradient_checkpointing=True)
    if compiled:
        compile_layers(built)
    fickle.calls, fickle.noise = 0, 1.0
    seen: list[torch.Tensor] = []
    for layer in built.model.base_model.layers:  # type: ignore[union-attr]
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].clone()))  # type: ignore[union-attr,operator]
    batch = collate(samples(2))
    hidden = built.model.base_model(**text_inputs(batch)).last_hidden_state
    hidden.sum().backward()
    assert fickle.calls == 4, "two layers, each forward and recomputed"
    first, second = seen[:2], seen[2:][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_checkpointing_gives_the_same_gradients(kind: str, model_folder: Callable[[str], Path]) -> None:
    found = []
    for enabled in (False, True):
        built = build_model(
            model_folder(kind),
            lora=LoraSettings(rank=4, alpha=8, targets=("all",)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            gradient_checkpointing=enabled,
        )
        objective = SftObjective(built, aux_loss_coef=0.1 if kind == "mixtral" else 0.0)
        batch = collate(samples(3))
        objective.begin_step([batch])
        objective.loss(batch, BatchTotals(batch.num_tokens, batch.num_trained, batch.trained_weight)).total.backward()
        found.append({n: p.grad for n, p in built.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replayed_experts_get_the_weights_of_the_routers_own_logits(
    kind: str, checkpointing: bool, model_folder: Callable[[str], Path]
) -> None:
    built = build(model_folder(kind), gradient_checkpointing=checkpointing)
    batch = collate(samples(2))
    tokens = batch.ids.shape[1]
    wanted = torch.stack([torch.randperm(6)[:2] for _ in range(2 * tokens)]).view(tokens, 2, 2).short()
    wanted[3] = -1  # one token goes where its routers say
    outputs: list[tuple[torch.Tensor, ...]] = []
    for name in built.routing.names:
        built.model.get_submodule(name).register_forward_hook(lambda _m, _i, output: outputs.append(output))
    with ReplayedRouting(wanted) as replayed:
        hidden = built.model.base_model(**text_inputs(batch)).last_hidden_state
    hidden.square().sum().backward()
    gate = built.model.get_submodule(built.routing.names[0])
    assert len(outputs) == (4 if checkpointing else 2)
    for logits, weights, index in outputs[:2]:
        expected = logits.float().softmax(-1).gather(-1, index)
        if kind == "mixtral" or gate.norm_topk_prob:
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, expected)
    for layer, (_, _, index) in enumerate(outputs[:2]):
        told = [token for token in range(tokens) if token != 3]
        assert torch.equal(index[told], wanted[told, layer].long())
        assert torch.equal(index[3], replayed.own[layer][3])
    if checkpointing:
        for once, again in zip(outputs[:2], outputs[:1:-1], strict=True):
            assert torch.equal(once[2], again[2])
    assert gate.weight.grad.abs().sum() > 0


def test_replaying_what_routers_choose_anyway_changes_nothing(model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder("qwen2_moe"))
    batch = collate(samples(2))
    gradients = []
    with built.routing.recording() as layers:
        built.model.base_model(**text_inputs(batch)).last_hidden_state.square().sum().backward()
    gradients.append([p.grad.clone() for p in built.model.parameters() if p.grad is not None])
    built.model.zero_grad()
    with ReplayedRouting(torch.stack([layer.index for layer in layers], dim=1)):
        built.model.base_model(**text_inputs(batch)).last_hidden_state.square().sum().backward()
    gradients.append([p.grad.clone() for p in built.model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("shape", [(25, 1, 2), (25, 3, 2), (25, 2, 3), (24, 2, 2)])
def test_choices_of_another_model_are_refused(shape: tuple[int, ...], model_folder: Callable[[str], Path]) -> None:
    built = build(model_folder("mixtral"))
    with pytest.raises(ModelError, match="routing_replay: .*rout"), ReplayedRouting(torch.zeros(shape)):
        built.model.base_model(**text_inputs(collate(samples(2))))


def test_routers_that_do_not_say_what_they_chose_cannot_be_replayed(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2_moe")
    given = {"model": str(folder), "dataset": [{"path": "x"}], "output_dir": "x", "num_iterations": 2}
    config = GrpoConfig.model_validate({**given, "routing_replay": "first"})
    built = build(folder)
    GrpoObjective(built, config)
    deaf = replace(built, routing=RoutingRecorder(build(folder).model))
    with pytest.raises(ModelError, match="routing_replay: 0 .* 2 .*Qwen2MoeForCausalLM"):
        GrpoObjective(deaf, config)


def test_the_reference_goes_its_own_ways(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2_moe")
    given = {"model": str(folder), "dataset": [{"path": "x"}], "output_dir": "x", "beta": 0.1}
    objective = GrpoObjective(build(folder), GrpoConfig.model_validate({**given, "routing_replay": "rollout"}))
    made = Trajectory([5, 6, 7], [8, 9], [0.0, 0.0], 1.0, 1.0, "x:1")
    found = []
    for experts in (None, encode_experts(np.tile(np.int16([4, 5]), (4, 2, 1)))):
        (batch,) = objective.begin_step([collate_completions([replace(made, experts=experts)], share_prompts=False)])
        assert isinstance(batch, CompletionBatch)
        losses = objective.loss(batch, BatchTotals(5, 2, 2.0)).main
        assert batch.reference_logprobs is not None
        found.append((batch.reference_logprobs, losses.detach()))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])


def sent_to(model: nn.Module, tokens: int) -> list[torch.Tensor]:
    """Collect, in the order of the forward, the experts [T, K] that each module of experts gets, sorted per token."""
    sent: list[torch.Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(inputs) == 1:  # a copy of all tokens for each expert
            chosen = inputs[0].view(-1, tokens, inputs[0].shape[-1]).any(-1).t()
            sent.append(chosen.nonzero()[:, 1].view(tokens, -1))
        else:
            sent.append(inputs[1].sort(-1).values)

    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(keep)
    return sent


@pytest.mark.parametrize("kind", sorted(expert_models.CONFIGS.keys() - {"dbrx", "jetmoe"}))
def test_routers_of_every_form_report_where_they_send_tokens(kind: str) -> None:
    model = expert_models.build(kind, "full")
    recorder = RoutingRecorder(model)
    sent = sent_to(model, expert_models.TOKENS)
    with recorder.recording() as layers:
        expert_models.loss_of(model)
    assert len(layers) == len(recorder.names) == len(sent) > 0
    for layer, experts in zip(layers, sent, strict=True):
        assert torch.equal(layer.index.sort(-1).values, experts)
        assert layer.logits.shape == (expert_models.TOKENS, recorder.num_experts)


def test_rows_that_routers_sort_by_expert_are_counted_in_the_order_of_the_forward() -> None:
    model = expert_models.build("jetmoe", "full")
    recorder = RoutingRecorder(model)
    sizes: list[list[int]] = []
    for module in model.modules():
        if type(module).__name__ == "JetMoeTopKGating":
            module.register_forward_hook(lambda _module, _inputs, output: sizes.append(output[3]))
    with recorder.recording() as layers:
        expert_models.loss_of(model)
    assert ["attention" in name for name in recorder.names] == [True, False, True, False]
    assert expert_counts(layers, 4).tolist() == sizes
    with torch.no_grad():
        for layer in layers:
            best = layer.logits.topk(2).indices
            assert torch.equal(layer.index.sort(-1).values, best.sort(-1).values)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "longcat", "llama4"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_reaches_the_experts_whatever_the_router_chooses_before(kind: str, checkpointing: bool) -> None:
    model = expert_models.build(kind, "full")
    if checkpointing:
        options = {"use_reentrant": False, "context_fn": KeptChoices(model)}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    recorder = RoutingRecorder(model)
    assert recorder.num_experts is not None
    shape = (expert_models.TOKENS, len(recorder.names), recorder.num_experts)
    wanted = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    sent = sent_to(model, expert_models.TOKENS)
    with ReplayedRouting(wanted, recorder.num_experts):
        loss = expert_models.loss_of(model)
    loss.backward()
    layers = [layer.sort(-1).values for layer in wanted.unbind(1)]
    expected = [*layers, *layers[::-1]] if checkpointing else layers
    assert len(sent) == len(expected)
    assert all(torch.equal(found, layer) for found, layer in zip(sent, expected, strict=True))


class _CountedChoices(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.indices: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.indices.append(output[1])
        return output


@pytest.mark.parametrize("kind", sorted(expert_models.CONFIGS.keys() - {"jetmoe"}))  # it supports no checkpointing
@pytest.mark.parametrize("forwards_before", [0, 1])
def test_every_choice_of_a_forward_is_kept(kind: str, forwards_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that choose are all known, also before the first forward has shown which of them do."""
    model = expert_models.build(kind, "full")
    kept: list[torch.Tensor] = []
    contexts = KeptChoices(model)

    def remember() -> Any:
        first, again = contexts()
        monkeypatch.setattr(first._own, "_chosen", kept)
        return first, again

    for _ in range(forwards_before):
        expert_models.loss_of(model)
    options = {"use_reentrant": False, "context_fn": remember}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    with _CountedChoices() as counted:
        expert_models.loss_of(model)
    assert kept
    assert len(kept) == len(counted.indices)
    assert all(torch.equal(one, other) for one, other in zip(kept, counted.indices, strict=True))


def test_a_router_that_returns_no_choice_is_not_recorded() -> None:
    model = expert_models.build("dbrx", "full")
    recorder = RoutingRecorder(model)
    with recorder.recording() as layers:
        expert_models.loss_of(model)
    assert len(recorder.names) == 2
    assert not layers
    with pytest.raises(ModelError):
        check_recorded(layers, recorder.names)
