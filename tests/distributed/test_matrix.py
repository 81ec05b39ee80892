"""The invariance contract: a run has the same numbers on every topology, and its checkpoints go on on any other."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.training.sharded_tensors import ShardedTensors
from tests.support.grpo import GRPO
from tests.support.runs import settings_of
from tests.support.vision import KINDS

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
STEPS = 7
"""The checkpoint of step 5 is in the middle of two steps with the same completions; step 6 begins the second epoch."""
NORM_TOLERANCE = 1e-6
"""Of the gradient norm, which every rank's share enters in float64. Gradients are summed in float32."""
CANCELLED = 1e-6
"""What rounding leaves of a loss of GRPO: advantages of a group add up to 0."""

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2-zero0": (2, {"zero_stage": 0}),
    "2-zero1": (2, {"zero_stage": 1}),
    "2-zero2": (2, {"zero_stage": 2}),
    "2-zero3": (2, {"zero_stage": 3}),
    "2-ep2": (2, {"expert_parallel_size": 2}),
    "2-ep2-zero3": (2, {"expert_parallel_size": 2, "zero_stage": 3}),
    "3-zero2": (3, {"zero_stage": 2}),
    "3-zero3": (3, {"zero_stage": 3}),
    "4-zero1": (4, {"zero_stage": 1}),
    "4-zero2": (4, {"zero_stage": 2}),
    "4-zero3": (4, {"zero_stage": 3}),
    "4-ep2-zero3": (4, {"expert_parallel_size": 2, "zero_stage": 3}),
    "4-ep4": (4, {"expert_parallel_size": 4}),
    "4-replicate2-ep2-zero3": (4, {"dp_replicate_size": 2, "expert_parallel_size": 2, "zero_stage": 3}),
    "5-zero3": (5, {"zero_stage": 3}),
}
JOBS: dict[str, dict[str, Any]] = {
    "llama-full": {"model": "llama", "tuning": "full", "eval_fraction": 0.2},
    "mixtral-lora-packed": {"model": "mixtral", "packing": True, "global_batch_size": 3},
    "mixtral-full": {"model": "mixtral", "tuning": "full", "gradient_checkpointing": "selective"},
    "qwen2_moe-lora": {"model": "qwen2_moe", "router_aux_loss_coef": 0.01, "gradient_checkpointing": "selective"},
    "qwen2_moe-lora-router": {
        "model": "qwen2_moe",
        "target_modules": ["all", "router"],
        "gradient_checkpointing": True,
    },
    "few-full": {"model": "few", "tuning": "full", "router_aux_loss_coef": 0.01},
    "qwen2_moe-full-one-row": {
        "model": "qwen2_moe",
        "tuning": "full",
        "router_aux_loss_coef": 0.01,
        "global_batch_size": 1,
    },
    "qwen2_moe-grpo": {
        "model": "qwen2_moe",
        **GRPO,
        "beta": 0.1,
        "num_iterations": 2,
        "routing_replay": "rollout",
    },
    "llama-full-grpo": {"model": "llama", "tuning": "full", **GRPO, "eval_fraction": 0.2},
    "qwen2_5_vl-lora": {"model": "qwen2_5_vl", "target_modules": ["all", "vision"], "max_length": 256},
    "qwen3_vl_moe-full": {"model": "qwen3_vl_moe", "tuning": "full", "freeze_vision_tower": False, "max_length": 256},
    "qwen2_5_vl-grpo": {
        "model": "qwen2_5_vl",
        **GRPO,
        "target_modules": ["all", "vision"],
        "max_length": 256,
        "eval_fraction": 0.2,
    },
    "qwen3_vl-grpo": {
        "model": "qwen3_vl",
        **GRPO,
        "target_modules": ["all", "vision"],
        "max_length": 256,
        "num_iterations": 2,
    },
    "qwen3_vl_moe-grpo": {"model": "qwen3_vl_moe", **GRPO, "max_length": 256, "routing_replay": "rollout"},
    "one_expert-lora": {"model": "one_expert", "global_batch_size": 1},
    "wide-full": {"model": "wide", "tuning": "full"},
    "one_expert-full": {"model": "one_expert", "tuning": "full", "router_aux_loss_coef": 0.01, "global_batch_size": 3},
}
FAST = ("1", "2-zero3", "2-ep2-zero3")
FAST_JOBS = ("qwen2_moe-lora", "qwen2_moe-grpo")
"""`make test` runs these on those, `make test-long` every fifth other pair, and `make test-matrix` the rest."""
MARKS: dict[str, Any] = {"test": (), "test-long": pytest.mark.long, "test-matrix": pytest.mark.matrix}
WIDE_TOPOLOGIES = ("1", "2-zero3", "2-ep2")
"""Enough to cut tensors of millions of elements in every way; each writes 200 MB."""

RESUMED_JOBS = ("qwen2_moe-lora", "mixtral-full", "qwen2_moe-grpo", "qwen3_vl_moe-grpo")
MIDDLE = Path("checkpoints", "step-00000005")
RESUMES = [
    ("2-zero3", "1"), ("1", "2-ep2-zero3"), ("2-zero2", "1"),
    ("2-ep2-zero3", "2-zero2"), ("2-zero3", "2-ep2"), ("4-ep2-zero3", "3-zero2"),
    ("5-zero3", "4-replicate2-ep2-zero3"), ("4-ep4", "1"), ("3-zero3", "5-zero3"),
]  # fmt: skip


def _target(topology: str, job: str) -> str:
    """Return the target of the Makefile that runs a job on a topology."""
    if topology in FAST and job in FAST_JOBS:
        return "test"
    number = list(TOPOLOGIES).index(topology) + list(JOBS).index(job)
    return "test-long" if topology == "1" or number % 5 == 0 else "test-matrix"


def _target_of_resume(before: str, after: str, job: str) -> str:
    """Return the target that resumes a job on another topology: the later target of the job on either."""
    return max((_target(topology, job) for topology in (before, after)), key=list(MARKS).index)


def _is_possible(topology: str, job: str) -> bool:
    if job.startswith("wide"):
        return topology in WIDE_TOPOLOGIES
    ranks = TOPOLOGIES[topology][1].get("expert_parallel_size", 1)
    return ranks == 1 or not (
        job.startswith(("llama", "qwen2_5_vl", "qwen3_vl-")) or (job.startswith("few") and ranks == 4)
    )


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, Any]]
    weights: dict[str, Tensor]


class Runs:
    """Runs all jobs of topologies with as many ranks, in the same processes, when the first one is asked for.

    Those of each target apart.
    """

    def __init__(self, root: Path, start: Callable[[str, str, Path], dict[str, Any]], run_on: Any) -> None:
        self._root, self._settings, self._run_on = root, start, run_on
        self._done: set[Path] = set()

    def folder(self, topology: str, job: str) -> Path:
        folder = self._root / topology / job
        if folder not in self._done:
            wanted = {
                self._root / name / each: self._settings(name, each, self._root / name / each)
                for name, (ranks, _) in TOPOLOGIES.items()
                for each in JOBS
                if ranks == TOPOLOGIES[topology][0]
                and _target(name, each) == _target(topology, job)
                and _is_possible(name, each)
            }
            self._done |= wanted.keys()
            self._run_on(TOPOLOGIES[topology][0], list(wanted.values()))
        return folder

    def resumed(self, before: str, after: str, job: str) -> Path:
        """The folder of a run that went on from step 5 of another; `resharded` in it holds what it loaded."""
        folder = self._root / f"{before}-then-{after}" / job
        if folder not in self._done:
            target = _target_of_resume(before, after, job)
            ranks = TOPOLOGIES[after][0]
            jobs = []
            for one, other in (pair for pair in RESUMES if TOPOLOGIES[pair[1]][0] == ranks):
                for each in (name for name in RESUMED_JOBS if _target_of_resume(one, other, name) == target):
                    output = self._root / f"{one}-then-{other}" / each
                    middle = self.folder(one, each) / MIDDLE
                    settings = {**self._settings(other, each, output), "resume_from_checkpoint": str(middle)}
                    jobs += [settings, {**settings, "reshard_to": str(output / "resharded")}]
                    self._done.add(output)
            self._run_on(ranks, jobs)
        return folder

    def outcome(self, topology: str, job: str) -> Outcome:
        return outcome_of(self.folder(topology, job))


def outcome_of(folder: Path) -> Outcome:
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    artifact = json.loads((folder / "summary.json").read_text())["artifact"]
    weights = {
        name: value for path in sorted(Path(artifact).glob("*.safetensors")) for name, value in load_file(path).items()
    }
    return Outcome(metrics, weights)


@pytest.fixture(scope="session")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    parallel_model: Any,
    parallel_data: Path,
    picture_data: Path,
    run_on: Any,
) -> Runs:
    def settings(topology: str, job: str, output: Path) -> dict[str, Any]:
        changes = {**JOBS[job], **TOPOLOGIES[topology][1], "save_steps": 5, "max_steps": STEPS}
        kind = changes.pop("model")
        return settings_of(parallel_model(kind), picture_data if kind in KINDS else parallel_data, output, **changes)

    return Runs(tmp_path_factory.mktemp("matrix"), settings, run_on)


def _cases(topologies: Sequence[str]) -> list[Any]:
    return [
        pytest.param(topology, job, marks=MARKS[_target(topology, job)])
        for topology in topologies
        for job in JOBS
        if _is_possible(topology, job)
    ]


@pytest.mark.parametrize(("topology", "job"), _cases([name for name in TOPOLOGIES if name != "1"]))
def test_a_run_is_the_same_on_every_topology(runs: Runs, topology: str, job: str) -> None:
    alone, spread = runs.outcome("1", job), runs.outcome(topology, job)
    assert len([line for line in spread.metrics if "loss" in line]) == STEPS
    for one, other in zip(alone.metrics, spread.metrics, strict=True):
        assert other.keys() == one.keys()
        for name in one.keys() & {"loss", "aux_loss", "eval_loss", "entropy", "kl", "ratio"}:
            assert other[name] == pytest.approx(one[name], rel=TOLERANCE, abs=CANCELLED), (name, one["step"])
        if "grad_norm" in one:
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=NORM_TOLERANCE), one["step"]
        for name in ("reward", "reward_std", "completion_length", "policy_version", "eval_reward"):
            assert other.get(name) == one.get(name), (name, one["step"])
        for name in ("tokens", "trained_tokens", "epoch", "learning_rate", "expert_load"):  # the same rows
            assert other.get(name) == one.get(name), (name, one["step"])
    assert spread.weights.keys() == alone.weights.keys()
    for name, value in spread.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize(
    ("before", "after", "job"),
    [pytest.param(*pair, job, marks=MARKS[_target_of_resume(*pair, job)]) for pair in RESUMES for job in RESUMED_JOBS],
)
def test_a_checkpoint_goes_on_on_any_topology(runs: Runs, before: str, after: str, job: str) -> None:
    folder = runs.resumed(before, after, job)
    for part in ("model", "optimizer"):  # bit for bit
        saved, again = (
            ShardedTensors(path / MIDDLE / part) for path in (runs.folder(before, job), folder / "resharded")
        )
        assert saved.shapes == again.shapes
        for name in saved.shapes:
            assert torch.equal(saved.read(name), again.read(name)), name

    whole, resumed = runs.outcome("1", job), outcome_of(folder)
    assert [line["step"] for line in resumed.metrics] == [6, 7]
    for one, other in zip(whole.metrics[5:], resumed.metrics, strict=True):
        assert other["tokens"] == one["tokens"]
        assert other["loss"] == pytest.approx(one["loss"], rel=TOLERANCE, abs=CANCELLED)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=NORM_TOLERANCE)
    for name, value in resumed.weights.items():
        torch.testing.assert_close(value, whole.weights[name], rtol=0, atol=TOLERANCE, msg=name)
