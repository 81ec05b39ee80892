"""Make the data of the examples: orders in words, and the same orders as JSON. Deterministic; nothing is downloaded.

python examples/orders.py FOLDER      writes FOLDER/train.jsonl and FOLDER/dev.jsonl
"""

import json
import random
import sys
from pathlib import Path

SYSTEM = "Order to JSON."
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SIZES = ["small", "medium", "large"]
ITEMS = {
    "pizza": "pizzas", "coffee": "coffees", "salad": "salads", "burger": "burgers", "tea": "teas", "soup": "soups",
    "sandwich": "sandwiches", "juice": "juices",
}  # fmt: skip
EXTRAS = ["cheese", "milk", "sugar", "onions", "olives", "honey", "lemon", "ice"]
PHRASES = [
    "I'd like {count} {size} {item} with {extra}, please.",
    "Can I get {count} {size} {item}? Add {extra}.",
    "{count} {item}, {size}, with {extra}.",
    "Please bring us {count} {item} in {size} and put {extra} on top.",
    "We'll take {count} {size} {item}, {extra} on the side.",
]
TRAIN_ROWS, DEV_ROWS = 256, 48


def order(rng: random.Random) -> tuple[str, str]:
    """One order in words and as JSON."""
    quantity = rng.randint(1, 9)
    item, size, extra = rng.choice(list(ITEMS)), rng.choice(SIZES), rng.choice(EXTRAS)
    words = rng.choice(PHRASES).format(
        count=NUMBERS[quantity - 1], size=size, item=item if quantity == 1 else ITEMS[item], extra=extra
    )
    return words[0].upper() + words[1:], json.dumps({"item": item, "n": quantity, "size": size, "extra": extra})


def conversations() -> tuple[list[dict[str, list[dict[str, str]]]], list[dict[str, list[dict[str, str]]]]]:
    """Training and held-out rows; no held-out order stands among the training rows."""
    rng = random.Random(0)
    unique: dict[str, str] = {}
    while len(unique) < TRAIN_ROWS + DEV_ROWS:
        unique.update([order(rng)])
    rows = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": words},
                {"role": "assistant", "content": answer},
            ]
        }
        for words, answer in unique.items()
    ]
    return rows[:TRAIN_ROWS], rows[TRAIN_ROWS:]


def write(folder: Path) -> tuple[Path, Path]:
    """Write both files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "dev.jsonl"
    for path, rows in zip(paths, conversations(), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


if __name__ == "__main__":
    print(*write(Path(sys.argv[1] if len(sys.argv) > 1 else "data")), sep="\n")
