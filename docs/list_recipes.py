"""Writer of recipes.md: each recipe of examples/recipes with its plan. `python docs/list_recipes.py`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RECIPES = HERE.parent / "examples" / "recipes"
PLANS = {
    "qwen3-8b-lora-24gb": ("rtx4090", "qwen3-8b"),
    "qwen2.5-vl-7b-lora-24gb": ("rtx4090", "qwen2.5-vl-7b"),
    "qwen3-30b-a3b-nf4-24gb": ("rtx4090", "qwen3-30b-a3b"),
    "qwen3-30b-a3b-lora-80gb": ("h100", "qwen3-30b-a3b"),
    "qwen3-8b-full-8x80gb": ("h100", "qwen3-8b"),
    "qwen3-30b-a3b-full-8x80gb": ("h100", "qwen3-30b-a3b"),
    "qwen3.5-35b-a3b-lora-8x80gb": ("h100", "qwen3.5-35b-a3b"),
    "qwen3-8b-grpo-8x80gb": ("h100", "qwen3-8b"),
}
"""Recipe -> the GPU to plan for, and the folder of its model's config.json in examples/plans."""
PAGES = {"recipes.md": "en", "zh-CN/recipes.md": "zh"}
"""Pages, and their language in recipes_words.yaml."""
WORDS = yaml.safe_load((HERE / "recipes_words.yaml").read_text("utf-8"))


def forecast(recipe: str) -> dict[str, Any]:
    """Return the plan of a recipe on its GPU."""
    device, folder = PLANS[recipe]
    model = RECIPES.parent / "plans" / folder
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "plan", "--json", str(RECIPES / f"{recipe}.yaml"),
         f"device={device}", f"model={model}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def row(recipe: str, plan: dict[str, Any], recomputation: str) -> str:
    """Return the row of a recipe. `recomputation`: word for it in the language of the page."""
    gib = 1 << 30
    recompute = f" + {recomputation}" if plan["gradient_checkpointing"] else ""
    speed = float(f"{plan['tokens_per_step'] / plan['step_s']:.2g}")
    return (
        f"| `{recipe}.yaml` | "
        f"{plan['ranks']} x {plan['device']['name']} | {plan['per_device_train_batch_size']}{recompute} | "
        f"{plan['device_peak_bytes'] / gib:.1f} GiB | {plan['host_peak_bytes'] / gib:.0f} GiB | {speed:,.0f} |"
    )


def main() -> None:
    plans = {recipe: forecast(recipe) for recipe in PLANS}
    for page, language in PAGES.items():
        words = WORDS[language]
        rows = [row(recipe, plan, words["recomputation"]) for recipe, plan in plans.items()]
        (HERE / page).write_text(words["page"] + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
