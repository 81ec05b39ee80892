"""Versions that are known to hang or to be incompatible, as of 2026-11, with sources. Pure."""

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
    """Versions of one package that do not work."""

    package: str
    """Key in `Snapshot.versions`: driver or nccl."""
    since: str
    before: str
    """First later version that works again."""
    what: str
    """Symptom, as a clause."""
    source: str
    fix: str
    avoided_by: tuple[str, str] = ("", "")
    """(environment variable, value that avoids the issue)."""
    where: Callable[[CheckContext], bool] = lambda _: True
    """Whether the machine and the run are affected; called only for runs that use NCCL."""


def _is_arm(context: CheckContext) -> bool:
    return context.machine.architecture == "aarch64"


def _is_over_infiniband(context: CheckContext) -> bool:
    is_off = context.machine.environment.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    return context.nodes > 1 and bool(context.machine.ports) and not is_off


KNOWN_ISSUES = (
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


def find_known_issue(context: CheckContext) -> KnownIssue | None:
    """Return the first known issue of this machine that is not worked around, or None. Runs without NCCL have none."""
    if not context.uses_nccl:
        return None
    for issue in KNOWN_ISSUES:
        variable, value = issue.avoided_by
        is_avoided = bool(variable) and context.machine.environment.get(variable) == value
        if _is_affected(issue, context) and not is_avoided:
            return issue
    return None


def is_workaround(context: CheckContext, variable: str) -> bool:
    """Return whether a variable avoids a known issue of this machine."""
    return context.uses_nccl and any(
        issue.avoided_by[0] == variable and _is_affected(issue, context) for issue in KNOWN_ISSUES
    )


def _is_affected(issue: KnownIssue, context: CheckContext) -> bool:
    version = context.machine.versions.get(issue.package)
    return (
        bool(version)
        and parse_version(issue.since) <= parse_version(version or "") < parse_version(issue.before)
        and issue.where(context)
    )


@dataclass(frozen=True)
class IncompatiblePair:
    """Two packages with versions that are incompatible."""

    packages: tuple[str, str]
    is_bad: Callable[[tuple[int, ...], tuple[int, ...]], bool]
    """Whether two versions, as tuples of numbers, are incompatible."""
    what: str
    source: str
    fix: str


INCOMPATIBLE_PAIRS = (
    IncompatiblePair(
        ("peft", "transformers"), lambda peft, transformers: peft < (0, 18) and transformers >= (5,),
        "importing peft fails: it imports HybridCache, which transformers 5 removed", "huggingface/peft#3333",
        "pip install -U peft: from 0.18 on.",
    ),
    IncompatiblePair(
        ("torchvision", "torch"),
        lambda vision, torch: vision[:1] == (0,) and torch[:1] == (2,) and vision[1:2] != (torch[1] + 15,),
        "importing it fails where transformers looks for it (operator torchvision::nms does not exist)",
        "pytorch/pytorch#157648; the table of pytorch/vision's README: torch 2.N goes with torchvision 0.(N + 15)",
        "Install the torchvision of this torch, or none: images are read without it.",
    ),
)  # fmt: skip


def find_incompatible_pairs(versions: Mapping[str, str]) -> Iterator[IncompatiblePair]:
    """Yield the pairs of installed packages that are incompatible."""
    for pair in INCOMPATIBLE_PAIRS:
        if any("a0" in versions.get(name, "") for name in pair.packages):
            continue  # a pre-release from a vendor's container, whose packages were built for each other
        installed = [parse_version(versions[name]) for name in pair.packages if name in versions]
        if len(installed) == 2 and pair.is_bad(installed[0], installed[1]):
            yield pair


def parse_version(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, which compare as versions do."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) or (0,)
