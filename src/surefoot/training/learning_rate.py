"""Learning rates of published recipes, by tuning and size: the value of `auto`, and what is usual."""

from dataclasses import dataclass

from surefoot.config import RunConfig

LEAST_PARAMETERS = 20e6
"""Size below which there are no recipes."""
WITHOUT_RECIPE = 1e-4
"""The value of `auto` for smaller models; a choice of ours."""


SHARES = {"lion": 0.3}
"""Optimizer -> its learning rates as a share of AdamW's, which recipes are for. Source: arXiv:2302.06675, section 5."""
WITHOUT_RECIPES = ("sgd",)
"""Optimizers whose learning rates follow from the size of gradients."""


@dataclass(frozen=True)
class Recipe:
    """Learning rates for models of at most so many parameters."""

    most_parameters: float
    lowest: float
    highest: float
    usual: float


RECIPES = {
    "lora": (Recipe(3e9, 5e-5, 1e-3, 2e-4), Recipe(30e9, 2e-5, 5e-4, 2e-4), Recipe(float("inf"), 1e-5, 2e-4, 1e-4)),
    "full": (
        Recipe(0.5e9, 2e-5, 1e-3, 1e-4),
        Recipe(3e9, 5e-6, 3e-4, 2e-5),
        Recipe(30e9, 1e-6, 2e-5, 1e-5),
        Recipe(float("inf"), 1e-6, 1e-5, 2e-6),
    ),
}
"""Tuning -> recipes, by size.

Sources: LoRA, QLoRA (arXiv:2305.14314, table 9: 2e-4, and 1e-4 from 33B) and "LoRA Without Regret" (Thinking Machines,
2025: ten times the rate of full fine-tuning). Full, SmolLM2 in huggingface/alignment-handbook (1e-3 at 135M and 360M,
3e-4 at 1.7B), Llama 2 (arXiv:2307.09288: 2e-5) and Tulu 3 (arXiv:2411.15124: 5e-6 at 8B, 2e-6 at 70B).
"""


def find_recipe(run: RunConfig, parameters: int) -> Recipe | None:
    """Return the recipe for a model of so many parameters; None if there is none for its size."""
    if parameters < LEAST_PARAMETERS or run.optim in WITHOUT_RECIPES:
        return None
    recipe = next(recipe for recipe in RECIPES[run.tuning] if parameters <= recipe.most_parameters)
    share = SHARES.get(run.optim, 1.0)
    return Recipe(recipe.most_parameters, share * recipe.lowest, share * recipe.highest, share * recipe.usual)


def choose_learning_rate(run: RunConfig, parameters: int) -> float:
    """Return the value of `learning_rate: auto` for a model of so many parameters."""
    recipe = find_recipe(run, parameters)
    without = WITHOUT_RECIPE * SHARES.get(run.optim, 1.0)
    rate = (recipe.usual if recipe is not None else without) * run.learning_rate_share
    return float(f"{rate:.3g}")  # as it is printed, so that it can be written into run.yaml
