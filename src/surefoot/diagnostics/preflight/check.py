"""Preflight check results, and the context that every check reads."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.config import LoadedConfig, RunConfig
from surefoot.findings import Finding
from surefoot.system.machine import Snapshot
from surefoot.system.nvml import is_slice, visible

Status = Literal["ok", "warning", "failed", "not applicable"]


@dataclass(frozen=True)
class CheckContext:
    """Machine and run that a check reads."""

    machine: Snapshot
    loaded: LoadedConfig | None = None
    """Configuration of the run to check, or None to check the machine alone."""

    @property
    def run(self) -> RunConfig | None:
        return self.loaded.run if self.loaded is not None else None

    def require_run(self) -> RunConfig:
        """Return the run. Raises: NotApplicable without one."""
        if self.run is None:
            raise NotApplicable("no run is given")
        return self.run

    def where(self, *settings: str) -> str:
        """Return the place of some settings; empty without a run."""
        return self.loaded.where(*settings) if self.loaded is not None else ""

    @property
    def nodes(self) -> int:
        """Number of machines of the run."""
        return self.run.nnodes if self.run is not None else 1

    @property
    def local_ranks(self) -> int:
        """Number of ranks on each machine; without a run, one for each GPU."""
        return self.run.nproc_per_node if self.run is not None else max(1, self.gpus)

    @property
    def gpus(self) -> int:
        """Number of GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide."""
        cards = self.machine.cards
        identities = [card.uuid for card in cards] if cards else [""] * self.machine.gpus
        visible_devices = self.machine.environment.get("CUDA_VISIBLE_DEVICES")
        if is_slice(visible_devices):  # a process sees one slice of a GPU at most
            return min(1, self.machine.gpus)
        if (
            visible_devices is not None
            and not cards
            and any(entry.strip()[:1].isalpha() for entry in visible_devices.split(","))
        ):
            # GPUs are given by UUID, and the UUIDs of this machine are unknown.
            return min(self.machine.gpus, len(visible_devices.split(",")))
        return len(set(visible(visible_devices, identities)))

    @property
    def is_on_gpus(self) -> bool:
        """Whether the run uses GPUs of this machine."""
        has_cuda = "cuda" in self.machine.versions or "torch" not in self.machine.versions
        return self.gpus > 0 and has_cuda and (self.run is None or self.run.device != "cpu")

    @property
    def ranks(self) -> int:
        return self.local_ranks * self.nodes

    @property
    def uses_nccl(self) -> bool:
        return self.is_on_gpus and self.ranks > 1


@dataclass(frozen=True)
class Result:
    """Outcome of a check. `finding` is set if something is wrong."""

    status: Status
    text: str
    finding: Finding | None = None


@dataclass(frozen=True)
class Check:
    """A result with the name of its check."""

    name: str
    status: Status
    text: str
    finding: Finding | None = None
    is_answered: bool = True
    """Whether the check finished before its deadline."""

    def as_dict(self) -> dict[str, Any]:
        payload = asdict(self)
        return {**payload, "finding": self.finding.as_dict() if self.finding is not None else None}


class NotApplicable(Exception):
    """A check does not apply to this machine and run; the text is the reason."""


def run_check(name: str, check: Callable[..., Result], *arguments: Any) -> Check:
    """Run a check and return its result with its name."""
    try:
        result = check(*arguments)
    except NotApplicable as reason:
        return Check(name, "not applicable", str(reason))
    return Check(name, result.status, result.text, result.finding)


def ok(text: str) -> Result:
    return Result("ok", text)


def fail(code: str, cause: str, *, fix: str = "", is_fatal: bool = False, **evidence: Any) -> Result:
    """Return a result with a finding.

    A failure (`is_fatal`) keeps a run from starting and is only for what cannot work. Everything else is a warning.
    """
    finding = Finding(code, cause, evidence, fix, 1.0 if is_fatal else 0.7)
    return Result("failed" if is_fatal else "warning", cause, finding)
