"""Expert load of the routers over many steps: in one step few tokens may well leave an expert out."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.events import ExpertRanksUsed, ExpertsUsed
from surefoot.models.routing import router_names

STEPS = 50
"""Number of steps over which expert load is counted."""
FAIR_SHARE = 0.5
"""Share of an even load below which an expert may be unused by chance."""


def trains_routers(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Return whether any of the trained `parameters` belongs to a router."""
    routers = router_names(model)
    return any(name.startswith(f"{router}.") for name in parameters for router in routers)


class ExpertLoadCounter:
    """Counter of the rows of each expert; after every `STEPS` steps it reports their distribution, and starts again."""

    def __init__(self, rank: int, *, trains_routers: bool = True, expert_parallel_size: int = 1) -> None:
        """`trains_routers`: frozen routers are not reported. `expert_parallel_size`: ranks that share the experts."""
        self._rank, self._trains_routers, self._expert_parallel_size = rank, trains_routers, expert_parallel_size
        self._rows: Tensor | None = None
        self._was_used: Tensor | None = None
        """Experts that got a fair part of the rows in an earlier count."""
        self._tokens = 0
        self._steps = 0

    def add(self, step: int, counts: Tensor, tokens: int) -> list[ExpertsUsed | ExpertRanksUsed]:
        """Count a step's rows. Shapes: counts int64 [layers, E], the rows each expert got of the step's `tokens`."""
        if not self._trains_routers and self._expert_parallel_size == 1:
            return []
        self._rows = counts.clone() if self._rows is None else self._rows + counts
        self._tokens += tokens
        self._steps += 1
        if self._steps < STEPS:
            return []
        rows = self._rows
        events: list[ExpertsUsed | ExpertRanksUsed] = [self._measure_spread(step, rows)] if self._trains_routers else []
        if self._expert_parallel_size > 1:
            rank_rows = rows.view(len(rows), self._expert_parallel_size, -1).sum(-1).double()
            load = float(rank_rows.max(1).values.sum() / rank_rows.mean(1).sum().clamp(min=1))
            events.append(ExpertRanksUsed(self._rank, step, load, self._expert_parallel_size))
        self._rows, self._tokens, self._steps = None, 0, 0
        return events

    def _measure_spread(self, step: int, rows: Tensor) -> ExpertsUsed:
        chosen = max(1, round(int(rows[0].sum()) / self._tokens))
        """Number of experts per token."""
        shares = rows.topk(chosen).values.sum(1) / rows.sum(1)
        layer = int(shares.argmax())
        is_fair = rows >= FAIR_SHARE * rows.sum(1, keepdim=True) / rows.shape[1]
        before = self._was_used if self._was_used is not None else is_fair
        self._was_used = before | is_fair
        return ExpertsUsed(
            rank=self._rank,
            step=step,
            layer=layer,
            share=float(shares[layer]),
            even_share=chosen / rows.shape[1],
            silent=int((before & (rows == 0)).sum()),
            rows=chosen * self._tokens / rows.shape[1],
        )
