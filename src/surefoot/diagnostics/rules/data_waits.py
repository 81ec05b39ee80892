"""The rule for why data are late: what a rank and its worker processes do while it waits for a batch. Pure."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.findings import Finding

Activity = Literal["workers", "own process", "storage", "nothing"]
LEAST_SAMPLES = 5
MOST_OF = 0.6
"""Share of the samples that must show the same activity."""
BLOCKED, RUNNING = "disk-sleep", "running"
CAUSES: dict[Activity, str] = {
    "workers": "its worker processes compute meanwhile",
    "own process": "it decodes and assembles the samples in its own process",
    "storage": "it waits for a disk or a network file system",
    "nothing": "neither it nor a process of its own computes or reads: it waits for a server or a lock",
}
OWN_FIXES: dict[Activity, str] = {
    "workers": "Raise dataset_num_proc (dataloader_num_workers for images), up to the number of cores. Later runs with "
    "the same data read the cache.",
    "own process": "If rows have images, raise dataloader_num_workers, which reads them ahead, or lower max_pixels.",
    "storage": "Copy the data to a local disk, and set SUREFOOT_CACHE to a folder on one.",
}
"""Remedies in a run of `surefoot train`."""
OTHER_FIXES: dict[Activity, str] = {
    "workers": "Raise dataloader_num_workers, up to the number of cores, or prepare the data once before training.",
    "own process": "Set dataloader_num_workers to 4, for example: samples are then decoded beside the steps.",
    "storage": "Copy the data to a local disk, or raise dataloader_num_workers and dataloader_prefetch_factor.",
}
"""Remedies in another trainer that is watched: arguments of transformers' Trainer, which TRL and ms-swift take too."""


@dataclass
class DataWaits:
    """Samples of one rank while it waits for data."""

    samples: Counter[Activity] = field(default_factory=Counter)

    def add(self, state: str, children: tuple[str, ...], *, waits_for_disk: bool) -> None:
        """Add a sample: the states of the rank and of its children, by psutil's names."""
        if waits_for_disk or BLOCKED in (state, *children):
            activity: Activity = "storage"
        elif RUNNING in children:
            activity = "workers"
        else:
            activity = "own process" if state == RUNNING else "nothing"
        self.samples[activity] += 1

    def explain(self, finding: Finding, *, is_own_run: bool) -> Finding:
        """Return the finding that data are late with the reason, if most samples show the same one.

        `is_own_run`: whether Surefoot trains, and no other trainer.
        """
        total = self.samples.total()
        ((activity, count),) = self.samples.most_common(1) or [("nothing", 0)]
        if total < LEAST_SAMPLES or count < MOST_OF * total:
            return finding
        return replace(
            finding,
            cause=f"{finding.cause}: {CAUSES[activity]}",
            evidence={
                **finding.evidence,
                "while_waiting": ", ".join(f"{a} {n}" for a, n in self.samples.most_common()),
            },
            fix=(OWN_FIXES if is_own_run else OTHER_FIXES).get(activity, finding.fix),
        )
