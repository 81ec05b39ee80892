"""Process group of a run, and agreement between ranks on numbers, settings and failures.

Ranks exchange JSON and float64, over gloo, whatever device the model is on. With one rank nothing is
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
"""Time that a rank waits for the others in one collective of a step before it fails."""
AGREEMENT_DEADLINE = timedelta(hours=4)
"""Time limit of agreements, in which one rank may read or write files; a rank that exits is noticed at once."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Rank and size of this process's run, and its collectives for agreement."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    group: Any = None
    """Gloo group for agreements; None with one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return sums over the ranks, in float64 and in the same order on each. Collective: one all-reduce."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return list(total.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank, in order, on every rank. Collective: two all-gathers. `value`: JSON."""
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
        return [
            json.loads(text_bytes[: int(size)].numpy().tobytes()) for text_bytes, size in zip(texts, sizes, strict=True)
        ]

    def count_local_ranks(self) -> int:
        """Return the largest number of ranks on one machine. Collective."""
        return int(max(self.gather(self.local_rank))) + 1

    def count_ranks_on_own_cores(self) -> int:
        """Return the number of ranks of this machine that may use the same CPU cores as this one. Collective."""
        cores = sorted(os.sched_getaffinity(0))
        return len({rank for rank, its_cores in self.gather([self.local_rank, cores]) if its_cores == cores})

    def barrier(self) -> None:
        """Wait until all ranks reach the barrier."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def run_or_raise_on_all(self, work: Callable[[], T], *, names_rank: bool = True) -> T:
        """Run `work` on each rank; if any fails, all fail with the lowest rank's reason, which names the rank.

        `work` must not wait for other ranks, unless it goes through all of its collectives when it fails too.
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
        except Exception as caught:  # noqa: BLE001 - a defect, a full disk: the other ranks wait for this one
            error, other = SurefootError(f"{type(caught).__name__}: {caught}"), caught
        try:
            self.raise_failures(error, names_rank=names_rank)
        except SurefootError:
            if other is not None:
                raise other  # noqa: B904 - with its own traceback
            raise
        return results[0]

    def raise_failures(self, error: SurefootError | None, *, names_rank: bool = True) -> None:
        """Raise the error of the lowest failing rank on every rank; do nothing if none failed. Collective.

        `names_rank`: name the rank in the text unless all ranks failed alike.
        """
        finding = asdict(error.finding) if isinstance(error, StoppedOnFinding) else None
        failures = self.gather(None if error is None else [type(error).__name__, str(error), finding])
        first = next((rank for rank, failure in enumerate(failures) if failure), None)
        if first is None:
            return
        kind, text, finding = failures[first]
        if names_rank and any(
            failure != failures[first] for failure in failures
        ):  # not an error in input that all ranks read
            text = f"rank {first}: {text}"
        agreed: SurefootError = StoppedOnFinding(Finding(**finding)) if finding else getattr(errors, kind)(text)
        agreed.is_agreed = True
        raise agreed from error

    def broadcast_from_rank0(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 alone and give every rank its result, which is JSON. Collective. Raises: its error."""
        result: Any = None

        def on_first() -> None:
            nonlocal result
            if self.is_first:
                result = work()

        self.run_or_raise_on_all(on_first, names_rank=False)
        return self.gather(result)[0]

    def local_rank0_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of each machine, then on the others, which reuse what it left in the cache."""
        done: list[T] = []
        self.run_or_raise_on_all(lambda: done.append(work()) if self.local_rank == 0 else None, names_rank=False)
        return self.run_or_raise_on_all(lambda: done[0] if done else work())


SINGLE_PROCESS = World()
"""World of a run of one process."""


def gpu_of(rank: int, local_rank: int) -> torch.device:
    """Return the GPU of a rank. Raises: ConfigError if there is none for it."""
    count = torch.cuda.device_count()
    task = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_LOCALID")
    if count == 1 and task == (str(rank), str(local_rank)):  # --gpus-per-task=1: each task sees only its own GPU
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
    process group only if its state is sharded like that of many (`alone_too`). An existing process group is used and
    kept. Raises: ConfigError for an environment or a machine that does not fit; StoppedOnFinding (SF111) if ranks do
    not arrive.
    """
    backend = "nccl" if device_type == "cuda" else "gloo"
    size = launcher_number("WORLD_SIZE", default=1)
    if size < 1:
        raise ConfigError("WORLD_SIZE=0: a run has at least one rank. Unset it, or start ranks with a launcher.")
    with kept_on_this_machine(is_needed=is_one_machine(size)):
        if size > 1:
            with _join_other_ranks(backend, size) as ranks:
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
def _join_other_ranks(backend: str, size: int) -> Iterator[World]:
    """Join the other ranks of a run of several."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} marks this process as a rank, but {', '.join(missing)} is not "
            "set. Start ranks with nproc_per_node, torchrun, or as the SLURM example does; where a pod has RANK and "
            "WORLD_SIZE of its own, unset them."
        )
    rank, local_rank = launcher_number("RANK"), launcher_number("LOCAL_RANK")
    if rank >= size:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={size} in the environment: ranks count from 0 to {size - 1}. Start all ranks "
            "with the same launcher, and unset both where a run has none."
        )
    device = None
    if backend == "nccl":
        device = gpu_of(rank, local_rank)
        torch.cuda.set_device(device)
    owns_group = not dist.is_initialized()
    if owns_group:
        store = rendezvous(rank, size)
        with connecting(rank, size, backend):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=DEADLINE, device_id=device
            )
    all_agree = False
    try:
        group = dist.new_group(backend="gloo", timeout=AGREEMENT_DEADLINE, group_desc="agreement")
        yield World(rank, size, local_rank, group)
        all_agree = True
    except SurefootError as error:
        all_agree = error.is_agreed
        raise
    finally:
        # NCCL destroys a group only after all of its operations: a rank that failed alone would wait there for ranks
        # that wait for it, and its reason would never be reported. Its process ends now, and the group with it.
        if owns_group and (all_agree or backend == "gloo"):
            dist.destroy_process_group()
        elif all_agree:  # a later run of this program has its own
            dist.destroy_process_group(group)


def sum_over_ranks(tensor: Tensor, ranks: World) -> Tensor:
    """Sum a tensor of the model's device over all ranks, in place, and return it. Collective: one all-reduce."""
    if ranks.size > 1:
        dist.all_reduce(tensor)
    return tensor
