"""Versions that are known to hang or not to go together, as of 2026-11, and where that was found. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from surefoot.diagnostics.preflight.check import CheckContext

NEWER_NCCL = (
    "pip install -U nvidia-nccl-cu13 (-cu12 where torch was built for that): torch takes what is installed. Or a torch "
    "that comes with a newer one."
)


@dataclass(frozen=True)
class KnownIssue:
    """Versions of one thing that do not work."""

    package: str
    """As in `Snapshot.versions`: driver or nccl."""
    since: str
    before: str
    """The first that works again."""
    what: str
    """What happens."""
    source: str
    fix: str
    avoided_by: tuple[str, str] = ("", "")
    """A variable, and its value that keeps it from happening."""
    where: Callable[[CheckContext], bool] = lambda _: True
    """On which machines and in which runs; only those that use NCCL are asked about."""


def _is_arm(seen: CheckContext) -> bool:
    return seen.machine.architecture == "aarch64"


def _is_over_infiniband(seen: CheckContext) -> bool:
    is_off = seen.machine.environment.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    return seen.nodes > 1 and bool(seen.machine.ports) and not is_off


KNOWN_BAD = (
    KnownIssue(
        "driver", "545.23.08", "545.29", "copies between GPUs hang", "Lightning-AI/pytorch-lightning#19425",
        "Use another driver, or export NCCL_P2P_DISABLE=1.", ("NCCL_P2P_DISABLE", "1"),
    ),
    KnownIssue(
        "driver", "560", "570", "copies between GPUs can hang", "dmlc/xgboost#11242",
        "Use a driver from 570 on, or export NCCL_P2P_DISABLE=1.", ("NCCL_P2P_DISABLE", "1"),
    ),
    KnownIssue(
        "nccl", "2.29.2", "2.29.3", "collectives can hang", "pytorch/pytorch#174338", NEWER_NCCL,
    ),
    KnownIssue(
        "nccl", "2", "2.29.3", "collectives hang on ARM after a while, with all GPUs at 100 %",
        "marin-community/marin#8038, release notes of NCCL 2.29.3", NEWER_NCCL, where=_is_arm,
    ),
    KnownIssue(
        "nccl", "2.29.7", "2.30.7", "collectives over InfiniBand between machines can hang",
        "known issues of cuBLASMp, docs.nvidia.com", f"export NCCL_PXN_DISABLE=1, or {NEWER_NCCL}",
        ("NCCL_PXN_DISABLE", "1"), where=_is_over_infiniband,
    ),
)  # fmt: skip


def known_bad(seen: CheckContext) -> KnownIssue | None:
    """What of this machine is known not to work, if anything; only NCCL's users are asked about."""
    if not seen.uses_nccl:
        return None
    for one in KNOWN_BAD:
        variable, value = one.avoided_by
        is_avoided = bool(variable) and seen.machine.environment.get(variable) == value
        if _is_here(one, seen) and not is_avoided:
            return one
    return None


def keeps_from_harm(seen: CheckContext, variable: str) -> bool:
    """Whether a variable keeps something of this machine from happening that is known."""
    return seen.uses_nccl and any(one.avoided_by[0] == variable and _is_here(one, seen) for one in KNOWN_BAD)


def _is_here(one: KnownIssue, seen: CheckContext) -> bool:
    found = seen.machine.versions.get(one.package)
    return bool(found) and numbers(one.since) <= numbers(found or "") < numbers(one.before) and one.where(seen)


@dataclass(frozen=True)
class BadPair:
    """Two packages of which some versions do not go together."""

    packages: tuple[str, str]
    is_bad: Callable[[tuple[int, ...], tuple[int, ...]], bool]
    """Told the numbers of both versions."""
    what: str
    source: str
    fix: str


PAIRS = (
    BadPair(
        ("peft", "transformers"), lambda peft, transformers: peft < (0, 18) and transformers >= (5,),
        "importing peft fails: it asks for HybridCache, which transformers 5 has no more", "huggingface/peft#3333",
        "pip install -U peft: from 0.18 on.",
    ),
    BadPair(
        ("torchvision", "torch"),
        lambda vision, torch: vision[:1] == (0,) and torch[:1] == (2,) and vision[1:2] != (torch[1] + 15,),
        "importing it fails where transformers looks for it (operator torchvision::nms does not exist)",
        "pytorch/pytorch#157648; the table of pytorch/vision's README: torch 2.N goes with torchvision 0.(N + 15)",
        "Install the torchvision of this torch, or none: images are read without it.",
    ),
)  # fmt: skip


def bad_pairs(versions: Mapping[str, str]) -> Iterator[BadPair]:
    """Installed packages that do not go together."""
    for pair in PAIRS:
        if any("a0" in versions.get(name, "") for name in pair.packages):
            continue  # of vendors' containers, whose packages were built for each other between two releases
        found = [numbers(versions[name]) for name in pair.packages if name in versions]
        if len(found) == 2 and pair.is_bad(found[0], found[1]):
            yield pair


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, which compare as versions do."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:3]) or (0,)
