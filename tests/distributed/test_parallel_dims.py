"""Sizes of meshes: which fit, and what is said where they do not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from surefoot.config import DatasetItem
from surefoot.distributed import process_group
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import ConfigError
from surefoot.methods.sft.settings import SftConfig
from surefoot.models.weight_loading import laid_out_like


def layout(size: int, **changes: object) -> Layout:
    given: dict[str, Any] = {"model": "m", "dataset": [DatasetItem(path="d")], "output_dir": "o", "device": "cpu"}
    config = SftConfig(**{**given, **changes})
    return Layout.of(config, size, lambda *names: " and ".join(f"run.yaml:{name}" for name in names))


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (4, {"expert_parallel_size": 3}, "expert_parallel_size=3 .*4 ranks.*1, 2, 4"),
        (6, {"dp_replicate_size": 4}, "dp_replicate_size=4 .*6 ranks.*1, 2, 3, 6"),
        (8, {"dp_replicate_size": 4, "expert_parallel_size": 4}, "expert_parallel_size=4 .*2 ranks .*4 replicas"),
        (
            4,
            {"zero_stage": 0, "dp_replicate_size": 2},
            "zero_stage=0 .*dp_replicate_size=2 .*:zero_stage and run.yaml:dp_rep",
        ),
        (2, {"offload": "cpu"}, r"offload=cpu .*device=cpu.*\(run.yaml:offload\)"),
        (2, {"offload": "cpu", "device": "cuda", "zero_stage": 0}, "offload=cpu .*zero_stage 1, 2 or 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(size, **changes)


def test_experts_fewer_than_ranks_are_copied_rather_than_leaving_a_rank_without() -> None:
    assert layout(4, zero_stage=3).expert_shards(8) == 4
    assert layout(4, zero_stage=3).expert_shards(6) == 2
    assert layout(5, zero_stage=3).expert_shards(6) == 1
    assert layout(16, zero_stage=3).expert_shards(8) == 8
    assert layout(16, zero_stage=3, expert_parallel_size=4).expert_shards(8) == 2
    assert layout(16, zero_stage=0, expert_parallel_size=4).expert_shards(8) == 1
    assert layout(3, zero_stage=3).expert_shards(8) == 3


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_part_is_laid_out_like_its_reference_wherever_it_lies() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    reference = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)])
    part = torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).T
    ours, theirs = laid_out_like(part, reference), DTensor.from_local(part.contiguous(), mesh, [Shard(0)])
    assert ours._spec == theirs._spec
    assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    elsewhere = laid_out_like(torch.empty(4, 3, device="meta"), reference)
    assert (elsewhere.device.type, elsewhere.to_local().device.type) == ("meta", "meta")


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")  # of the script that starts a launcher
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert process_group.gpu_of(7, 3) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="nproc_per_node: rank 7 .*3 .*1 GPUs"):
        process_group.gpu_of(7, 3)
    monkeypatch.setenv("SLURM_PROCID", "7")  # srun --gpus-per-task=1
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert process_group.gpu_of(7, 3) == torch.device("cuda", 0)
