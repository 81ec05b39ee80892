"""Correctness and speed of the data that ranks send each other.

All values are whole numbers below 2^14, so that sums over up to 1,000 ranks are exact in float32 in any order.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.system.deadline import Deadline, DeadlineExceeded

EXCHANGE_LENGTH = 1 << 18
"""Number of float32 values that a pair exchanges: 1 MiB."""
MOST_PAIRS = 32
"""Largest number of ranks for which all pairs are tried; beyond it, only distances 1, 2, 4, ..."""
LENGTH = 10_007
"""Number of values of a collective: prime, so that no world size divides it."""
UNEVEN = 8
SWEEP = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 25, 1 << 28, 1 << 30)}
"""Device type -> sizes in bytes at which the speed of collectives is measured."""
REPEATS = 5
LONG_S = 5.0
"""Longest time for repeated collectives. No larger size is tried once a single call takes a tenth of it."""
PRODUCT = {"cpu": (1024, torch.float32), "cuda": (8192, torch.bfloat16)}
PRODUCT_FOR_S = {"cpu": 1.0, "cuda": 5.0}
"""Seconds of matrix products: long enough for a badly cooled card to slow down."""
LOOKED_WITHIN_S = 2.0
"""Seconds to wait after the products for the observation that was started during them."""


def values_of(rank: int, count: int, device: torch.device) -> Tensor:
    """Return values that no other rank sends. Shape: [count], float32, below 2^14."""
    return (torch.arange(count, device=device) * 7 + rank * 131).remainder(16381).float()


def exchange(rank: int, size: int, device: torch.device, report_part: Callable[[int], None]) -> dict[str, Any]:
    """Exchange values between each pair of ranks and compare what arrives.

    `report_part` is called with the number of each exchange before it starts. Returns `wrong`: the ranks whose values
    arrived changed. Collectives: a send and a receive for each distance.
    """
    distances = [n for n in range(1, size) if size <= MOST_PAIRS or n & (n - 1) == 0]
    wrong_sources = []
    for number, distance in enumerate(distances, 1):
        report_part(number)
        sent, received = values_of(rank, EXCHANGE_LENGTH, device), torch.empty(EXCHANGE_LENGTH, device=device)
        source = (rank - distance) % size
        operations = [
            dist.P2POp(dist.isend, sent, (rank + distance) % size),
            dist.P2POp(dist.irecv, received, source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if not torch.equal(received, values_of(source, EXCHANGE_LENGTH, device)):
            wrong_sources.append(source)
    return {"pairs": len(distances), "wrong": wrong_sources}


def collectives(rank: int, size: int, device: torch.device, report_part: Callable[[int], None]) -> dict[str, Any]:
    """Run every collective that a run uses and compare its result. Returns `wrong`: collective -> its first error.

    `report_part` is called with the number of each collective before it starts.
    """
    inputs = [values_of(n, LENGTH, device) for n in range(size)]
    total = torch.stack(inputs).sum(0)
    wrong: dict[str, str] = {}

    def compare(name: str, actual: Tensor, expected: Tensor) -> None:
        if not torch.equal(actual, expected):
            index = int((actual != expected).nonzero()[0])
            wrong[name] = (
                f"number {index} of {len(expected)} is {actual[index].item()} instead of {expected[index].item()}"
            )

    report_part(1)
    summed = inputs[rank].clone()
    dist.all_reduce(summed)
    compare("all-reduce", summed, total)

    report_part(2)
    gathered = torch.empty(size * LENGTH, device=device)
    dist.all_gather_into_tensor(gathered, inputs[rank])
    compare("all-gather", gathered, torch.cat(inputs))

    report_part(3)
    scattered = torch.empty(LENGTH, device=device)
    dist.reduce_scatter_tensor(scattered, torch.cat([inputs[rank] + n for n in range(size)]))
    compare("reduce-scatter", scattered, total + rank * size)

    report_part(4)
    sizes = [1 + n % UNEVEN for n in range(size)]  # uneven, like the tokens of experts
    local_size, begin = sizes[rank], sum(sizes[:rank])
    received = torch.empty(size * local_size, device=device)
    dist.all_to_all_single(
        received,
        inputs[rank][: sum(sizes)].contiguous(),
        output_split_sizes=[local_size] * size,
        input_split_sizes=sizes,
    )
    compare("all-to-all", received, torch.cat([values[begin : begin + local_size] for values in inputs]))

    for number, source in enumerate((0, size - 1), 5):
        report_part(number)
        broadcasted = inputs[source].clone() if rank == source else torch.empty(LENGTH, device=device)
        dist.broadcast(broadcasted, source)
        compare(f"broadcast from rank {source}", broadcasted, inputs[source])
    return {"wrong": wrong}


def bandwidth(size: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return collective -> bytes -> bus bandwidth in GB/s, for the collectives of sharded state and experts.

    Sizes grow until a call takes long; all ranks agree on that. Collectives: up to `REPEATS` + 2 of each for each size.
    """
    return {name: _sweep_sizes(prepare, bus_factor, size, device) for name, (prepare, bus_factor) in KINDS.items()}


Run = Callable[[], object]


def _prepare_all_reduce(length: int, _size: int, device: torch.device) -> Run:
    data = torch.ones(length // 4, device=device)
    return lambda: dist.all_reduce(data)


def _prepare_all_gather(length: int, size: int, device: torch.device) -> Run:
    part = torch.ones(length // 4 // size, device=device)
    gathered = part.new_empty(len(part) * size)
    return lambda: dist.all_gather_into_tensor(gathered, part)


def _prepare_all_to_all(length: int, size: int, device: torch.device) -> Run:
    sent = torch.ones(length // 4 // size * size, device=device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)


KINDS = {
    "all-reduce": (_prepare_all_reduce, 2),
    "all-gather": (_prepare_all_gather, 1),
    "all-to-all": (_prepare_all_to_all, 1),
}
"""Name -> (function that prepares it, how often (n - 1) / n of its bytes cross the bus). Source of the factors:
NVIDIA/nccl-tests, its doc/PERFORMANCE.md."""


def _sweep_sizes(
    prepare: Callable[[int, int, torch.device], Run], bus_factor: int, size: int, device: torch.device
) -> dict[str, float]:
    speeds = {}
    for length in SWEEP[device.type]:
        run = prepare(length, size, device)
        run()
        once_s = _reduce_max(_measure_seconds(run, 1, device), device)
        repeats = REPEATS if once_s * REPEATS < LONG_S else 1
        took_s = _measure_seconds(run, repeats, device) / repeats if repeats > 1 else once_s
        speeds[str(length)] = bus_factor * length * (size - 1) / size / took_s / 1e9
        if once_s > LONG_S / 10:
            break
    return speeds


def _reduce_max(seconds: float, device: torch.device) -> float:
    """Return the largest value of any rank. Collectives: one all-reduce."""
    slowest_s = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return float(slowest_s)


def _measure_seconds(run: Run, repeats: int, device: torch.device) -> float:
    dist.barrier()
    _synchronize(device)
    began_s = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronize(device)
    return time.perf_counter() - began_s


def product(device: torch.device, observe: Callable[[], Any] = lambda: None) -> tuple[float, Any]:
    """Return (TFLOP/s of large matrix products on this rank's device, result of `observe` during them).

    All ranks compute at the same time. The result is None if `observe` did not finish in time.
    """
    length, dtype = PRODUCT[device.type]
    matrix = torch.randn(length, length, device=device).to(dtype)  # zeros and ones would draw less power
    matrix @ matrix
    _synchronize(device)
    began_s, done = time.perf_counter(), 0
    observation: Deadline[Any] | None = None  # in a thread: a driver may be slow or hang
    while (took_s := time.perf_counter() - began_s) < PRODUCT_FOR_S[device.type]:
        for _ in range(REPEATS):
            matrix @ matrix
        if observation is None and took_s >= PRODUCT_FOR_S[device.type] / 2:
            observation = Deadline(observe)
        _synchronize(device)
        done += REPEATS
    speed = 2 * length**3 * done / took_s / 1e12
    try:
        return speed, observation.result(LOOKED_WITHIN_S) if observation is not None else None
    except DeadlineExceeded:
        return speed, None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
