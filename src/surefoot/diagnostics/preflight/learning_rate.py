"""Check of the learning rate against those of published recipes, by tuning and size."""

from surefoot.config.schema import AUTO
from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.diagnostics.preflight.memory import require_weights
from surefoot.training.learning_rate import choose_learning_rate, find_recipe

BEYOND_TIMES, BELOW_TIMES = 10.0, 100.0
"""Factors beyond the highest, and below the lowest usual rate, from which a run is unlikely to learn."""


def check_learning_rate(context: CheckContext) -> Result:
    """Check that the learning rate is not far from those of published recipes for models of this size."""
    run = context.require_run()
    size = require_weights(run).parameters
    recipe = find_recipe(run, size)
    if recipe is None:
        raise NotApplicable("there are no published recipes for a model of this size")
    lowest, highest = recipe.lowest, recipe.highest
    rate = choose_learning_rate(run, size) if run.learning_rate == AUTO else float(run.learning_rate)
    usual = f"recipes for tuning={run.tuning} of {size / 1e9:.2g} G parameters have {lowest:.0e} to {highest:.0e}"
    times = rate / highest
    if times > BEYOND_TIMES:
        fault = (
            f"learning_rate={rate:g} is {times:.0f} times the highest usual one: {usual}. The loss is likely to rise"
        )
    elif 0 < rate < lowest / BELOW_TIMES:
        fault = f"learning_rate={rate:g} is {lowest / rate:.0f} times below the lowest usual one: {usual}. The loss is "
        fault += "likely to stay where it is"
    else:
        return ok(f"{rate:g}; {usual}")
    fix = f"Set learning_rate: {choose_learning_rate(run, size):g}, which is what `auto` chooses."
    return fail("SF744", fault, fix=fix, where=context.where("learning_rate"), usual=f"{lowest:.0e} to {highest:.0e}")
