"""The settings with which there is no reference model: the one that training began with, without its adapter."""

from collections.abc import Iterator

from surefoot.config.schema import Contradiction, RunConfig


def reference_conflicts(run: RunConfig, demand: str, otherwise: str, *settings: str) -> Iterator[Contradiction]:
    """Yield why a run has no reference.

    `demand`: what needs one, such as `beta=0.1`; `settings`: those that ask for it; `otherwise`: how to need none.
    """
    if run.tuning == "full":
        yield Contradiction(
            f"{demand} with tuning=full: the reference is the model without its adapter, and full fine-tuning has "
            f"none. Set tuning: lora, or {otherwise}",
            *settings,
            "tuning",
        )
        return
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    if "router" in targets:
        yield Contradiction(
            f"{demand} with router in target_modules: routers are trained in full, so the model without its adapter is "
            f"not the one that training began with. Leave router out, or {otherwise}",
            *settings,
            "target_modules",
        )
    if run.init_adapter:
        yield Contradiction(
            f"{demand} with init_adapter: the reference is the model without any adapter, so the loss would pull the "
            "model back to its state before that adapter was trained. Merge it first (`surefoot export RUN FOLDER "
            f"--merge`) and start from the result, or {otherwise}",
            *settings,
            "init_adapter",
        )
