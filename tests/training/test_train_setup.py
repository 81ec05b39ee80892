"""What a train_context holds while it computes, and what it copies to be saved."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.config import load_config
from surefoot.config.resolve import resolve
from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import ModelError
from surefoot.methods.base import BatchTotals, TrainContext
from surefoot.models.build import build_model
from surefoot.planner.live_tensors import LiveTensors
from surefoot.training.async_checkpoint import Saver
from surefoot.training.train_setup import build_train_context
from tests.support.batches import batch


def train_context_of(settings: dict[str, Any], **changes: Any) -> TrainContext:
    run = resolve(load_config(None, [], {**settings, "tuning": "full", "lora_rank": 8, **changes}), 1).run
    return build_train_context(run, Path(settings["model"]), SINGLE_PROCESS, torch.device("cpu"), None)


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_checkpointed_layers_leave_no_copy_of_their_weights(settings: dict[str, Any], is_checkpointed: bool) -> None:
    """Without checkpointing autograd keeps what it multiplied with; with it nothing may."""
    train_context = train_context_of(settings, dtype="bfloat16", gradient_checkpointing=is_checkpointed)
    weights = [layer.self_attn.q_proj.weight for layer in train_context.model.get_decoder().layers]
    copied = _Copies(weights)
    rows = batch()
    totals = BatchTotals(rows.num_tokens, rows.num_trained, float(rows.num_trained))
    with train_context.forward_context(), copied:
        loss = train_context.objective.loss(rows, totals).total
        alive = copied.alive()
    assert loss.requires_grad
    assert alive == (0 if is_checkpointed else len(weights))


class _Copies(LiveTensors):
    """Counts bfloat16 copies of weights that are alive."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights)
        self._of = {weight.untyped_storage()._cdata for weight in weights}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        is_copy = func is torch.ops.aten._to_copy.default and output.dtype == torch.bfloat16
        if is_copy and args[0].untyped_storage()._cdata in self._of:
            self._made.add(output.untyped_storage()._cdata)
        return output

    def _on_storage_freed(self, key: int, size: int, kind: str) -> None:
        self._made.discard(key)
        super()._on_storage_freed(key, size, kind)

    def alive(self) -> int:
        return len(self._made)


def test_a_rollout_keeps_its_copies_from_token_to_token(settings: dict[str, Any]) -> None:
    for stage, keeps in ((2, True), (3, False)):  # with ZeRO 3 they would be the whole model on each rank
        with train_context_of(settings, dtype="bfloat16", zero_stage=stage).rollout_context():
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_cache_enabled() == keeps


@pytest.mark.parametrize(("rank", "copies"), [(0, True), (1, False)])
def test_a_rank_copies_what_it_writes_and_no_more(
    model_folder: Callable[[str], Path], tmp_path: Path, rank: int, copies: bool
) -> None:
    """Where each has all of it, the first one writes."""
    folder = model_folder("llama")
    model = build_model(folder, lora=None, device=torch.device("cpu"), dtype=torch.float32).model
    parameters = dict(model.named_parameters())
    saver = Saver(tmp_path, {}, None, World(rank, 2))
    blocks = saver._copy_blocks(parameters, torch.optim.AdamW(parameters.values()))
    assert blocks["model"].keys() == (parameters.keys() if copies else set())


def test_a_broken_config_of_the_model_is_not_blamed_on_the_targets(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(settings["model"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "square"}))
    with pytest.raises(ModelError, match=r"'square', the value of hidden_act\. [^()]*\.$"):
        surefoot.train(settings, screen=False, model=str(folder))
