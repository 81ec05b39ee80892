"""A run without storage holds what a run with storage holds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from surefoot.config import DatasetItem
from surefoot.config.schema import Checkpointing
from surefoot.methods.base import BatchTotals
from surefoot.methods.grpo.batch import Trajectory, collate_completions
from surefoot.methods.grpo.loss import GrpoObjective, PlannedPolicyLoss, PolicyLoss
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.sft.method import Sft, SftObjective
from surefoot.methods.sft.settings import SftConfig
from surefoot.models.build import build_model, build_without_storage
from surefoot.models.lora import LoraSettings
from surefoot.planner.expert_dispatch import shard_experts
from surefoot.planner.live_tensors import LiveTensors
from surefoot.planner.trace import ATTENTION, Trace, _track_layers, make_shaped_batch, trace_step
from tests.models.architectures import tiny_model
from tests.support.batches import LENGTHS, batch
from tests.support.models import make_model

pytestmark = pytest.mark.slow

Folders = Callable[[str], Path]
SFT = SftConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o")
LORA = LoraSettings(4, 8, targets=("all",))


def traced(
    folder: Path, lora: LoraSettings | None, *, checkpointing: Checkpointing = False, layers: int | None = None,
    is_accumulated: bool = False, share: float = 1.0, lengths: list[int] = LENGTHS, dtype: torch.dtype = torch.float32,
) -> Trace:  # fmt: skip
    with FakeTensorMode():
        built = build_without_storage(
            folder, lora=lora, dtype=dtype, gradient_checkpointing=checkpointing, packed_attention=ATTENTION,
            layers=layers,
        )  # fmt: skip
        batch = make_shaped_batch(lengths, sum(lengths) - len(lengths))
        forward = Sft.planned_loss(SFT)(built, batch)
        return trace_step(built, batch, forward, is_on_gpu=False, is_accumulated=is_accumulated, gradient_share=share)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        *product(("llama", "mixtral", "qwen2_moe"), (False, True)),
        ("mixtral", "selective"),
        ("qwen2_moe", "selective"),
    ],
)
def test_the_peak_is_that_of_real_tensors(
    kind: str, lora: LoraSettings | None, checkpointing: Checkpointing, model_folder: Folders
) -> None:
    folder = model_folder(kind)
    told = traced(folder, lora, checkpointing=checkpointing)
    measured = measure_moments(folder, lora, checkpointing=checkpointing)
    assert told.moments == tuple(pytest.approx(moment, rel=0.02, abs=4096) for moment in measured)


@pytest.mark.long
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma2", "qwen3_5_moe_text", "lfm2_moe", "mamba2", "deepseek_v32", "bloom"]
)
def test_the_peak_of_every_kind_of_layer_is_that_of_real_tensors(
    name: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    """Recurrent layers fill a sample up to whole chunks: here two samples of whole chunks."""
    tiny_model(name).save_pretrained(tmp_path)
    lengths = [256, 512]
    told = traced(tmp_path, lora, lengths=lengths)
    measured = measure_moments(tmp_path, lora, lengths=lengths)
    peak = max(moment[0] + moment[1] for moment in measured)
    assert told.peak + told.gradients_at_peak == pytest.approx(peak, rel=0.03)


def measure_moments(
    folder: Path, lora: LoraSettings | None, *, checkpointing: Checkpointing = False, lengths: list[int] = LENGTHS
) -> tuple[tuple[int, int, int], ...]:
    """Return the `Trace.moments` of a step with storage and values."""
    built = build_model(
        folder, lora=lora, device=torch.device("cpu"), dtype=torch.float32, gradient_checkpointing=checkpointing
    )
    objective = SftObjective(built, 0.0)
    real = batch(lengths)
    totals = BatchTotals(real.num_tokens, real.num_trained, float(real.num_trained))
    known = [*built.model.parameters(), *built.model.buffers(), real.ids, real.position_ids, real.target_positions]
    live = LiveTensors(known, vocabulary=built.model.config.vocab_size)
    for parameter in built.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.keep_gradient)
    with _track_layers(built.model, live), live:
        loss = objective.loss(real, totals).total
        live.begin_backward()
        loss.backward()
    return (*live.forward_moments(), *live.backward_moments())


@pytest.mark.parametrize("loss_type", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["first", "kept"])
def test_the_peak_of_grpo_is_that_of_real_tensors(loss_type: str, is_kept: bool, model_folder: Folders) -> None:
    """`kept`: with log-probabilities of an earlier step and of the reference."""
    folder, prompt, answer, count = model_folder("llama"), 20, 60, 3
    more = {"beta": 0.1, "num_iterations": 2} if is_kept else {}
    config = GrpoConfig(model="m", dataset=[DatasetItem(path="d")], output_dir="o", loss_type=loss_type, **more)  # type: ignore[arg-type]
    with FakeTensorMode():
        built = build_without_storage(
            folder, lora=LORA, dtype=torch.float32, gradient_checkpointing=False, packed_attention=ATTENTION
        )
        shaped = make_shaped_batch([prompt + answer] * count, answer * count)
        forward = PlannedPolicyLoss(answer, PolicyLoss.of(config))(built, shaped)
        told = trace_step(built, shaped, forward, is_on_gpu=False, is_accumulated=False)
    real = build_model(folder, lora=LORA, device=torch.device("cpu"), dtype=torch.float32)
    kept = [-1.0] * answer if is_kept else None
    one = Trajectory([5] * prompt, [6] * answer, [-1.0] * answer, 0.5, 1.0, "x:1", (), kept, kept)
    policy = collate_completions([one] * count, share_prompts=False)
    objective = GrpoObjective(real, config)
    (policy,) = objective.begin_step([policy])
    tensors = [value for value in vars(policy).values() if isinstance(value, torch.Tensor)]
    live = LiveTensors([*real.model.parameters(), *real.model.buffers(), *tensors])
    for parameter in real.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.keep_gradient)
    with live:
        objective.loss(policy, BatchTotals(1, 1, 1.0)).total.backward()
    seen = (*live.forward_moments(), *live.backward_moments())
    assert told.peak == pytest.approx(max(moment[0] for moment in seen), rel=0.03)


@pytest.mark.long
def test_recomputed_layers_with_a_wide_gate_lie_on_a_line(model_folder: Folders, tmp_path: Path) -> None:
    """The first layer has a smaller peak, and of two layers one is the first."""
    config = json.loads((model_folder("llama") / "config.json").read_text())
    wide = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps({**config, **wide}))
    few, deeper, whole = (
        traced(tmp_path, LORA, checkpointing=True, layers=layers, lengths=[2000], dtype=torch.bfloat16)
        for layers in (2, 4, None)
    )
    assert few.with_layers(deeper, 2, 4, 12).peak == pytest.approx(whole.peak, rel=0.002)


@pytest.mark.matrix
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.matrix), 0.125])
def test_equal_layers_lie_on_a_line(
    lora: LoraSettings | None, share: float, model_folder: Folders, tmp_path: Path
) -> None:
    """A large vocabulary puts the peak elsewhere in shallow models than in deep ones."""
    config = json.loads((model_folder("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 24, "vocab_size": 6000}))
    whole = traced(tmp_path, lora, share=share)
    told = traced(tmp_path, lora, layers=2, share=share).with_layers(
        traced(tmp_path, lora, layers=4, share=share), 2, 4, 24
    )
    assert told.peak + share * told.gradients_at_peak == pytest.approx(
        whole.peak + share * whole.gradients_at_peak, rel=0.02
    )
    assert told.flops == whole.flops
    assert told.moved_bytes == whole.moved_bytes > 0
    assert min(min(moment) for moment in told.moments) >= 0


FAST = [(torch.float32, False, 8), (torch.bfloat16, True, 2000)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "checkpointing", "length"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.matrix)
        for case in product((torch.float32, torch.bfloat16), (False, True), (8, 2000))
    ],
)
def test_each_moment_of_a_deep_model_is_on_the_line(
    dtype: torch.dtype, checkpointing: Checkpointing, length: int, model_folder: Folders, tmp_path: Path
) -> None:
    """In shallow models the output layer's backward is the peak, in deep ones what the layers keep may be."""
    config = json.loads((model_folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 14, "vocab_size": 3000}))

    def of(layers: int | None) -> Trace:
        return traced(
            tmp_path,
            None,
            checkpointing=checkpointing,
            layers=layers,
            lengths=[length],
            dtype=dtype,
            is_accumulated=True,
        )

    whole, told = of(None), of(2).with_layers(of(4), 2, 4, 14)
    for places in ("moments", "evaluation"):
        assert getattr(told, places) == tuple(pytest.approx(moment, rel=0.001) for moment in getattr(whole, places))


def test_products_are_counted(model_folder: Folders) -> None:
    """Six times the weights that multiply, for each token, and attention; in full training."""
    folder = model_folder("llama")
    told = traced(folder, None)
    with FakeTensorMode():
        model = build_without_storage(
            folder, lora=None, dtype=torch.float32, gradient_checkpointing=False, packed_attention=ATTENTION
        ).model
        weights = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2)
        attention = sum(length**2 for length in LENGTHS) * model.config.hidden_size * model.config.num_hidden_layers
        head = model.config.vocab_size * model.config.hidden_size * sum(length - 1 for length in LENGTHS)
    least = 6 * weights * sum(LENGTHS) + 6 * attention + 6 * head
    assert told.flops == pytest.approx(least, rel=0.1)


def test_what_other_ops_read_and_write_is_counted() -> None:
    with FakeTensorMode():
        table, at = torch.empty(1000, 8), torch.empty(10, dtype=torch.int64)
        for work, moved in (
            (lambda: torch.nn.functional.embedding(at, table), 2 * 320),  # the rows that it picks, in and out
            (lambda: table + table, 3 * 32000),
            (lambda: table.mul_(2), 2 * 32000),
            (lambda: table.zero_(), 32000),
            (lambda: table.copy_(table + 1), 2 * 32000 + 2 * 32000),  # the sum, and the copy
            (lambda: table.sum(), 32000 + 4),
            (lambda: table.view(-1), 0),
            (lambda: torch.empty_like(table), 0),
            (lambda: table @ table.T, 0),  # a product
        ):
            live = LiveTensors([table, at])
            with live:
                work()
            assert live.moved == moved


def test_gradients_that_accumulate_are_there_from_the_second_forward_on(model_folder: Folders) -> None:
    folder = model_folder("llama")
    once, twice = traced(folder, None), traced(folder, None, is_accumulated=True)
    assert twice.peak + twice.gradients_at_peak > once.peak + once.gradients_at_peak
    assert once.flops == twice.flops


@pytest.mark.long
def test_rows_that_travel_to_experts_are_those_of_two_ranks(tmp_path: Path) -> None:
    """Of two experts both are chosen for each token, so each rank gets as many rows as it sends."""
    make_model("mixtral", num_experts=2, top_k=2).save_pretrained(tmp_path)
    tokens = 300
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("expert_dispatch_ranks.py")), str(tmp_path), str(tokens)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    saved, peak, forward_bytes = (int(one) for one in done.stdout.split())
    with FakeTensorMode():
        built = build_without_storage(
            tmp_path, lora=LoraSettings(4, 8, targets=("attention",)), dtype=torch.float32,
            gradient_checkpointing=False, packed_attention=ATTENTION,
        )  # fmt: skip
        shard_experts(built.model, 2)
        batch = make_shaped_batch([tokens], tokens - 1)
        told = trace_step(built, batch, Sft.planned_loss(SFT)(built, batch), is_on_gpu=False, is_accumulated=False)
    assert sum(told.saved_by_kind.values()) == pytest.approx(saved, rel=0.02)
    assert told.peak == pytest.approx(peak, rel=0.05)
    assert told.exchanged_bytes == 2 * forward_bytes


def test_with_few_tokens_the_peak_is_where_all_gradients_are(model_folder: Folders) -> None:
    told = traced(model_folder("llama"), None, lengths=[3])
    with FakeTensorMode():
        model = build_without_storage(
            model_folder("llama"),
            lora=None,
            dtype=torch.float32,
            gradient_checkpointing=False,
            packed_attention=ATTENTION,
        ).model
        weights = sum(parameter.numel() for parameter in model.parameters())
    assert told.peak + told.gradients_at_peak >= 4 * weights
