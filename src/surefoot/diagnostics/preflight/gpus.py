"""Checks of the GPUs of a machine, as NVML and the kernel tell of them. Pure."""

import re
from collections import Counter
from collections.abc import Sequence

from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.system.machine import Gpu
from surefoot.system.nvml import BETWEEN, is_at, visible

GIB = 1 << 30
LEAST_POWER_SHARE = 0.9
"""Of the limit that a card came with: a lower one was set on purpose, or by a machine that cannot cool it."""
NEAR_SLOWDOWN_C = 5
MUCH_MEMORY = 0.05
"""Of a card that a run is to use, in use before it starts."""
LINKS = (("H200", 18), ("H100", 18), ("A100-SXM", 12), ("V100-SXM", 6))
"""What a card is called -> its NVLinks, which are all in use on a board of eight. Source: NVIDIA's data sheets."""
JOINED_GPUS = 8
NOT_JOINED = re.compile("NVL|PCIe|PCIE")
"""In names of cards that are joined in pairs, if at all."""
BROKEN_PEERS = ("chipset", "I/O hub", "disabled")
"""Why GPUs that could read each other's memory cannot; others never could."""


def errors(seen: CheckContext) -> Check:
    """Memory that lost data, rows that could not be replaced, errors in the kernel's log."""
    name, none = "GPU errors", _none(seen)
    if none is not None:
        return not_applicable("GPU errors", none)
    found = []
    for card in used(seen):
        if card.uncorrected_errors:
            found.append(f"GPU {card.index} lost data in its memory {card.uncorrected_errors} times")
        if card.remap:
            found.append(f"GPU {card.index}: replacing bad rows of its memory is {card.remap}")
    own = [xid for xid in seen.machine.xids if any(is_at(card.pci, xid) for card in used(seen))]
    if own:
        found.append(f"the kernel's log has Xid {', '.join(own[-3:])}")
    if found:
        return fail(name, "SF722", "; ".join(found), cards=[card.index for card in used(seen)],
                     xids=list(seen.machine.xids))  # fmt: skip
    log = seen.machine.unknown.get("xids")
    return ok(name, f"none{f'; the kernel log cannot be read: {log}' if log else ''}")


def clocks(seen: CheckContext) -> Check:
    name, none = "GPU clocks", _none(seen)
    if none is not None:
        return not_applicable(name, none)
    found = []
    for card in used(seen):
        if card.slowed_by:
            found.append(f"GPU {card.index} is slowed down: {', '.join(card.slowed_by)}")
        limit, default = card.power_limit_w, card.power_default_w
        if limit is not None and default and limit < LEAST_POWER_SHARE * default:
            found.append(f"GPU {card.index} may take {limit:.0f} W of the {default:.0f} W it came with")
        warm, hot = card.temperature_c, card.slowdown_c
        if warm is not None and hot and warm > hot - NEAR_SLOWDOWN_C:
            found.append(f"GPU {card.index} has {warm} °C and slows down at {hot} °C")
    if found:
        return fail(name, "SF723", "; ".join(found), cards=[card.index for card in used(seen)])
    hottest = max((card.temperature_c for card in used(seen) if card.temperature_c is not None), default=None)
    return ok(name, f"nothing slows them down{f', the warmest has {hottest} °C' if hottest is not None else ''}")


def links(seen: CheckContext) -> Check:
    """NVLinks that are down, and GPUs that the switches do not know yet."""
    name, none = "NVLink", _none(seen)
    if none is not None:
        return not_applicable(name, none)
    cards = used(seen)
    # Ports without a bridge are down on sound cards too: what cards of the same kind have here is what can be had.
    most = max((sum(card.links) for card in seen.machine.cards if card.name == cards[0].name), default=0)
    is_board = len(seen.machine.cards) == JOINED_GPUS and any(card.links for card in cards)
    own = _links_of(cards[0].name) if is_board else 0
    should = f"others here have {most}" if most >= own else f"a {cards[0].name} has {own}"
    down = [
        f"GPU {card.index} has {sum(card.links)} NVLinks up, {should}"
        for card in cards
        if sum(card.links) < max(most, own)
    ]
    late = [
        f"GPU {card.index}'s registration with the NVSwitches is {card.fabric}"
        for card in cards
        if card.fabric not in ("", "completed")
    ]
    if down or late:
        return fail(
            name, "SF724", "; ".join([*late, *down]), links={str(card.index): sum(card.links) for card in cards}
        )
    return ok(name, f"{most} links up on each GPU" if most else "none")


def _links_of(name: str) -> int:
    """Of a card that is joined with all others of its board; 0 where it is none such."""
    return 0 if NOT_JOINED.search(name) else next((count for kind, count in LINKS if kind in name), 0)


def pcie(seen: CheckContext) -> Check:
    name, none = "PCIe", _none(seen)
    if none is not None:
        return not_applicable(name, none)
    found = []
    for card in used(seen):
        if card.pcie_width and card.pcie_most_width and card.pcie_width < card.pcie_most_width:
            found.append(f"GPU {card.index} uses {card.pcie_width} of {card.pcie_most_width} lanes")
        could, may = card.pcie_own_generation, card.pcie_most_generation
        if could and may and may < could:
            found.append(f"GPU {card.index} could use generation {could}, and its slot gives {may}")
    if found:
        return fail(name, "SF725", "; ".join(found), cards=[card.index for card in used(seen)])
    first = next((card for card in used(seen) if card.pcie_width), None)
    return ok(name, f"generation {first.pcie_most_generation}, {first.pcie_width} lanes" if first else "not told")


def peers(seen: CheckContext) -> Check:
    """Whether GPUs that work together can read each other's memory."""
    name, none = "GPU to GPU", _none(seen)
    if none is not None:
        return not_applicable(name, none)
    indices = {str(card.index) for card in used(seen)}
    pairs = {pair: how for pair, how in seen.machine.peers.items() if set(pair.split("-")) <= indices}
    if not seen.uses_nccl or seen.local_ranks < 2 or not pairs:
        return not_applicable(name, "one GPU" if len(indices) < 2 else "not told, or the ranks do not use it")
    broken = {pair: how for pair, how in pairs.items() if any(word in how for word in BROKEN_PEERS)}
    if broken:
        pair, how = next(iter(broken.items()))
        cause = f"{len(broken)} of {len(pairs)} pairs cannot read each other's memory; GPUs {pair}: {how}"
        return fail(name, "SF726", cause, pairs=broken)
    working = sum(how == "ok" for how in pairs.values())
    ways = Counter(way for pair, way in seen.machine.topology.items() if pair in pairs)
    between = "; between them " + ", ".join(f"{way}: {ways[way]}" for way in BETWEEN.values() if ways[way])
    said = f"{working} of {len(pairs)} pairs read each other's memory"
    return ok(name, said + between if ways else said)


def others(seen: CheckContext) -> Check:
    """What is on the GPUs before the run is."""
    name, none = "GPUs are free", _none(seen)
    if none is not None:
        return not_applicable(name, none)
    taken = [
        f"GPU {card.index}: {card.memory_used_bytes / GIB:.1f} of {card.memory_bytes / GIB:.0f} GiB"
        + (f", processes {', '.join(str(one) for one in card.processes[:5])}" if card.processes else "")
        for card in used(seen)
        if card.memory_used_bytes is not None
        and card.memory_bytes
        and card.memory_used_bytes > MUCH_MEMORY * card.memory_bytes
    ]
    if taken:
        return fail(name, "SF727", "; ".join(taken), taken=taken)
    return ok(name, "nothing else is on them")


def _none(seen: CheckContext) -> str | None:
    """Why there is nothing to say of GPUs; None where there is."""
    if not seen.machine.cards:
        return seen.machine.unknown.get("cards", "no GPU here")
    if "MIG-" in seen.machine.environment.get("CUDA_VISIBLE_DEVICES", ""):
        return "parts of GPUs (MIG) are not judged"
    return None if used(seen) else "the run uses no GPU"


def joins_all(cards: Sequence[Gpu]) -> bool:
    """Whether NVLink joins each of these with each other: on boards with switches, not by bridges between two cards."""
    is_card = re.compile("PCIe|NVL", re.IGNORECASE)
    return bool(cards) and all(any(card.links) and not is_card.search(card.name) for card in cards)


def used(seen: CheckContext) -> list[Gpu]:
    """Those that the run uses: the first ones that CUDA_VISIBLE_DEVICES leaves, as many as it has ranks here."""
    if not seen.is_on_gpus:
        return []
    cards = list(seen.machine.cards)
    named = seen.machine.environment.get("CUDA_VISIBLE_DEVICES")
    cards = [cards[number] for number in visible(named, [card.uuid for card in cards])]
    return cards[: seen.local_ranks] if seen.run is not None else cards


CHECKS = (errors, clocks, links, pcie, peers, others)
