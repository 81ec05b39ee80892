"""Checks of the GPUs of a machine, from what NVML and the kernel report. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.system.machine import Gpu
from surefoot.system.nvml import BETWEEN, is_at, visible

GIB = 1 << 30
LEAST_POWER_SHARE = 0.9
"""Least share of the card's default power limit: a lower limit was set on purpose, or because of poor cooling."""
SLOW_QUERY_S = 4.0
"""Longest answer of a driver that runs already: one that must start takes seconds for each GPU."""
NEAR_SLOWDOWN_C = 5
MUCH_MEMORY = 0.05
"""Share of a card's memory in use before the run starts above which it is reported."""
LINKS = (("H200", 18), ("H100", 18), ("A100-SXM", 12), ("V100-SXM", 6))
"""(part of a card's name, its number of NVLinks, all in use on a board of eight). Source: NVIDIA's data sheets."""
JOINED_GPUS = 8
NOT_JOINED = re.compile("NVL|PCIe|PCIE")
"""Pattern in the names of cards that NVLink joins in pairs at most."""
BROKEN_PEERS = ("chipset", "I/O hub", "disabled")
"""Reasons why GPUs that support peer-to-peer cannot use it. Other reasons mean that they never support it."""


def check_driver(context: CheckContext) -> Result:
    """Check that the driver answers, and soon: each process that uses GPUs asks it at its start."""
    machine = context.machine
    if not machine.gpus:
        raise NotApplicable("no GPU here")
    silent = machine.unknown.get("cards", "")
    if "no answer" in silent:
        return fail("SF746", f"the driver of the GPUs gave {silent}", error=silent)
    if machine.gpu_query_s is None:
        raise NotApplicable(silent or "not asked")
    if machine.gpu_query_s > SLOW_QUERY_S:
        cause = f"the driver took {machine.gpu_query_s:.1f} s to describe {machine.gpus} GPUs"
        return fail("SF746", cause, query_s=round(machine.gpu_query_s, 1))
    return ok(f"answered in {machine.gpu_query_s:.1f} s")


def check_errors(context: CheckContext) -> Result:
    """Check for memory that lost data, rows that could not be replaced, and errors in the kernel's log."""
    cards = _require_gpus(context)
    problems = []
    for card in cards:
        if card.uncorrected_errors:
            problems.append(f"GPU {card.index} lost data in its memory {card.uncorrected_errors} times")
        if card.remap:
            problems.append(f"GPU {card.index}: replacing bad rows of its memory is {card.remap}")
    own_xids = [xid for xid in context.machine.xids if any(is_at(card.pci, xid) for card in cards)]
    if own_xids:
        problems.append(f"the kernel's log has Xid {', '.join(own_xids[-3:])}")
    if problems:
        indices = [card.index for card in cards]
        return fail("SF722", "; ".join(problems), cards=indices, xids=list(context.machine.xids))
    log = context.machine.unknown.get("xids")
    return ok(f"none{f'; the kernel log cannot be read: {log}' if log else ''}")


def check_clocks(context: CheckContext) -> Result:
    cards = _require_gpus(context)
    problems = [problem for card in cards for problem in _find_clock_problems(card)]
    if problems:
        return fail("SF723", "; ".join(problems), cards=[card.index for card in cards])
    hottest = max((card.temperature_c for card in cards if card.temperature_c is not None), default=None)
    return ok(f"nothing slows them down{f', the hottest has {hottest} °C' if hottest is not None else ''}")


def _find_clock_problems(card: Gpu) -> Iterator[str]:
    if card.slowed_by:
        yield f"GPU {card.index} is slowed down: {', '.join(card.slowed_by)}"
    limit, default = card.power_limit_w, card.power_default_w
    if limit is not None and default and limit < LEAST_POWER_SHARE * default:
        yield f"GPU {card.index} may take {limit:.0f} W of the {default:.0f} W it came with"
    temperature_c, slowdown_c = card.temperature_c, card.slowdown_c
    if temperature_c is not None and slowdown_c and temperature_c > slowdown_c - NEAR_SLOWDOWN_C:
        yield f"GPU {card.index} has {temperature_c} °C and slows down at {slowdown_c} °C"


def check_nvlink(context: CheckContext) -> Result:
    """Check for NVLinks that are down, and for GPUs that are not yet registered with the switches."""
    cards = _require_gpus(context)
    # Ports without a bridge are down on healthy cards too, so the expected number is the most that a card of this kind
    # has here.
    kind = cards[0].name
    max_links = max((sum(card.links) for card in context.machine.cards if card.name == kind), default=0)
    is_board = len(context.machine.cards) == JOINED_GPUS and any(card.links for card in cards)
    board_links = _count_board_links(kind) if is_board else 0
    expectation = f"others here have {max_links}" if max_links >= board_links else f"a {kind} has {board_links}"
    late = [
        f"GPU {card.index}'s registration with the NVSwitches is {card.fabric}"
        for card in cards
        if card.fabric not in ("", "completed")
    ]
    down = [
        f"GPU {card.index} has {sum(card.links)} NVLinks up, {expectation}"
        for card in cards
        if sum(card.links) < max(max_links, board_links)
    ]
    if down or late:
        return fail("SF724", "; ".join([*late, *down]), links={str(card.index): sum(card.links) for card in cards})
    return ok(f"{max_links} links up on each GPU" if max_links else "none")


def _count_board_links(name: str) -> int:
    """Return the number of NVLinks of a card that is joined with all others of its board; 0 for other cards."""
    return 0 if NOT_JOINED.search(name) else next((count for kind, count in LINKS if kind in name), 0)


def check_pcie(context: CheckContext) -> Result:
    cards = _require_gpus(context)
    problems = [problem for card in cards for problem in _find_pcie_problems(card)]
    if problems:
        return fail("SF725", "; ".join(problems), cards=[card.index for card in cards])
    first = next((card for card in cards if card.pcie_width), None)
    return ok(f"generation {first.pcie_most_generation}, {first.pcie_width} lanes" if first else "unknown")


def _find_pcie_problems(card: Gpu) -> Iterator[str]:
    if card.pcie_width and card.pcie_most_width and card.pcie_width < card.pcie_most_width:
        yield f"GPU {card.index} uses {card.pcie_width} of {card.pcie_most_width} lanes"
    supported, available = card.pcie_own_generation, card.pcie_most_generation
    if supported and available and available < supported:
        yield f"GPU {card.index} could use generation {supported}, and its slot gives {available}"


def check_peers(context: CheckContext) -> Result:
    """Check that GPUs that work together can read each other's memory."""
    indices = {str(card.index) for card in _require_gpus(context)}
    pairs = {pair: how for pair, how in context.machine.peers.items() if set(pair.split("-")) <= indices}
    if not context.uses_nccl or context.local_ranks < 2 or not pairs:
        raise NotApplicable("one GPU" if len(indices) < 2 else "unknown, or not used by the ranks")
    broken = {pair: how for pair, how in pairs.items() if any(word in how for word in BROKEN_PEERS)}
    if broken:
        pair, how = next(iter(broken.items()))
        cause = f"{len(broken)} of {len(pairs)} pairs cannot read each other's memory; GPUs {pair}: {how}"
        return fail("SF726", cause, pairs=broken)
    working = sum(how == "ok" for how in pairs.values())
    ways = Counter(way for pair, way in context.machine.topology.items() if pair in pairs)
    between = "; between them " + ", ".join(f"{way}: {ways[way]}" for way in BETWEEN.values() if ways[way])
    summary = f"{working} of {len(pairs)} pairs read each other's memory"
    return ok(summary + between if ways else summary)


def check_free_memory(context: CheckContext) -> Result:
    """Check that nothing else uses the memory of the GPUs before the run starts."""
    occupied = [
        f"GPU {card.index}: {card.memory_used_bytes / GIB:.1f} of {card.memory_bytes / GIB:.0f} GiB"
        + (f", processes {', '.join(str(process) for process in card.processes[:5])}" if card.processes else "")
        for card in _require_gpus(context)
        if card.memory_used_bytes is not None
        and card.memory_bytes
        and card.memory_used_bytes > MUCH_MEMORY * card.memory_bytes
    ]
    if occupied:
        return fail("SF727", "; ".join(occupied), taken=occupied)
    return ok("no other process uses their memory")


def _require_gpus(context: CheckContext) -> list[Gpu]:
    """Return the GPUs that the run uses. Raises: NotApplicable if it uses none, or NVML does not describe them."""
    if not context.machine.cards:
        raise NotApplicable(context.machine.unknown.get("cards", "no GPU here"))
    if "MIG-" in context.machine.environment.get("CUDA_VISIBLE_DEVICES", ""):
        raise NotApplicable("parts of GPUs (MIG) are not checked")
    cards = select_gpus(context)
    if not cards:
        raise NotApplicable("the run uses no GPU")
    return cards


def has_full_nvlink(cards: Sequence[Gpu]) -> bool:
    """Return whether NVLink joins each of these GPUs with each other: with switches, not bridges between two cards."""
    is_card = re.compile("PCIe|NVL", re.IGNORECASE)
    return bool(cards) and all(any(card.links) and not is_card.search(card.name) for card in cards)


def select_gpus(context: CheckContext) -> list[Gpu]:
    """Return the GPUs that the run uses: the first that CUDA_VISIBLE_DEVICES leaves, one for each local rank."""
    if not context.is_on_gpus:
        return []
    cards = list(context.machine.cards)
    visible_devices = context.machine.environment.get("CUDA_VISIBLE_DEVICES")
    cards = [cards[number] for number in visible(visible_devices, [card.uuid for card in cards])]
    return cards[: context.local_ranks] if context.run is not None else cards
