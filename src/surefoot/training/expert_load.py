"""How the routers use the experts over many steps: in one step few tokens may well leave an expert out."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.events import ExpertRanksUsed, ExpertsUsed
from surefoot.models.routing import router_names

STEPS = 50
"""Over which it is counted."""
FAIR_SHARE = 0.5
"""Of an even part: an expert that had less may well be left out by chance."""


def trains_routers(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether any of the trained `parameters` belongs to a router."""
    routers = router_names(model)
    return any(name.startswith(f"{router}.") for name in parameters for router in routers)


class ExpertUse:
    """Adds up the rows of each expert; after every `STEPS` steps it says how they were spread, and begins anew."""

    def __init__(self, rank: int, *, trains_routers: bool = True, shared_out: int = 1) -> None:
        """`trains_routers`: where they are not, what they do is the model's own. `shared_out`: over so many ranks."""
        self._rank, self._trains_routers, self._shared_out = rank, trains_routers, shared_out
        self._rows: Tensor | None = None
        self._was_used: Tensor | None = None
        """Experts that got a fair part of the rows in an earlier count."""
        self._tokens = 0
        self._steps = 0

    def add(self, step: int, counts: Tensor, tokens: int) -> list[ExpertsUsed | ExpertRanksUsed]:
        """Shapes: counts int64 [layers, E], the rows each expert got of the step's `tokens`."""
        if not self._trains_routers and self._shared_out == 1:
            return []
        self._rows = counts.clone() if self._rows is None else self._rows + counts
        self._tokens += tokens
        self._steps += 1
        if self._steps < STEPS:
            return []
        rows = self._rows
        said: list[ExpertsUsed | ExpertRanksUsed] = [self._spread(step, rows)] if self._trains_routers else []
        if self._shared_out > 1:
            of_ranks = rows.view(len(rows), self._shared_out, -1).sum(-1).double()
            load = float(of_ranks.max(1).values.sum() / of_ranks.mean(1).sum().clamp(min=1))
            said.append(ExpertRanksUsed(self._rank, step, load, self._shared_out))
        self._rows, self._tokens, self._steps = None, 0, 0
        return said

    def _spread(self, step: int, rows: Tensor) -> ExpertsUsed:
        chosen = max(1, round(int(rows[0].sum()) / self._tokens))
        """Experts that a token chooses."""
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
