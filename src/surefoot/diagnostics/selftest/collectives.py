"""What ranks send each other, with numbers that tell whether they arrived; and how fast.

All values are whole numbers below 2^14, so that sums over up to 1,000 ranks are exact in float32 in any order.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.system.deadline import Deadline, DeadlineExceeded

EXCHANGED = 1 << 18
"""Numbers that a pair exchanges: 1 MiB."""
MOST_PAIRS = 32
"""Ranks up to which all pairs are tried; beyond, those at distances 1, 2, 4, ..."""
LENGTH = 10_007
"""Numbers of a collective: prime, so that nothing divides it."""
UNEVEN = 8
SWEEP = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 25, 1 << 28, 1 << 30)}
"""Bytes of collectives whose speed is measured."""
REPEATS = 5
LONG_S = 5.0
"""Of repeated collectives: no larger size is tried once a single one takes a tenth of it."""
PRODUCT = {"cpu": (1024, torch.float32), "cuda": (8192, torch.bfloat16)}
PRODUCT_FOR_S = {"cpu": 1.0, "cuda": 5.0}
"""Long enough for a card that is cooled badly to slow down."""
LOOKED_WITHIN_S = 2.0
"""After the products, for what was begun in the midst of them."""


def values_of(rank: int, count: int, device: torch.device) -> Tensor:
    """Numbers that no other rank sends. Shape: [count], float32, below 2^14."""
    return (torch.arange(count, device=device) * 7 + rank * 131).remainder(16381).float()


def exchange(rank: int, size: int, device: torch.device, reached: Callable[[int], None]) -> dict[str, Any]:
    """Each rank sends to each other one and compares what it gets. Collective: a send and a receive for each distance.

    `reached` hears the number of each before it begins. Returns `wrong`: from whom something else came than was sent.
    """
    distances = [n for n in range(1, size) if size <= MOST_PAIRS or n & (n - 1) == 0]
    wrong = []
    for number, distance in enumerate(distances, 1):
        reached(number)
        sent, got = values_of(rank, EXCHANGED, device), torch.empty(EXCHANGED, device=device)
        source = (rank - distance) % size
        operations = [
            dist.P2POp(dist.isend, sent, (rank + distance) % size),
            dist.P2POp(dist.irecv, got, source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if not torch.equal(got, values_of(source, EXCHANGED, device)):
            wrong.append(source)
    return {"pairs": len(distances), "wrong": wrong}


def collectives(rank: int, size: int, device: torch.device, reached: Callable[[int], None]) -> dict[str, Any]:
    """Every collective that a run uses, against what must come out of it. Returns `wrong`: what did not.

    `reached` hears the number of each before it begins.
    """
    each = [values_of(n, LENGTH, device) for n in range(size)]
    total = torch.stack(each).sum(0)
    wrong: dict[str, str] = {}

    def compare(name: str, got: Tensor, want: Tensor) -> None:
        if not torch.equal(got, want):
            at = int((got != want).nonzero()[0])
            wrong[name] = f"number {at} of {len(want)} is {got[at].item()} instead of {want[at].item()}"

    reached(1)
    summed = each[rank].clone()
    dist.all_reduce(summed)
    compare("all-reduce", summed, total)

    reached(2)
    gathered = torch.empty(size * LENGTH, device=device)
    dist.all_gather_into_tensor(gathered, each[rank])
    compare("all-gather", gathered, torch.cat(each))

    reached(3)
    scattered = torch.empty(LENGTH, device=device)
    dist.reduce_scatter_tensor(scattered, torch.cat([each[rank] + n for n in range(size)]))
    compare("reduce-scatter", scattered, total + rank * size)

    reached(4)
    sizes = [1 + n % UNEVEN for n in range(size)]  # uneven, as tokens are dealt to experts
    mine, begin = sizes[rank], sum(sizes[:rank])
    received = torch.empty(size * mine, device=device)
    dist.all_to_all_single(
        received, each[rank][: sum(sizes)].contiguous(), output_split_sizes=[mine] * size, input_split_sizes=sizes
    )
    compare("all-to-all", received, torch.cat([one[begin : begin + mine] for one in each]))

    for number, source in enumerate((0, size - 1), 5):
        reached(number)
        told = each[source].clone() if rank == source else torch.empty(LENGTH, device=device)
        dist.broadcast(told, source)
        compare(f"broadcast from rank {source}", told, each[source])
    return {"wrong": wrong}


def bandwidth(size: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Collective -> bytes -> its bus bandwidth, in GB/s: what a run asks of a network with sharded state and experts.

    Sizes grow until one takes long; all ranks agree on that. Collective: up to `REPEATS` + 2 of each for each size.
    """
    return {name: _sweep(begin, times, size, device) for name, (begin, times) in KINDS.items()}


Run = Callable[[], object]


def _all_reduce(length: int, _size: int, device: torch.device) -> Run:
    data = torch.ones(length // 4, device=device)
    return lambda: dist.all_reduce(data)


def _all_gather(length: int, size: int, device: torch.device) -> Run:
    part = torch.ones(length // 4 // size, device=device)
    whole = part.new_empty(len(part) * size)
    return lambda: dist.all_gather_into_tensor(whole, part)


def _all_to_all(length: int, size: int, device: torch.device) -> Run:
    sent = torch.ones(length // 4 // size * size, device=device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)


KINDS = {"all-reduce": (_all_reduce, 2), "all-gather": (_all_gather, 1), "all-to-all": (_all_to_all, 1)}
"""Name -> (what begins it, how often (n - 1) / n of its bytes go over the bus). Source of the factors:
NVIDIA/nccl-tests, its doc/PERFORMANCE.md."""


def _sweep(
    begin: Callable[[int, int, torch.device], Run], times: int, size: int, device: torch.device
) -> dict[str, float]:
    found = {}
    for length in SWEEP[device.type]:
        run = begin(length, size, device)
        run()
        once_s = _slowest(_timed(run, 1, device), device)
        repeats = REPEATS if once_s * REPEATS < LONG_S else 1
        took_s = _timed(run, repeats, device) / repeats if repeats > 1 else once_s
        found[str(length)] = times * length * (size - 1) / size / took_s / 1e9
        if once_s > LONG_S / 10:
            break
    return found


def _slowest(seconds: float, device: torch.device) -> float:
    """The most of any rank. Collective: one all-reduce."""
    told = torch.tensor([seconds], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _timed(run: Run, repeats: int, device: torch.device) -> float:
    dist.barrier()
    _wait_for(device)
    began_s = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait_for(device)
    return time.perf_counter() - began_s


def product(device: torch.device, look: Callable[[], Any] = lambda: None) -> tuple[float, Any]:
    """(TFLOP/s of a large matrix product on this rank's device, while all ranks do the same; what `look` saw then).

    None for what it saw where it did not come to an end.
    """
    length, dtype = PRODUCT[device.type]
    one = torch.randn(length, length, device=device).to(dtype)  # zeros and ones would draw less power
    one @ one
    _wait_for(device)
    began_s, done = time.perf_counter(), 0
    looking: Deadline[Any] | None = None  # beside the products: a driver may take long to answer, or for ever
    while (took_s := time.perf_counter() - began_s) < PRODUCT_FOR_S[device.type]:
        for _ in range(REPEATS):
            one @ one
        if looking is None and took_s >= PRODUCT_FOR_S[device.type] / 2:
            looking = Deadline(look)
        _wait_for(device)
        done += REPEATS
    speed = 2 * length**3 * done / took_s / 1e12
    try:
        return speed, looking.result(LOOKED_WITHIN_S) if looking is not None else None
    except DeadlineExceeded:
        return speed, None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
