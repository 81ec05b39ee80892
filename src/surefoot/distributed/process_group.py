"""The ranks of a run, and how they agree: on numbers, on settings, and on having failed.

What ranks tell each other is JSON and float64, over gloo, whatever device the model is on. With one rank nothing is
sent and torch.distributed is not used.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from surefoot import errors
from surefoot.distributed.listening import is_one_machine
from surefoot.distributed.store import connecting, rendezvous
from surefoot.errors import ConfigError, StoppedOnFinding, SurefootError
from surefoot.findings import Finding
from surefoot.system.loopback import kept_on_this_machine
from surefoot.system.process import launcher_number

DEADLINE = timedelta(minutes=10)
"""How long a rank waits for the others in one collective of a step before it fails."""
AGREEMENT_DEADLINE = timedelta(hours=4)
"""The same for agreements, in which one rank may read or write files; one that is gone is noticed at once."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Who this process is among the processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the processes of this machine."""
    group: Any = None
    """The gloo group that agreements go over; None with one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64 and in the same order on each. Collective: one all-reduce."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return list(total.tolist())

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, in order of ranks, at every rank. Collective: two all-gathers. `value`: JSON."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([text.numel()]), group=self.group)
        longest = int(torch.stack(sizes).max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(one[: int(size)].numpy().tobytes()) for one, size in zip(texts, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def run_or_raise_on_all(self, work: Callable[[], T], *, names_rank: bool = True) -> T:
        """Do `work` on each rank; where it fails on any, all fail with the first one's reason, which names the rank.

        `work` must not wait for other ranks, unless it goes through all of its collectives where it fails too.
        Collective. Raises: the error of the lowest rank that failed.
        """
        if self.size == 1:
            return work()
        results: list[T] = []
        error: SurefootError | None = None
        other: Exception | None = None
        try:
            results.append(work())
        except SurefootError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - a defect, a full disk: the others wait for this rank all the same
            error, other = SurefootError(f"{type(caught).__name__}: {caught}"), caught
        try:
            self.raise_failures(error, names_rank=names_rank)
        except SurefootError:
            if other is not None:
                raise other  # noqa: B904 - with its own traceback
            raise
        return results[0]

    def raise_failures(self, error: SurefootError | None, *, names_rank: bool = True) -> None:
        """Raise on every rank what the lowest failing rank reports; nothing where none does. Collective.

        `names_rank`: the text says which, where others did not fail alike.
        """
        finding = asdict(error.finding) if isinstance(error, StoppedOnFinding) else None
        failures = self.gather(None if error is None else [type(error).__name__, str(error), finding])
        first = next((rank for rank, found in enumerate(failures) if found), None)
        if first is None:
            return
        kind, text, finding = failures[first]
        if names_rank and any(found != failures[first] for found in failures):  # not the fault of what all ranks read
            text = f"rank {first}: {text}"
        agreed: SurefootError = StoppedOnFinding(Finding(**finding)) if finding else getattr(errors, kind)(text)
        agreed.is_agreed = True
        raise agreed from error

    def broadcast_from_rank0(self, work: Callable[[], Any]) -> Any:
        """Do `work` on rank 0 alone and give every rank its result, which is JSON. Collective. Raises: its error."""
        said: Any = None

        def on_first() -> None:
            nonlocal said
            if self.is_first:
                said = work()

        self.run_or_raise_on_all(on_first, names_rank=False)
        return self.gather(said)[0]

    def local_rank0_first(self, work: Callable[[], T]) -> T:
        """Do `work` on the first rank of each machine, then on the others, which find what it left in the cache."""
        done: list[T] = []
        self.run_or_raise_on_all(lambda: done.append(work()) if self.local_rank == 0 else None, names_rank=False)
        return self.run_or_raise_on_all(lambda: done[0] if done else work())


SINGLE_PROCESS = World()
"""A run of one process."""


def gpu_of(rank: int, local_rank: int) -> torch.device:
    """The GPU of a rank. Raises: ConfigError where there is none for it."""
    count = torch.cuda.device_count()
    task = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_LOCALID")
    if count == 1 and task == (str(rank), str(local_rank)):  # --gpus-per-task=1: each task sees its own one alone
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ConfigError(
            f"nproc_per_node: rank {rank} is number {local_rank} on this machine, which has {count} GPUs. Start one "
            "rank per GPU."
        )
    return torch.device("cuda", local_rank)


@contextmanager
def init_distributed(device_type: str, *, alone_too: bool = False) -> Iterator[World]:
    """Join the other processes of this run, as the launcher's environment names them; leave them at the end.

    gloo on the CPU, NCCL on CUDA. Without WORLD_SIZE in the environment this is a run of one process, which needs a
    process group only where its state is laid out like that of many (`alone_too`). A process group that is there
    already is used and stays. Raises: ConfigError for an environment or a machine that does not fit; StoppedOnFinding
    (SF111) where ranks do not come.
    """
    backend = "nccl" if device_type == "cuda" else "gloo"
    size = launcher_number("WORLD_SIZE", default=1)
    if size < 1:
        raise ConfigError("WORLD_SIZE=0 is no number of ranks. Unset it, or start ranks with a launcher.")
    with kept_on_this_machine(is_needed=is_one_machine(size)):
        if size > 1:
            with _joined_others(backend, size) as ranks:
                yield ranks
            return
        is_ours = alone_too and not dist.is_initialized()
        if is_ours:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        try:
            yield SINGLE_PROCESS
        finally:
            if is_ours:
                dist.destroy_process_group()


@contextmanager
def _joined_others(backend: str, size: int) -> Iterator[World]:
    """Join the other ranks of a run of several."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that this process is a rank, but {', '.join(missing)} is not "
            "set. Start ranks with nproc_per_node, torchrun, or as the SLURM example does; where a pod has RANK and "
            "WORLD_SIZE of its own, unset them."
        )
    rank, local_rank = launcher_number("RANK"), launcher_number("LOCAL_RANK")
    device = None
    if backend == "nccl":
        device = gpu_of(rank, local_rank)
        torch.cuda.set_device(device)
    is_ours = not dist.is_initialized()
    if is_ours:
        store = rendezvous(rank, size)
        with connecting(rank, backend):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=DEADLINE, device_id=device
            )
    are_together = False
    try:
        group = dist.new_group(backend="gloo", timeout=AGREEMENT_DEADLINE, group_desc="agreement")
        yield World(rank, size, local_rank, group)
        are_together = True
    except SurefootError as error:
        are_together = error.is_agreed
        raise
    finally:
        # NCCL leaves a group only when all that was asked of it is done: a rank that failed alone would wait there for
        # those that wait for it, and its reason would never be told. Its process ends now, and the group with it.
        if is_ours and (are_together or backend == "gloo"):
            dist.destroy_process_group()


def sum_over_ranks(tensor: Tensor, ranks: World) -> Tensor:
    """The sum of a tensor of the model's device over all ranks, in place. Collective: one all-reduce."""
    if ranks.size > 1:
        dist.all_reduce(tensor)
    return tensor
