"""The batch source of GRPO: prompts in the order of the data, their completions, rewards, advantages, micro-batches.

Every decision is made on all ranks from the same records, so the ranks never disagree about the contents of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import isnan
from typing import Any

from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset
from surefoot.data.sampler import Position, StepBatch
from surefoot.errors import StoppedOnFinding, SurefootError
from surefoot.events import CompletionsMade, Event, FindingMade
from surefoot.methods.base import MethodContext
from surefoot.methods.grpo.advantage import has_learning_signal
from surefoot.methods.grpo.batch import completion_batches, rank_slice
from surefoot.methods.grpo.pending import CurrentRollout, prefetched_entry, read_pending
from surefoot.methods.grpo.reward_checks import FailureDetector, NoSignalDetector, no_rewards
from surefoot.methods.grpo.rewards import Rewards
from surefoot.methods.grpo.scoring import Group, GroupScorer, ScoredCompletion, compute_metrics
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.rollout.generator import EVALUATION, Generator
from surefoot.methods.rollout.types import Completion, Prompt, Request, Wait


@dataclass(frozen=True)
class _Rollout:
    """Completions that are requested from the engine, with the prompts of `step_batch`."""

    step_batch: StepBatch
    prompts: list[Prompt]
    wait: Wait
    """Wait for the completions of this rank."""


class RolloutSource:
    """The source of the batches of a GRPO run."""

    def __init__(
        self,
        config: GrpoConfig,
        context: MethodContext,
        generator: Generator,
        rewards: Rewards,
        *,
        share_prompts: bool,
    ) -> None:
        """Create the source. `share_prompts`: see `collate_completions`."""
        self._config = config
        self._context = context
        self._data = context.data
        self._ranks = context.ranks
        self._generator = generator
        self._share_prompts = share_prompts
        self._scorer = GroupScorer(config, context, rewards)
        self._prompts_per_rollout = config.sequences_per_step // config.num_generations
        self._current: CurrentRollout | None = None
        self._prefetches: dict[Position, _Rollout | SurefootError] = {}
        """Rollouts that are generated while another is trained on, by the position at which their prompts begin: at
        most the one that becomes the current rollout, and the next. An error of a request is raised by the step that
        needs the rollout."""
        self._no_signal = NoSignalDetector()
        self._failures = FailureDetector()
        self._eval_failures = FailureDetector(is_evaluation=True)

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """Return the batch after `step` steps, with new completions every `num_iterations` steps. Collective.

        `epoch`: share of the data seen before it. Each step on the same completions counts as a part of them.
        With `max_staleness`, the next completions are requested before these are trained on.
        Raises: DataError for a prompt; StoppedOnFinding (SF801, SF803, SF805, SF806); Interrupted; on all ranks.
        """
        use = step % self._config.num_iterations
        if use == 0 or self._current is None:
            self._current = self._roll_out(position, step, epoch)
        current = self._current
        uses = self._config.num_iterations
        # Each rank opens the images of its own part; an error of one is raised on all.
        micro_batches = self._ranks.run_or_raise_on_all(
            lambda: list[MicroBatch](
                completion_batches(
                    current.trajectories,
                    self._config.rows_at_a_time,
                    share_prompts=self._share_prompts,
                    is_first_use=use == 0,
                    layout=self._data.layout,
                    reader=self._data.reader,
                )
            )
        )
        metrics = {**current.metrics, "staleness": float(step - current.metrics["policy_version"])}
        if use == uses - 1:
            return StepBatch(current.epoch, [], current.next, metrics), micro_batches
        step_epoch = current.began + (current.epoch - current.began) * (use + 1) / uses
        return StepBatch(step_epoch, [], position, metrics), micro_batches

    def pending(self, position: Position, step: int, wait_s: float) -> list[dict[str, Any]]:
        """Return, as JSON, the completions that steps after `step` train on. `position`: in the data. Collective.

        They include prefetched completions, if these are finished within `wait_s` seconds; otherwise a resumed run
        requests them again.
        """
        begin, entries = position, []
        if self._current is not None and step % self._config.num_iterations:
            begin, trajectories = self._current.next, self._current.trajectories
            local_range = rank_slice(len(trajectories), self._data.layout)  # other ranks update the others
            gathered = self._ranks.gather([asdict(trajectories[index]) for index in local_range])
            entries = [self._current.header(), *chain.from_iterable(gathered)]
        return [*entries, *self._collect_prefetched(begin, wait_s)]

    def _collect_prefetched(self, begin: Position, wait_s: float) -> list[dict[str, Any]]:
        rollout = self._prefetches.get(begin)
        if not isinstance(rollout, _Rollout):
            return []
        try:
            local_completions = self._generator.wait_for_save(rollout.wait, wait_s)
        except SurefootError:  # the step that needs them raises it; the checkpoint of the steps before is still saved
            return []
        if local_completions is None:
            return []
        gathered = self._ranks.gather([asdict(completion) for completion in local_completions])
        return [prefetched_entry(begin, chain.from_iterable(gathered))]

    def restore(self, pending: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the return value of `pending`. Collective. Raises: DataError on all ranks for a prompt."""
        self._current, prefetched = read_pending(pending)
        for begin, completions in prefetched.items():
            rows, prompts = self._read_rows(begin, self._prompts_per_rollout)
            local_range = rank_slice(len(completions), self._data.layout)
            local_completions = completions[local_range.start : local_range.stop]
            self._prefetches[begin] = _Rollout(rows, prompts, partial(_return_at_once, local_completions))

    def evaluate(self, held_out: Dataset, step: int) -> dict[str, float]:
        """Return the metrics of completions of held-out prompts, by the weights after `step` steps. Collective.

        Each prompt has `num_generations`, with the same seeds each time: two evaluations differ by the weights alone.
        Raises: as `batches`.
        """
        for rollout in self._prefetches.values():  # the engine is needed for other completions
            if isinstance(rollout, _Rollout):
                self._generator.wait(rollout.wait)
        keys = list(held_out.sample_keys())
        groups: list[Group] = []
        for begin in range(0, len(keys), self._prompts_per_rollout):
            prompts = self._generator.read_prompts(held_out, keys[begin : begin + self._prompts_per_rollout])
            wait = self._request_completions(prompts, (EVALUATION, begin), step)
            groups += self._scorer.score_groups(prompts, self._generator.wait(wait))
        lines = tuple(self._scorer.format_lines(groups))
        findings = self._eval_failures.add(step, _completions_of(groups))
        self._emit_events(CompletionsMade(step, step, lines, is_evaluation=True), *map(FindingMade, findings))
        return {f"eval_{name}": value for name, value in compute_metrics(groups, self._scorer.names).items()}

    def _roll_out(self, position: Position, step: int, began: float) -> CurrentRollout:
        """Return the completions of a step. Collective."""
        config = self._config
        prefetch = self._prefetches.get(position)
        # It is kept until the next rollout, because this step may be interrupted.
        self._prefetches = {} if prefetch is None else {position: prefetch}
        if isinstance(prefetch, SurefootError):
            raise prefetch
        rollout = prefetch or self._request_rollout(position, self._prompts_per_rollout, step, (step, 0))
        completions = self._generator.wait(rollout.wait)
        if not config.dynamic_sampling:  # the engine works while rewards are computed
            self._request_prefetch(rollout.step_batch, step)
        groups = all_groups = self._scorer.score_groups(rollout.prompts, completions)
        step_batch = rollout.step_batch
        if config.dynamic_sampling:
            step_batch, all_groups = self._add_replacements(step_batch, all_groups, step)
        # Those with a learning signal first.
        all_groups = sorted(all_groups, key=self._scorer.has_learning_signal, reverse=True)
        if config.dynamic_sampling:
            groups = all_groups[: len(groups)]
        trajectories, lines = self._scorer.build_trajectories(groups)
        self._emit_events(CompletionsMade(step + 1, _get_oldest_version(groups), tuple(lines)))
        metrics = self._check_rewards(groups, all_groups, step)
        if config.dynamic_sampling:
            metrics["groups_replaced"] = float(len(all_groups) - len(groups))
            self._request_prefetch(step_batch, step)
        bytes_sent = self._generator.engine.bytes_sent
        if bytes_sent:
            metrics["sync_bytes"] = float(bytes_sent)
        return CurrentRollout(trajectories, metrics, began, step_batch.epoch, step_batch.next_position)

    def _add_replacements(self, step_batch: StepBatch, groups: list[Group], step: int) -> tuple[StepBatch, list[Group]]:
        """Return `groups` with further ones for those without a learning signal, and the last batch that was read."""
        num_groups = len(groups)  # fewer than usual at the end of an epoch
        for attempt in range(1, self._config.dynamic_sampling_tries + 1):
            missing = num_groups - sum(map(self._scorer.has_learning_signal, groups))
            if missing <= 0:
                break
            rollout = self._request_rollout(step_batch.next_position, missing, step, (step, attempt))
            groups = groups + self._scorer.score_groups(rollout.prompts, self._generator.wait(rollout.wait))
            step_batch = rollout.step_batch
        return step_batch, groups

    def _request_prefetch(self, step_batch: StepBatch, step: int) -> None:
        """Request the rollout after `step_batch`, if the config prefetches and the run has one left. Collective."""
        next_step = step + self._config.num_iterations
        if not self._config.max_staleness or self._config.is_over(next_step, step_batch.epoch):
            return
        try:
            self._prefetches[step_batch.next_position] = self._request_rollout(
                step_batch.next_position, self._prompts_per_rollout, step, (next_step, 0)
            )
        except SurefootError as error:  # raised on all ranks; the current completions are trained on first
            self._prefetches[step_batch.next_position] = error

    def _read_rows(self, position: Position, count: int) -> tuple[StepBatch, list[Prompt]]:
        step_batch = self._ranks.run_or_raise_on_all(lambda: self._data.order.step(position, count))
        keys = [samples[0] for samples in step_batch.sequences]
        return step_batch, self._generator.read_prompts(self._data.train, keys)

    def _request_rollout(self, position: Position, count: int, step: int, seed: tuple[int, int]) -> _Rollout:
        """Request completions of `count` prompts from a position on. Arguments: see `_request_completions`."""
        step_batch, prompts = self._read_rows(position, count)
        return _Rollout(step_batch, prompts, self._request_completions(prompts, seed, step))

    def _request_completions(self, prompts: Sequence[Prompt], seed: tuple[int, int], step: int) -> Wait:
        """Request a group for each prompt, by the policy after `step`. Collective.

        `seed`: part of the seed of each completion, besides the config's seed and its place in the rollout.
        """
        config, each = self._config, self._config.num_generations
        requests = [
            Request(prompt.ids, (config.seed, *seed, index // each, index % each), prompt.images, prompt.place)
            for index in rank_slice(len(prompts) * each, self._data.layout)
            for prompt in [prompts[index // each]]
        ]
        return self._generator.request(requests, step)

    def _check_rewards(self, groups: Sequence[Group], all_groups: Sequence[Group], step: int) -> dict[str, float]:
        """Return the metrics of a rollout, and emit findings. `all_groups`: also the groups that were replaced.

        Raises: StoppedOnFinding if no completion has a reward.
        """
        completions, all_completions = _completions_of(groups), _completions_of(all_groups)
        unmasked = [completion.total for completion in completions if not isnan(completion.total)]
        if not unmasked:
            finding = no_rewards(step + 1, len(completions), all_completions, self._scorer.weighted_names)
            raise StoppedOnFinding(finding, is_agreed=True)
        metrics = compute_metrics(groups, self._scorer.names)
        metrics["rewards_failed"] = float(sum(bool(completion.failures) for completion in all_completions))
        metrics["policy_version"] = float(_get_oldest_version(groups))
        findings = self._failures.add(step + 1, all_completions)
        findings += self._no_signal.add(
            step + 1,
            has_learning_signal=any(map(self._scorer.has_gradient, groups)),
            is_truncated=any(has_learning_signal(group.totals) for group in groups)
            or all(map(self._scorer.is_masked_as_truncated, completions)),
            truncated_share=metrics["truncated_share"],
            rewards=unmasked,
        )
        self._emit_events(*map(FindingMade, findings))
        return metrics

    def _emit_events(self, *events: Event) -> None:
        """Emit events that all ranks have. Rank 0 writes them, and its error is raised on all ranks. Collective.

        Raises: StorageError on all ranks.
        """

        def emit_events() -> None:
            for event in events:
                self._context.emit(event)

        self._ranks.run_or_raise_on_all(emit_events, names_rank=False)


def _return_at_once(completions: list[Completion], _seconds: float) -> list[Completion]:
    return completions


def _completions_of(groups: Sequence[Group]) -> list[ScoredCompletion]:
    return [completion for group in groups for completion in group.completions]


def _get_oldest_version(groups: Sequence[Group]) -> int:
    """Return the version of the oldest policy that drew a completion; replacement groups are of a newer one."""
    return min(completion.policy_version for completion in _completions_of(groups))
