"""DPO that makes answers shorter and leaves them right: teach a small model wordy sums, then prefer the short ones.

python examples/shorter.py [FOLDER] [key=value ...]      default: shorter/

Settings are those of DPO: `loss_type=ipo`, `tuning=lora lora_rank=4`, ...
"""

import json
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import surefoot

HERE = Path(__file__).parent
MOST = 20
TAUGHT, COMPARED, HELD_OUT = 160, 120, 32
"""Number of sums that are taught, that pairs are made of, and that answers are measured on."""
MOST_TOKENS = 48
Sum = tuple[int, int]


def question(one: int, other: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {one} + {other}?"}


def short(one: int, other: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"{one} + {other} = {one + other}"}


def wordy(one: int, other: int) -> dict[str, str]:
    text = f"Let me add the two numbers. When I put {one} and {other} together, {one} + {other} = {one + other}"
    return {"role": "assistant", "content": text}


def list_sums() -> list[Sum]:
    """Return all sums, in an order that is always the same."""
    sums = [(one, other) for one in range(1, MOST + 1) for other in range(1, MOST + 1)]
    random.Random(1).shuffle(sums)
    return sums


def write_rows(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write JSON Lines into a folder. `rows`: of each file by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def write(folder: Path) -> list[Sum]:
    """Write wordy answers to learn, and pairs of a short and a wordy one; return the sums that are in neither."""
    sums = list_sums()
    taught, compared = sums[:TAUGHT], sums[TAUGHT : TAUGHT + COMPARED]
    rows = {
        "taught.jsonl": [{"messages": [question(*pair), wordy(*pair)]} for pair in taught],
        "pairs.jsonl": [
            {"prompt": [question(*pair)], "chosen": [short(*pair)], "rejected": [wordy(*pair)]} for pair in compared
        ],
    }
    write_rows(folder, rows)
    return sums[TAUGHT + COMPARED :][:HELD_OUT]


def measure(run_folder: Path, sums: list[Sum]) -> tuple[float, float]:
    """Return the share of right answers of a trained model, and their mean number of tokens."""
    model, tokenizer = surefoot.load(run_folder)
    num_right = num_tokens = 0
    for pair in sums:
        prompt = tokenizer.apply_chat_template([question(*pair)], add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=MOST_TOKENS, do_sample=False)
        answer = ids[0, prompt["input_ids"].shape[1] :]
        numbers = re.findall(r"\d+", tokenizer.decode(answer, skip_special_tokens=True))
        num_right += numbers[-1:] == [str(sum(pair))]
        num_tokens += len(answer)
    return num_right / len(sums), num_tokens / len(sums)


def main(folder: Path, settings: dict[str, Any]) -> None:
    began = time.perf_counter()
    for made in ("taught", "run"):  # of an earlier start
        shutil.rmtree(folder / made, ignore_errors=True)
    held_out = write(folder)

    print(f"1. SFT on {TAUGHT} wordy answers", flush=True)
    taught = surefoot.train(
        HERE / "grpo-warmup.yaml",
        dataset=folder / "taught.jsonl",
        output_dir=folder / "taught",
        screen=False,
    )
    before = measure(taught.run_folder, held_out)

    print("2. DPO", flush=True)
    result = surefoot.train(
        HERE / "shorter.yaml",
        dataset=folder / "pairs.jsonl",
        init_adapter=taught.artifact,
        output_dir=folder / "run",
        **settings,
    )
    if result.status != "completed":
        sys.exit(f"{result.status} after {result.steps} steps; start again, or go on with surefoot train")

    after = measure(result.run_folder, held_out)
    for name, (share, tokens) in (("before", before), ("after", after)):
        print(f"{name} DPO: {share:.0%} of {len(held_out)} held-out sums right, {tokens:.1f} tokens an answer")
    print(f"adapter: {result.artifact}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    places = [word for word in sys.argv[1:] if "=" not in word]
    main(Path(places[0] if places else "shorter"), {name: yaml.safe_load(value) for name, value in given.items()})
