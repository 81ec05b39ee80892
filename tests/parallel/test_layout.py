"""Sizes of meshes: which fit, and what is said where they do not."""

from typing import Any

import pytest

from surefoot.config import DatasetItem, RunConfig
from surefoot.errors import ConfigError
from surefoot.parallel.layout import Layout


def layout(size: int, **changes: object) -> Layout:
    given: dict[str, Any] = {"model": "m", "dataset": [DatasetItem(path="d")], "output_dir": "o", "device": "cpu"}
    config = RunConfig(**{**given, **changes})
    return Layout.of(config, size, lambda *names: " and ".join(f"run.yaml:{name}" for name in names))


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (4, {"expert_parallel_size": 3}, r"expert_parallel_size=3 does not divide the 4 ranks.*one of 1, 2, 4"),
        (6, {"dp_replicate_size": 4}, r"dp_replicate_size=4 does not divide the 6 ranks.*one of 1, 2, 3, 6"),
        (8, {"dp_replicate_size": 4, "expert_parallel_size": 4}, r"the 2 ranks of each of the 4 replicas"),
        (
            4,
            {"zero_stage": 0, "dp_replicate_size": 2},
            r"zero_stage=0 keeps everything on each rank.*:zero_stage and run.yaml:dp_rep",
        ),
        (2, {"offload": "cpu"}, r"offload=cpu on device=cpu.*\(run.yaml:offload\)"),
        (2, {"offload": "cpu", "device": "cuda", "zero_stage": 0}, r"offload=cpu moves sharded state"),
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
