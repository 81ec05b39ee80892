"""The batch source of GRPO: prompts in the order of the data, completions of them, rewards, advantages, micro-batches.

Every decision is made on all ranks from the same records, so the ranks never disagree about what a step is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isnan
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.data.collate import MicroBatch
from surefoot.data.dataset import Dataset
from surefoot.data.image_processor import PixelReader
from surefoot.data.images import Image
from surefoot.data.row_formats import IN_THE_ROW
from surefoot.data.sampler import GlobalOrder, Position, SampleKey, StepBatch
from surefoot.distributed.process_group import World
from surefoot.errors import DataError, StoppedOnFinding, SurefootError
from surefoot.events import CompletionsMade, Event, FindingMade, Heartbeat, Phase
from surefoot.findings import Finding
from surefoot.methods.base import LAST_WAIT_S, Interrupted
from surefoot.methods.grpo.advantage import has_learning_signal
from surefoot.methods.grpo.batch import Trajectory, policy_batches, rank_slice, trajectory_of
from surefoot.methods.grpo.reward_checks import FlatRewards, failing_rewards, no_rewards
from surefoot.methods.grpo.rewards import Rewards
from surefoot.methods.grpo.scoring import Group, GroupScorer, measured_of
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
"""In the seeds of evaluations, where those of steps have a step's number."""
PIECE_S = 5.0
"""Of a wait, after which a stop signal is looked at and a sign of life given."""


@dataclass(frozen=True)
class _Asked:
    """Completions that an engine was asked for; of the prompts of `rows`."""

    rows: StepBatch
    prompts: list[Prompt]
    wait: Wait
    """For the completions of this rank."""


@dataclass(frozen=True)
class _Ahead:
    """A rollout whose completions are made while another is trained on."""

    begin: Position
    """Of the data, where its prompts begin."""
    asked: _Asked | SurefootError
    """Or why they could not be asked for; the step that needs them says so."""


@dataclass
class _Current:
    """The completions that steps are trained on."""

    trajectories: list[Trajectory]
    about: Mapping[str, float]
    began: float
    """Share of the data seen before them."""
    epoch: float
    """And when all steps on them are done."""
    next: Position


class RolloutSource:
    """Where the steps of a GRPO run come from."""

    def __init__(
        self,
        config: GrpoConfig,
        dataset: Dataset,
        order: GlobalOrder,
        engine: Engine,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampling: Sampling,
        context: int | None,
        share_prompts: bool,
        reader: PixelReader | None = None,
        is_told_to_stop: Callable[[], bool] = lambda: False,
        ranks: World,
        phase: Callable[[Phase], AbstractContextManager[None]],
        emit: Callable[[Event], None],
    ) -> None:
        """`context`: the most tokens the model can see. `share_prompts`, `reader`: see `collate_policy`.

        `is_told_to_stop`: whether a signal
        has asked this rank to end; it ends a rollout too.
        """
        self._config = config
        self._dataset = dataset
        self._order = order
        self._engine = engine
        self._sampling = sampling
        self._context = context
        self._share_prompts = share_prompts
        self._reader = reader
        self._ranks = ranks
        self._phase = phase
        self._emit = emit
        self._is_told_to_stop = is_told_to_stop
        self._judge = GroupScorer(
            config, rewards, tokenizer, is_told_to_stop=is_told_to_stop, ranks=ranks, phase=phase, emit=emit
        )
        self._current: _Current | None = None
        self._ahead: list[_Ahead] = []
        """At most two: of the completions that are trained on, and of the next."""
        self._flat = FlatRewards()
        self._told_of: dict[bool, set[str]] = {False: set(), True: set()}
        """Reward functions whose failures a finding has named, in training and in evaluations."""

    def batches(self, position: Position, step: int, epoch: float) -> tuple[StepBatch, list[MicroBatch]]:
        """What the step after `step` of them trains on. New completions every `num_iterations` steps. Collective.

        `epoch`: the share of the data seen before it. Each step on the same completions counts as a part of them.

        With `max_staleness`, the next ones are asked for before these are trained on.
        Raises: DataError for a prompt; StoppedOnFinding (SF801, SF803, SF805, SF806); Interrupted; on all ranks.
        """
        use = step % self._config.num_iterations
        if use == 0 or self._current is None:
            self._current = self._roll_out(position, step, epoch)
        current = self._current
        uses = self._config.num_iterations
        # Each rank opens the images of its own part: what one of them finds wrong, all hear of.
        mine = self._ranks.run_or_raise_on_all(
            lambda: list[MicroBatch](
                policy_batches(
                    current.trajectories,
                    self._config.per_device_train_batch_size,
                    share_prompts=self._share_prompts,
                    is_first_use=use == 0,
                    rank=self._ranks.rank,
                    num_ranks=self._ranks.size,
                    reader=self._reader,
                )
            )
        )
        about = {**current.about, "staleness": float(step - current.about["policy_version"])}
        if use == uses - 1:
            return StepBatch(current.epoch, [], current.next, about), mine
        seen = current.began + (current.epoch - current.began) * (use + 1) / uses
        return StepBatch(seen, [], position, about), mine

    def pending(self, position: Position, step: int, wait_s: float) -> list[dict[str, Any]]:
        """What steps after `step`, at a position of the data, still train on, as JSON. Collective.

        Those are completions, and others that were asked for ahead, where they come in `wait_s` seconds; those that do
        not are asked for anew by a run that goes on.
        """
        in_use = self._pending_steps(step)
        begin = position if not in_use or self._current is None else self._current.next
        return [*in_use, *self._pending_ahead(begin, wait_s)]

    def _pending_steps(self, step: int) -> list[dict[str, Any]]:
        if self._current is None or step % self._config.num_iterations == 0:
            return []
        all_of_them = self._current.trajectories
        mine = rank_slice(len(all_of_them), self._ranks.rank, self._ranks.size)
        gathered = self._ranks.gather([asdict(all_of_them[index]) for index in mine])
        current = self._current
        about = {
            "began": current.began,
            "epoch": current.epoch,
            "next": asdict(current.next),
            "about": dict(current.about),
        }
        return [about, *(one for part in gathered for one in part)]

    def _pending_ahead(self, begin: Position, wait_s: float) -> list[dict[str, Any]]:
        asked = next((ahead.asked for ahead in self._ahead if ahead.begin == begin), None)
        if not isinstance(asked, _Asked):
            return []
        try:
            with self._phase(self._engine.phase):
                mine = self._waited_for_a_save(asked.wait, wait_s)
        except SurefootError:  # the step that needs them says so; what was learned until then is saved
            return []
        if mine is None:
            return []
        gathered = self._ranks.gather([asdict(completion) for completion in mine])
        completions = [one for part in gathered for one in part]
        return [{"ahead": asdict(begin), "completions": completions}]

    def restore(self, pending: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what `pending` gave. Collective. Raises: DataError on all ranks for a prompt."""
        steps = [one for one in pending if "ahead" not in one]
        if steps:
            first, *rest = steps
            trajectories = [trajectory_of(one) for one in rest]
            self._current = _Current(
                trajectories, first["about"], first["began"], first["epoch"], Position(**first["next"])
            )
        for one in (one for one in pending if "ahead" in one):
            begin = Position(**one["ahead"])
            rows = self._rows(begin, self._prompts_each)
            completions = [Completion(**completion) for completion in one["completions"]]
            mine = rank_slice(len(completions), self._ranks.rank, self._ranks.size)
            prompts = self._prompts_of(rows)
            self._ahead.append(_Ahead(begin, _Asked(rows, prompts, _there(completions[mine.start : mine.stop]))))

    def evaluate(self, held_out: Dataset, step: int) -> dict[str, float]:
        """What completions of held-out prompts get by the weights after `step` of them, by name. Collective.

        `num_generations` of each prompt, with the same seeds each time: two evaluations differ by the weights alone.
        Raises: as `batches`.
        """
        self._await_ahead()
        keys = list(held_out.sample_keys())
        groups: list[Group] = []
        for begin in range(0, len(keys), self._prompts_each):
            prompts = self._prompts(held_out, keys[begin : begin + self._prompts_each])
            wait = self._begin(prompts, (EVALUATION, begin), step)
            groups += self._judge.groups(prompts, self._completions(wait))
        lines = tuple(self._judge.lines(groups))
        findings = map(FindingMade, self._failing(groups, step, is_evaluation=True))
        self._tell(CompletionsMade(step, step, lines, is_evaluation=True), *findings)
        return {f"eval_{name}": value for name, value in measured_of(groups, self._judge.names).items()}

    def _await_ahead(self) -> None:
        """Have what was asked for ahead: the engine is wanted for others. Collective."""
        for number, ahead in enumerate(self._ahead):
            if isinstance(ahead.asked, _Asked):
                made = self._completions(ahead.asked.wait)
                self._ahead[number] = replace(ahead, asked=replace(ahead.asked, wait=_there(made)))

    def end(self) -> None:
        """The run is over, well or not; rewards and a server are ended by whoever started them."""
        self._engine.end()

    @property
    def _prompts_each(self) -> int:
        """Of a rollout."""
        return self._config.sequences_per_step // self._config.num_generations

    def _roll_out(self, position: Position, step: int, began: float) -> _Current:
        """The groups of a step; those without spread are replaced where that is asked for, in a few rounds."""
        config = self._config
        ahead = next((ahead for ahead in self._ahead if ahead.begin == position), None)
        self._ahead = [] if ahead is None else [ahead]  # kept until the step is done: it may be interrupted
        asked = ahead.asked if ahead is not None else self._ask(self._rows(position, self._prompts_each), step, step, 0)
        if isinstance(asked, SurefootError):
            raise asked
        rows = asked.rows
        wanted = len(rows.rows)  # fewer at the end of an epoch
        completions = self._completions(asked.wait)
        if not config.dynamic_sampling:  # the engine works while rewards are computed
            self._ask_ahead(rows, step)
        groups = self._judge.groups(asked.prompts, completions)
        kept = [group for group in groups if self._judge.has_learning_signal(group)]
        flat = [group for group in groups if not self._judge.has_learning_signal(group)]
        if config.dynamic_sampling:
            for attempt in range(1, config.dynamic_sampling_tries + 1):
                if len(kept) >= wanted:
                    break
                rows = self._rows(rows.next, wanted - len(kept))
                asked = self._ask(rows, step, step, attempt)
                for group in self._judge.groups(asked.prompts, self._completions(asked.wait)):
                    (kept if self._judge.has_learning_signal(group) else flat).append(group)
            groups = [*kept, *flat][:wanted]
        trajectories, lines = self._judge.trajectories(groups)
        self._tell(CompletionsMade(step + 1, _version(groups), tuple(lines)))
        about = self._find(groups, [*kept, *flat], step)
        if config.dynamic_sampling:
            about["groups_replaced"] = float(len(kept) + len(flat) - wanted)
            self._ask_ahead(rows, step)
        if self._engine.bytes_sent:
            about["sync_bytes"] = float(self._engine.bytes_sent)
        return _Current(trajectories, about, began, rows.epoch, rows.next)

    def _ask_ahead(self, rows: StepBatch, step: int) -> None:
        """Let the engine begin on the rollout after `rows`, where the run wants it and has one left. Collective."""
        further = step + self._config.num_iterations
        if not self._config.max_staleness or self._config.is_over(further, rows.epoch):
            return
        asked: _Asked | SurefootError
        try:
            asked = self._ask(self._rows(rows.next, self._prompts_each), step, further, 0)
        except SurefootError as error:  # all ranks have it; the completions at hand are trained on first
            asked = error
        self._ahead.append(_Ahead(rows.next, asked))

    def _rows(self, position: Position, count: int) -> StepBatch:
        return self._ranks.run_or_raise_on_all(lambda: self._order.step(position, count))

    def _prompts_of(self, rows: StepBatch) -> list[Prompt]:
        return self._prompts(self._dataset, [row[0] for row in rows.rows])

    def _prompts(self, dataset: Dataset, keys: Sequence[SampleKey]) -> list[Prompt]:
        with self._phase("wait for data"):
            return self._ranks.run_or_raise_on_all(lambda: [self._prompt(dataset, key) for key in keys])

    def _ask(self, rows: StepBatch, step: int, for_step: int, attempt: int) -> _Asked:
        """Let the engine begin on completions of a step's prompts, by the policy after `step`. Collective."""
        prompts = self._prompts_of(rows)
        return _Asked(rows, prompts, self._begin(prompts, (for_step, attempt), step))

    def _begin(self, prompts: Sequence[Prompt], draw: tuple[int, int], step: int) -> Wait:
        """Let the engine begin on a group for each prompt, by the policy after `step`. Collective.

        `draw`: of the seeds; other numbers, other completions.
        """
        config, each = self._config, self._config.num_generations
        requests = [
            Request(prompt.ids, (config.seed, *draw, index // each, index % each), prompt.images, prompt.place)
            for index in rank_slice(len(prompts) * each, self._ranks.rank, self._ranks.size)
            for prompt in [prompts[index // each]]
        ]
        with self._phase("sync"):
            self._engine.publish(step)
        with self._phase(self._engine.phase):
            return self._engine.ask(requests, self._sampling, step)

    def _completions(self, wait: Wait) -> list[Completion]:
        """Of this rank; the engine has its own deadline. Collective. Raises: StoppedOnFinding (SF801, SF806)."""
        with self._phase(self._engine.phase):
            made = self._waited(wait, inf, is_told_to_stop=self._is_told_to_stop)
        assert made is not None
        return made

    def _waited(
        self, wait: Wait, seconds: float, *, is_told_to_stop: Callable[[], bool] = lambda: False
    ) -> list[Completion] | None:
        """Return the completions of the engine; None after so many seconds. Collective. Raises: Interrupted."""
        left_s = seconds
        while left_s > 0:
            made = run_interruptible(self._ranks, partial(wait, min(left_s, PIECE_S)), is_told_to_stop)
            if made is not None:
                return made
            left_s -= PIECE_S
            self._emit(Heartbeat())  # for the supervisor: the engine is waited for, and has its deadline
        return None

    def _waited_for_a_save(self, wait: Wait, seconds: float) -> list[Completion] | None:
        """The same; once the run is told to stop, for `LAST_WAIT_S` at most. Collective."""
        try:
            return self._waited(wait, seconds, is_told_to_stop=self._is_told_to_stop)
        except Interrupted:
            return self._waited(wait, min(seconds, LAST_WAIT_S))

    def _prompt(self, dataset: Dataset, key: SampleKey) -> Prompt:
        sample = dataset.sample(*key)
        ids = [int(token) for token in sample.ids]
        longest = len(ids) + self._sampling.max_tokens
        if self._context is not None and longest > self._context:
            raise DataError(
                f"{sample.place}: a prompt of {len(ids)} tokens and max_completion_length={self._sampling.max_tokens} "
                f"are {longest} tokens, more than the {self._context} that the model can see. Lower "
                "max_completion_length, or max_prompt_length with truncation: drop."
            )
        return Prompt(ids, sample.place, _with_files(dataset.columns(*key), sample.images), sample.images)

    def _find(self, groups: Sequence[Group], made: Sequence[Group], step: int) -> dict[str, float]:
        """Metrics of a rollout, and findings. `made`: those that were replaced as well, on which functions fail too.

        Raises: StoppedOnFinding where no completion has a reward.
        """
        answers = [answer for group in groups for answer in group.answers]
        known = [total for group in groups for total in group.totals if not isnan(total)]
        if not known:
            said = [failure for group in made for answer in group.answers for failure in answer.failures]
            failures = [failure for failure in said if failure.partition(":")[0] in self._judge.weighty]
            stopped = StoppedOnFinding(no_rewards(step + 1, len(answers), failures))
            stopped.is_agreed = True
            raise stopped
        about = measured_of(groups, self._judge.names)
        about["rewards_failed"] = measured_of(made, ())["rewards_failed"]
        about["policy_version"] = float(_version(groups))
        findings = self._failing(made, step + 1)
        findings += self._flat.add(
            step + 1,
            has_learning_signal=any(map(self._judge.moves, groups)),
            is_truncated=any(has_learning_signal(group.totals) for group in groups)
            or all(self._judge.is_left_out(answer.completion) for answer in answers),
            truncated_share=about["truncated_share"],
            rewards=known,
        )
        self._tell(*map(FindingMade, findings))
        return about

    def _tell(self, *events: Event) -> None:
        """What all ranks know, and rank 0 writes down: where it cannot, all hear of it. Collective.

        Raises: StorageError on all ranks.
        """
        self._ranks.run_or_raise_on_all(lambda: [self._emit(event) for event in events], names_rank=False)

    def _failing(self, groups: Sequence[Group], step: int, *, is_evaluation: bool = False) -> list[Finding]:
        """Reward functions that fail, of which nothing was said yet."""
        answers = [answer for group in groups for answer in group.answers]
        failures = [failure for answer in answers for failure in answer.failures]
        told_of = self._told_of[is_evaluation]
        failing = {failure.partition(":")[0] for failure in failures} - told_of
        told_of |= failing
        failed = [answer for answer in answers if answer.failures]
        if not failing:
            return []
        left_out = sum(not answer.is_scored for answer in failed)
        return [failing_rewards(step, len(failed), left_out, len(answers), failures, is_evaluation=is_evaluation)]


def _with_files(columns: Mapping[str, Any], images: Sequence[Image]) -> Mapping[str, Any]:
    """The columns; images whose bytes stand in the row are given as the files that hold them."""
    if not images:
        return columns
    named = zip(columns["images"], images, strict=True)
    return {**columns, "images": [image.path if source == IN_THE_ROW else source for source, image in named]}


def _there(completions: list[Completion]) -> Wait:
    """Completions that need no waiting."""
    return lambda _seconds: completions


def _version(groups: Sequence[Group]) -> int:
    """Of the oldest policy that completions are of: where some were replaced, these are of a newer one."""
    return min(answer.completion.policy_version for group in groups for answer in group.answers)
