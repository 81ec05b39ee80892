"""Check of the learning rate against those of published recipes, by tuning and size."""

from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.diagnostics.preflight.memory import require_weights

LEAST_PARAMETERS = 20e6
"""Size below which there are no recipes to compare with."""
BEYOND_TIMES, BELOW_TIMES = 10.0, 100.0
"""Factors beyond the highest, and below the lowest usual rate, from which a run is unlikely to learn."""
USUAL = {
    "lora": ((3e9, 5e-5, 1e-3), (30e9, 2e-5, 5e-4), (float("inf"), 1e-5, 2e-4)),
    "full": ((0.5e9, 2e-5, 1e-3), (3e9, 5e-6, 3e-4), (30e9, 1e-6, 2e-5), (float("inf"), 1e-6, 1e-5)),
}
"""Tuning -> (parameters up to, lowest, highest usual rate).

Sources: LoRA, QLoRA (arXiv:2305.14314, table 9: 2e-4, and 1e-4 from 33B) and "LoRA Without Regret" (Thinking Machines,
2025: ten times the rate of full fine-tuning). Full, SmolLM2 in huggingface/alignment-handbook (1e-3 at 135M and 360M,
3e-4 at 1.7B), Llama 2 (arXiv:2307.09288: 2e-5) and Tulu 3 (arXiv:2411.15124: 5e-6 at 8B, 2e-6 at 70B).
"""


def check_learning_rate(context: CheckContext) -> Result:
    """Check that the learning rate is not far from those of published recipes for models of this size."""
    run = context.require_run()
    size = require_weights(run).parameters
    if size < LEAST_PARAMETERS:
        raise NotApplicable("there are no published recipes for a model of this size")
    lowest, highest = next((low, high) for most, low, high in USUAL[run.tuning] if size <= most)
    rate = run.learning_rate
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
    fix = f"Set learning_rate: {highest / 2:.0e}."
    return fail("SF744", fault, fix=fix, where=context.where("learning_rate"), usual=f"{lowest:.0e} to {highest:.0e}")
