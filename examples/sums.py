"""GRPO from nothing but a small model: make sums, warm up with SFT on some, and let rewards do the rest.

python examples/sums.py [FOLDER] [key=value ...]      default: sums/

Settings are those of GRPO: `rollout_engine=vllm vllm_command=/opt/vllm/bin/vllm` lets a vLLM server answer.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import reward_curve
import yaml

import surefoot

HERE = Path(__file__).parent
MOST = 20
WARMUP_ROWS = 192


def question(one: int, other: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {one} + {other}? Answer with the number only."}


def write(folder: Path) -> None:
    """All sums up to 20 + 20 as prompts with their answers, and some of them as conversations."""
    sums = [(one, other) for one in range(1, MOST + 1) for other in range(1, MOST + 1)]
    random.Random(1).shuffle(sums)
    rows: dict[str, list[dict[str, Any]]] = {
        "warmup.jsonl": [
            {"messages": [question(*pair), {"role": "assistant", "content": str(sum(pair))}]}
            for pair in sums[:WARMUP_ROWS]
        ],
        "train.jsonl": [{"prompt": [question(*pair)], "answer": str(sum(pair))} for pair in sums],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def main(folder: Path, settings: dict[str, Any]) -> None:
    began = time.perf_counter()
    for made in ("warmup", "run"):  # of an earlier start
        shutil.rmtree(folder / made, ignore_errors=True)
    write(folder)

    print(f"1. warm up with SFT on {WARMUP_ROWS} of {MOST**2} sums", flush=True)
    warm = surefoot.train(
        HERE / "grpo-warmup.yaml", dataset=folder / "warmup.jsonl", output_dir=folder / "warmup", screen=False
    )

    print("2. GRPO", flush=True)
    result = surefoot.train(
        HERE / "grpo.yaml",
        dataset=folder / "train.jsonl",
        init_adapter=warm.artifact,
        output_dir=folder / "run",
        **settings,
    )

    reward_curve.show(result)
    print(f"adapter: {result.artifact}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    places = [word for word in sys.argv[1:] if "=" not in word]
    main(Path(places[0] if places else "sums"), {name: yaml.safe_load(value) for name, value in given.items()})
