"""The batch source of GRPO: prompts in the order of the data, their completions, rewards, advantages, micro-batches.

Every decision is made on all ranks from the same records, so the ranks never disagree about the contents of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isnan
from typing import Any

from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset
from surefoot.data.images import Image
from surefoot.data.row_formats import IN_THE_ROW
from surefoot.data.sampler import Position, SampleKey, StepBatch
from surefoot.errors import DataError, StoppedOnFinding, SurefootError
from surefoot.events import CompletionsMade, Event, FindingMade, Heartbeat
from surefoot.findings import Finding
from surefoot.methods.base import LAST_WAIT_S, Interrupted, MethodContext
from surefoot.methods.grpo.advantage import has_learning_signal
from surefoot.methods.grpo.batch import Trajectory, policy_batches, rank_slice, trajectory_of
from surefoot.methods.grpo.reward_checks import FlatRewards, failing_rewards, no_rewards
from surefoot.methods.grpo.rewards import Rewards
from surefoot.methods.grpo.scoring import Group, GroupScorer, compute_metrics
from surefoot.methods.grpo.settings import GrpoConfig
from surefoot.methods.grpo.types import (
    Completion,
    Engine,
    Prompt,
    Request,
    Sampling,
    Wait,
    run_interruptible,
)

EVALUATION = 1 << 32
"""Part of the seeds of evaluations; the seeds of steps have the step's number in its place."""
POLL_S = 5.0
"""Seconds between two checks of the stop signal, with a heartbeat, in a wait for the engine."""


@dataclass(frozen=True)
class _Rollout:
    """Completions that are requested from the engine, with the prompts of `rows`."""

    rows: StepBatch
    prompts: list[Prompt]
    wait: Wait
    """Wait for the completions of this rank."""


@dataclass(frozen=True)
class _Prefetch:
    """A rollout that is generated while another is trained on."""

    begin: Position
    """Position of the data at which its prompts begin."""
    rollout: _Rollout | SurefootError
    """The rollout, or the error of its request, which the step that needs it raises."""


@dataclass
class _Current:
    """The completions that steps are trained on."""

    trajectories: list[Trajectory]
    metrics: Mapping[str, float]
    began: float
    """Share of the data seen before them."""
    epoch: float
    """Share of the data seen after all steps on them."""
    next: Position


class RolloutSource:
    """The source of the batches of a GRPO run."""

    def __init__(
        self,
        config: GrpoConfig,
        context: MethodContext,
        engine: Engine,
        rewards: Rewards,
        sampling: Sampling,
        *,
        longest_context: int | None,
        share_prompts: bool,
    ) -> None:
        """Create the source. `longest_context`: that of the model, in tokens. `share_prompts`: see `collate_policy`."""
        self._config = config
        self._context = context
        self._data = context.data
        self._ranks = context.ranks
        self._engine = engine
        self._sampling = sampling
        self._longest_context = longest_context
        self._share_prompts = share_prompts
        self._scorer = GroupScorer(config, context, rewards)
        self._current: _Current | None = None
        self._prefetches: list[_Prefetch] = []
        """At most two: the one that becomes the current rollout, and the next."""
        self._flat = FlatRewards()
        self._reported_functions: dict[bool, set[str]] = {False: set(), True: set()}
        """Reward functions whose failures a finding has reported, in training (False) and in evaluations (True)."""

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
                policy_batches(
                    current.trajectories,
                    self._config.per_device_train_batch_size,
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
        in_use = self._collect_current(step)
        begin = position if not in_use or self._current is None else self._current.next
        return [*in_use, *self._collect_prefetched(begin, wait_s)]

    def _collect_current(self, step: int) -> list[dict[str, Any]]:
        if self._current is None or step % self._config.num_iterations == 0:
            return []
        trajectories = self._current.trajectories
        local_range = rank_slice(len(trajectories), self._data.layout)
        gathered = self._ranks.gather([asdict(trajectories[index]) for index in local_range])
        current = self._current
        header = {
            "began": current.began,
            "epoch": current.epoch,
            "next": asdict(current.next),
            "about": dict(current.metrics),
        }
        return [header, *(trajectory for rank_trajectories in gathered for trajectory in rank_trajectories)]

    def _collect_prefetched(self, begin: Position, wait_s: float) -> list[dict[str, Any]]:
        rollout = next((prefetch.rollout for prefetch in self._prefetches if prefetch.begin == begin), None)
        if not isinstance(rollout, _Rollout):
            return []
        try:
            with self._context.phase(self._engine.phase):
                local_completions = self._wait_for_save(rollout.wait, wait_s)
        except SurefootError:  # the step that needs them raises it; the checkpoint of the steps before is still saved
            return []
        if local_completions is None:
            return []
        gathered = self._ranks.gather([asdict(completion) for completion in local_completions])
        completions = [completion for rank_completions in gathered for completion in rank_completions]
        return [{"ahead": asdict(begin), "completions": completions}]

    def restore(self, pending: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the return value of `pending`. Collective. Raises: DataError on all ranks for a prompt."""
        in_use = [entry for entry in pending if "ahead" not in entry]
        if in_use:
            header, *rest = in_use
            trajectories = [trajectory_of(entry) for entry in rest]
            self._current = _Current(
                trajectories, header["about"], header["began"], header["epoch"], Position(**header["next"])
            )
        for entry in (entry for entry in pending if "ahead" in entry):
            begin = Position(**entry["ahead"])
            rows = self._read_rows(begin, self._prompts_per_rollout)
            completions = [Completion(**completion) for completion in entry["completions"]]
            local_range = rank_slice(len(completions), self._data.layout)
            prompts = self._read_row_prompts(rows)
            wait = _return_at_once(completions[local_range.start : local_range.stop])
            self._prefetches.append(_Prefetch(begin, _Rollout(rows, prompts, wait)))

    def evaluate(self, held_out: Dataset, step: int) -> dict[str, float]:
        """Return the metrics of completions of held-out prompts, by the weights after `step` steps. Collective.

        Each prompt has `num_generations`, with the same seeds each time: two evaluations differ by the weights alone.
        Raises: as `batches`.
        """
        self._finish_prefetches()
        keys = list(held_out.sample_keys())
        groups: list[Group] = []
        for begin in range(0, len(keys), self._prompts_per_rollout):
            prompts = self._read_prompts(held_out, keys[begin : begin + self._prompts_per_rollout])
            wait = self._request_completions(prompts, (EVALUATION, begin), step)
            groups += self._scorer.score_groups(prompts, self._wait_for_completions(wait))
        lines = tuple(self._scorer.format_lines(groups))
        findings = map(FindingMade, self._find_failing_rewards(groups, step, is_evaluation=True))
        self._emit_events(CompletionsMade(step, step, lines, is_evaluation=True), *findings)
        return {f"eval_{name}": value for name, value in compute_metrics(groups, self._scorer.names).items()}

    def _finish_prefetches(self) -> None:
        """Wait for prefetched completions, because the engine is needed for others. Collective."""
        for number, prefetch in enumerate(self._prefetches):
            if isinstance(prefetch.rollout, _Rollout):
                completions = self._wait_for_completions(prefetch.rollout.wait)
                rollout = replace(prefetch.rollout, wait=_return_at_once(completions))
                self._prefetches[number] = replace(prefetch, rollout=rollout)

    def end(self) -> None:
        """End the engine, whether the run succeeded or not. The owners of rewards and server end these."""
        self._engine.end()

    @property
    def _prompts_per_rollout(self) -> int:
        return self._config.sequences_per_step // self._config.num_generations

    def _roll_out(self, position: Position, step: int, began: float) -> _Current:
        """Return the groups of a step; `dynamic_sampling` replaces those without a learning signal in a few rounds."""
        config = self._config
        prefetch = next((prefetch for prefetch in self._prefetches if prefetch.begin == position), None)
        self._prefetches = [] if prefetch is None else [prefetch]  # kept for the whole step, which may be interrupted
        if prefetch is not None:
            rollout = prefetch.rollout
        else:
            rollout = self._request_rollout(self._read_rows(position, self._prompts_per_rollout), step, step, 0)
        if isinstance(rollout, SurefootError):
            raise rollout
        rows = rollout.rows
        num_groups = len(rows.rows)  # fewer at the end of an epoch
        completions = self._wait_for_completions(rollout.wait)
        if not config.dynamic_sampling:  # the engine works while rewards are computed
            self._request_prefetch(rows, step)
        groups = self._scorer.score_groups(rollout.prompts, completions)
        useful = [group for group in groups if self._scorer.has_learning_signal(group)]
        flat = [group for group in groups if not self._scorer.has_learning_signal(group)]
        if config.dynamic_sampling:
            for attempt in range(1, config.dynamic_sampling_tries + 1):
                if len(useful) >= num_groups:
                    break
                rows = self._read_rows(rows.next, num_groups - len(useful))
                rollout = self._request_rollout(rows, step, step, attempt)
                for group in self._scorer.score_groups(rollout.prompts, self._wait_for_completions(rollout.wait)):
                    (useful if self._scorer.has_learning_signal(group) else flat).append(group)
            groups = [*useful, *flat][:num_groups]
        trajectories, lines = self._scorer.build_trajectories(groups)
        self._emit_events(CompletionsMade(step + 1, _get_oldest_version(groups), tuple(lines)))
        metrics = self._check_rewards(groups, [*useful, *flat], step)
        if config.dynamic_sampling:
            metrics["groups_replaced"] = float(len(useful) + len(flat) - num_groups)
            self._request_prefetch(rows, step)
        if self._engine.bytes_sent:
            metrics["sync_bytes"] = float(self._engine.bytes_sent)
        return _Current(trajectories, metrics, began, rows.epoch, rows.next)

    def _request_prefetch(self, rows: StepBatch, step: int) -> None:
        """Request the rollout after `rows`, if the config prefetches and the run has one left. Collective."""
        next_step = step + self._config.num_iterations
        if not self._config.max_staleness or self._config.is_over(next_step, rows.epoch):
            return
        rollout: _Rollout | SurefootError
        try:
            rollout = self._request_rollout(self._read_rows(rows.next, self._prompts_per_rollout), step, next_step, 0)
        except SurefootError as error:  # raised on all ranks; the current completions are trained on first
            rollout = error
        self._prefetches.append(_Prefetch(rows.next, rollout))

    def _read_rows(self, position: Position, count: int) -> StepBatch:
        return self._ranks.run_or_raise_on_all(lambda: self._data.order.step(position, count))

    def _read_row_prompts(self, rows: StepBatch) -> list[Prompt]:
        return self._read_prompts(self._data.train, [row[0] for row in rows.rows])

    def _read_prompts(self, dataset: Dataset, keys: Sequence[SampleKey]) -> list[Prompt]:
        with self._context.phase("data_wait"):
            return self._ranks.run_or_raise_on_all(lambda: [self._read_prompt(dataset, key) for key in keys])

    def _request_rollout(self, rows: StepBatch, step: int, for_step: int, attempt: int) -> _Rollout:
        """Request completions of a step's prompts, by the policy after `step`. Collective."""
        prompts = self._read_row_prompts(rows)
        return _Rollout(rows, prompts, self._request_completions(prompts, (for_step, attempt), step))

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
        with self._context.phase("sync"):
            self._engine.publish(step)
        with self._context.phase(self._engine.phase):
            return self._engine.ask(requests, self._sampling, step)

    def _wait_for_completions(self, wait: Wait) -> list[Completion]:
        """Return this rank's completions; the engine has its own deadline. Collective.

        Raises: StoppedOnFinding (SF801, SF806).
        """
        with self._context.phase(self._engine.phase):
            completions = self._poll(wait, inf, is_told_to_stop=self._context.is_told_to_stop)
        assert completions is not None
        return completions

    def _poll(
        self, wait: Wait, timeout_s: float, *, is_told_to_stop: Callable[[], bool] = lambda: False
    ) -> list[Completion] | None:
        """Return the engine's completions; None after `timeout_s`. Collective. Raises: Interrupted."""
        left_s = timeout_s
        while left_s > 0:
            completions = run_interruptible(self._ranks, partial(wait, min(left_s, POLL_S)), is_told_to_stop)
            if completions is not None:
                return completions
            left_s -= POLL_S
            self._context.emit(Heartbeat())  # the supervisor must not see a stall: the engine has its own deadline
        return None

    def _wait_for_save(self, wait: Wait, timeout_s: float) -> list[Completion] | None:
        """Return the engine's completions; None after `timeout_s`, or `LAST_WAIT_S` after a stop signal. Collective."""
        try:
            return self._poll(wait, timeout_s, is_told_to_stop=self._context.is_told_to_stop)
        except Interrupted:
            return self._poll(wait, min(timeout_s, LAST_WAIT_S))

    def _read_prompt(self, dataset: Dataset, key: SampleKey) -> Prompt:
        sample = dataset.sample(*key)
        ids = [int(token) for token in sample.ids]
        longest = len(ids) + self._sampling.max_tokens
        if self._longest_context is not None and longest > self._longest_context:
            raise DataError(
                f"{sample.place}: a prompt of {len(ids)} tokens and max_completion_length={self._sampling.max_tokens} "
                f"are {longest} tokens, more than the {self._longest_context} that the model can see. Lower "
                "max_completion_length, or max_prompt_length with truncation: drop."
            )
        columns = _replace_embedded_images(dataset.columns(*key), sample.images)
        return Prompt(ids, sample.place, columns, sample.images)

    def _check_rewards(self, groups: Sequence[Group], all_groups: Sequence[Group], step: int) -> dict[str, float]:
        """Return the metrics of a rollout, and emit findings. `all_groups`: also the groups that were replaced.

        Raises: StoppedOnFinding if no completion has a reward.
        """
        answers = [answer for group in groups for answer in group.answers]
        unmasked = [total for group in groups for total in group.totals if not isnan(total)]
        if not unmasked:
            all_failures = [failure for group in all_groups for answer in group.answers for failure in answer.failures]
            failures = [failure for failure in all_failures if failure.partition(":")[0] in self._scorer.weighted_names]
            stopped = StoppedOnFinding(no_rewards(step + 1, len(answers), failures))
            stopped.is_agreed = True
            raise stopped
        metrics = compute_metrics(groups, self._scorer.names)
        metrics["rewards_failed"] = compute_metrics(all_groups, ())["rewards_failed"]
        metrics["policy_version"] = float(_get_oldest_version(groups))
        findings = self._find_failing_rewards(all_groups, step + 1)
        findings += self._flat.add(
            step + 1,
            has_learning_signal=any(map(self._scorer.has_gradient, groups)),
            is_truncated=any(has_learning_signal(group.totals) for group in groups)
            or all(self._scorer.is_left_out(answer.completion) for answer in answers),
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

    def _find_failing_rewards(
        self, groups: Sequence[Group], step: int, *, is_evaluation: bool = False
    ) -> list[Finding]:
        """Return the finding about reward functions that fail, if one of them has not been reported yet."""
        answers = [answer for group in groups for answer in group.answers]
        failures = [failure for answer in answers for failure in answer.failures]
        reported = self._reported_functions[is_evaluation]
        unreported = {failure.partition(":")[0] for failure in failures} - reported
        reported |= unreported
        failed = [answer for answer in answers if answer.failures]
        if not unreported:
            return []
        left_out = sum(not answer.is_scored for answer in failed)
        return [failing_rewards(step, len(failed), left_out, len(answers), failures, is_evaluation=is_evaluation)]


def _replace_embedded_images(columns: Mapping[str, Any], images: Sequence[Image]) -> Mapping[str, Any]:
    """Return the columns, with the path of the extracted file for each image whose bytes are in the row."""
    if not images:
        return columns
    pairs = zip(columns["images"], images, strict=True)
    return {**columns, "images": [image.path if source == IN_THE_ROW else source for source, image in pairs]}


def _return_at_once(completions: list[Completion]) -> Wait:
    """Return a wait for finished completions."""
    return lambda _seconds: completions


def _get_oldest_version(groups: Sequence[Group]) -> int:
    """Return the version of the oldest policy that drew a completion; replacement groups are of a newer one."""
    return min(answer.completion.policy_version for group in groups for answer in group.answers)
