"""SFT, a reward model and GRPO with its rewards: of two ways to answer, a small model keeps the preferred one.

python examples/judged.py [FOLDER] [key=value ...]      default: judged/

Settings are those of GRPO: `max_steps=20`, `beta=0.02`, ...
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from shorter import COMPARED, HELD_OUT, TAUGHT, list_sums, measure, question, short, wordy, write_rows

import surefoot

HERE = Path(__file__).parent
Sum = tuple[int, int]


def write(folder: Path) -> list[Sum]:
    """Write answers of two kinds, pairs that prefer the short one, and prompts; return sums that are in none."""
    sums = list_sums()
    taught, compared = sums[:TAUGHT], sums[TAUGHT : TAUGHT + COMPARED]
    rows = {
        "taught.jsonl": [
            {"messages": [question(*pair), (wordy, short)[number % 2](*pair)]} for number, pair in enumerate(taught)
        ],
        "pairs.jsonl": [
            {"prompt": [question(*pair)], "chosen": [short(*pair)], "rejected": [wordy(*pair)]} for pair in compared
        ],
        "prompts.jsonl": [{"prompt": [question(*pair)]} for pair in compared],
    }
    write_rows(folder, rows)
    return sums[TAUGHT + COMPARED :][:HELD_OUT]


def main(folder: Path, settings: dict[str, Any]) -> None:
    began = time.perf_counter()
    for made in ("taught", "judge", "run"):  # of an earlier start
        shutil.rmtree(folder / made, ignore_errors=True)
    held_out = write(folder)

    print(f"1. SFT on {TAUGHT} answers, half of them wordy", flush=True)
    taught = surefoot.train(
        HERE / "grpo-warmup.yaml",
        dataset=folder / "taught.jsonl",
        output_dir=folder / "taught",
        screen=False,
    )
    before = measure(taught.run_folder, held_out)

    print("2. A reward model that prefers the short ones", flush=True)
    judge = surefoot.train(
        HERE / "judge.yaml",
        dataset=folder / "pairs.jsonl",
        output_dir=folder / "judge",
        screen=False,
    )
    print(f"   accuracy on held-out pairs: {judge.evaluation['eval_rewards/accuracies']:.0%}", flush=True)

    print("3. GRPO with its rewards", flush=True)
    result = surefoot.train(
        HERE / "judged.yaml",
        dataset=folder / "prompts.jsonl",
        init_adapter=taught.artifact,
        reward_funcs=[f"model:{judge.run_folder}"],
        output_dir=folder / "run",
        **settings,
    )
    if result.status != "completed":
        sys.exit(f"{result.status} after {result.steps} steps; start again, or go on with surefoot train")

    after = measure(result.run_folder, held_out)
    for name, (share, tokens) in (("before", before), ("after", after)):
        print(f"{name} GRPO: {share:.0%} of {len(held_out)} held-out sums right, {tokens:.1f} tokens an answer")
    lines = (result.run_folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rewards = [line["reward"] for line in map(json.loads, lines) if "reward" in line]
    print(f"reward of a step: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at the end")
    print(f"adapter: {result.artifact}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    places = [word for word in sys.argv[1:] if "=" not in word]
    main(Path(places[0] if places else "judged"), {name: yaml.safe_load(value) for name, value in given.items()})
