"""How a GRPO run of an example went, in a line."""

import json
import sys

from surefoot.training.run_summary import RunResult

SHOWN_STEPS = 10


def show(result: RunResult) -> None:
    """Print the mean reward of every ten steps; end here if the run was interrupted."""
    if result.status != "completed":
        sys.exit(f"{result.status} after {result.steps} steps; start again, or go on with surefoot train")
    lines = (result.run_folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rewards = [line["reward"] for line in map(json.loads, lines) if "reward" in line]
    parts = (rewards[at : at + SHOWN_STEPS] for at in range(0, len(rewards), SHOWN_STEPS))
    print("\nmean reward of every ten steps: " + "  ".join(f"{sum(part) / len(part):.2f}" for part in parts))
