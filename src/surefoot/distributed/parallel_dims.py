"""Parallel dimensions of a model: which ranks hold the same state, which hold shards, which hold experts.

Every rank trains on its own batches. `dp_replicate` counts replicas of the sharded state, `fsdp` the ranks that share
one replica. Experts have their own view of the same ranks: `ep` ranks share one set of experts, and the `copies` of
that set are replicated or sharded like everything else.

    8 ranks, dp_replicate_size 2, expert_parallel_size 2      dense   (dp_replicate 2, fsdp 4)
                                                              experts (dp_replicate 2, fsdp 2, ep 2)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from surefoot.config import RunConfig
from surefoot.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh. `zero_stage`: see `fsdp.py`."""

    size: int
    zero_stage: int
    dp_replicate: int
    expert_parallel: int
    offload: bool
    rank: int = 0
    """Rank of this process; the sizes do not depend on it."""

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded at all; a single rank counts, so that its state can be offloaded."""
        return self.size > 1 or self.offload

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process: which part of each global batch it trains on."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks; today every rank is one."""
        return self.dp_replicate * self.fsdp

    @property
    def fsdp(self) -> int:
        """Number of ranks that share one replica of the sharded state."""
        return self.size // self.dp_replicate

    def expert_shards(self, num_experts: int) -> int:
        """Return the number of ranks that shard the same experts: the most that leaves none of them empty."""
        each = num_experts // self.expert_parallel
        most = self.fsdp // self.expert_parallel if self.zero_stage else 1
        return max(n for n in range(1, most + 1) if most % n == 0 and -(-each // n) * (n - 1) < each)

    @staticmethod
    def of(
        config: RunConfig, size: int, where: Callable[..., str] = lambda *_: "run.yaml", *, rank: int = 0
    ) -> "Layout":
        """Return the layout that a config requests on `size` ranks, as `rank` sees it.

        `where`: the place of some settings, for errors. Raises: ConfigError if the sizes do not divide.
        """
        replicate = config.dp_replicate_size
        # With `auto`, only sizes that divide are tried.
        expert_parallel = 1 if config.expert_parallel_size == "auto" else config.expert_parallel_size

        def refuse(text: str, *fields: str) -> NoReturn:
            raise ConfigError(f"{text} ({where(*fields)}).")

        if size % replicate:
            refuse(
                f"dp_replicate_size={replicate} does not divide the {size} ranks of this run. "
                f"Use one of {_list_divisors(size)}",
                "dp_replicate_size",
            )
        if size // replicate % expert_parallel:
            refuse(
                f"expert_parallel_size={expert_parallel} does not divide the {size // replicate} ranks"
                f"{f' of each of the {replicate} replicas' if replicate > 1 else ' of this run'}. "
                f"Use one of {_list_divisors(size // replicate)}",
                "expert_parallel_size",
            )
        if config.zero_stage == 0 and replicate > 1:
            refuse(
                f"zero_stage=0 keeps everything on each rank, so there is nothing that dp_replicate_size={replicate} "
                "could replicate. Leave dp_replicate_size out, or use zero_stage 1, 2 or 3",
                "zero_stage",
                "dp_replicate_size",
            )
        if config.offload is not None and config.device == "cpu":
            refuse("offload=cpu on device=cpu: the state is in host memory already. Leave offload out", "offload")
        if config.offload is not None and config.zero_stage == 0:
            refuse("offload=cpu moves sharded state, which needs zero_stage 1, 2 or 3", "offload", "zero_stage")
        if config.offload is not None and expert_parallel > 1 and expert_parallel == size:
            refuse(
                f"offload=cpu moves what is sharded, and with expert_parallel_size={expert_parallel} on {size} ranks "
                "each expert is whole on one. Use a smaller expert_parallel_size, or leave offload out",
                "offload",
                "expert_parallel_size",
            )
        return Layout(
            size=size,
            zero_stage=config.zero_stage,
            dp_replicate=size if config.zero_stage == 0 else replicate,
            expert_parallel=expert_parallel,
            offload=config.offload is not None,
            rank=rank,
        )


def _list_divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


_MESHES: WeakKeyDictionary[dist.ProcessGroup | None, dict[tuple[object, ...], DeviceMesh]] = WeakKeyDictionary()
"""Meshes that exist, by the group of all ranks: each group has threads that wake a hundred times a second."""


class Meshes:
    """Device meshes of a layout. Collective: creates process groups, which later runs of this process use again."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device_type = device.type
        self._created: list[DeviceMesh] = []
        self._dense = self._mesh(pp=1, dp_replicate=layout.dp_replicate, fsdp=layout.fsdp, tp=1)

    def _mesh(self, **dims: int) -> DeviceMesh:
        of_world = _MESHES.setdefault(dist.group.WORLD, {}) if dist.is_initialized() else {}
        key = (self._device_type, *dims.items())
        if key not in of_world:
            names, sizes = tuple(dims), tuple(dims.values())
            of_world[key] = init_device_mesh(self._device_type, sizes, mesh_dim_names=names)
            self._created.append(of_world[key])
        return of_world[key]

    @property
    def dense(self) -> DeviceMesh:
        """Mesh for everything but experts: `fsdp`, or (`dp_replicate`, `fsdp`)."""
        return self._dense["dp_replicate", "fsdp"] if self._layout.dp_replicate > 1 else self._dense["fsdp"]

    def experts(self, shards: int) -> DeviceMesh:
        """Return the mesh (`dp_replicate`, `fsdp`, `ep`) with `shards` ranks that shard the same experts."""
        ep = self._layout.expert_parallel
        return self._mesh(dp_replicate=self._layout.size // ep // shards, fsdp=shards, ep=ep)

    def leave(self) -> None:
        """Destroy the process groups that were created for these meshes. Every rank does it, in the same order."""
        groups = [mesh.get_group(name) for mesh in self._created for name in mesh.mesh_dim_names or ()]
        for group in dict.fromkeys(groups):  # dimensions may share a group, or use that of all ranks
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        of_world = _MESHES.get(dist.group.WORLD, {})
        for key in [key for key, mesh in of_world.items() if any(mesh is created for created in self._created)]:
            del of_world[key]
        self._created.clear()

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """Return a view of the dense mesh; transformers calls this."""
        return self._dense[dims]
