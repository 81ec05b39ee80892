"""The command `surefoot evaluate`: benchmarks of EleutherAI's lm-evaluation-harness on a trained model."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from surefoot.errors import ConfigError, one_line
from surefoot.inference.load import ModelFiles, load
from surefoot.models.generate import batches_of_one_length
from surefoot.training.run_summary import read_result

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

Scores = dict[str, dict[str, float]]
"""Task -> metric -> value."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation."""

    tasks: Sequence[str]
    """Names of tasks, of groups of them, or patterns such as mmlu_*."""
    tasks_folder: str | None = None
    """Folder of YAML files with further tasks."""
    limit: int | None = None
    """Most examples of each task."""
    num_fewshot: int | None = None
    """Examples in each prompt; None: as each task defines."""
    batch_size: int = 8
    chat: bool = True
    """Whether prompts are rendered by the model's chat template, if it has one."""


def evaluate(files: ModelFiles, settings: EvaluationSettings) -> Scores:
    """Return the scores of a model on tasks, and write those of a run into its summary.json as `benchmarks`.

    Raises: ConfigError if the harness is not installed, or a task is unknown or cannot be run.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"benchmarks need lm-evaluation-harness: pip install 'surefoot[evaluate]' ({one_line(error)})."
        ) from error

    class UnpaddedLM(HFLM):  # type: ignore[misc]
        """Model of the harness that generates without padding, which changes the answers of some architectures."""

        def _model_generate(
            self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
        ) -> torch.Tensor:
            """Return contexts and answers, as the harness pads them: before the contexts, and behind the answers."""
            width = context.shape[1]
            lengths = options.pop("attention_mask", torch.ones_like(context)).sum(1).tolist()
            answers: dict[int, torch.Tensor] = {}
            for numbers in batches_of_one_length(lengths, len(lengths)):
                padding = width - lengths[numbers[0]]
                prompts = context[numbers, padding:]
                mask = torch.ones_like(prompts)
                output = super()._model_generate(prompts, max_length - padding, stop, attention_mask=mask, **options)
                answers.update(zip(numbers, output[:, prompts.shape[1] :], strict=True))
            padded = pad_sequence(
                [answers[number] for number in range(len(lengths))],
                batch_first=True,
                padding_value=self.tokenizer.pad_token_id,
            )
            return torch.cat([context, padded], dim=1)

    manager = TaskManager(include_path=settings.tasks_folder)
    tasks = _find_tasks(manager, settings.tasks)
    model, tokenizer = load(files)
    try:
        results = lm_eval.simple_evaluate(
            model=UnpaddedLM(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size),
            tasks=tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            apply_chat_template=settings.chat and tokenizer.chat_template is not None,
            task_manager=manager,
            log_samples=False,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:  # data that cannot be fetched, missing metrics
        raise ConfigError(f"--tasks {','.join(tasks)}: the harness cannot run them: {one_line(error)}") from error
    scores = _read_scores(results["results"])
    result = read_result(files.run) if files.run is not None else None
    if result is not None:
        replace(result, benchmarks={**result.benchmarks, **scores}).write()
    return scores


def _find_tasks(manager: "TaskManager", names: Sequence[str]) -> list[str]:
    """Return the tasks that names and patterns mean. Raises: ConfigError for a name without any."""
    tasks: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise ConfigError(
                f"--tasks {name}: no task of lm-evaluation-harness has this name"
                f"{f'; did you mean {near[0]}?' if near else ''}. `lm_eval ls tasks` lists them."
            )
        tasks += matching
    return tasks


def _read_scores(results: Mapping[str, Mapping[str, Any]]) -> Scores:
    """Return the numbers of the harness's results. Its metrics are called `acc,none`: the filter none is left out."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if "," in name and isinstance(value, int | float)
        }
        for task, metrics in results.items()
    }


def as_text(scores: Scores) -> str:
    """Return the scores as lines, each with its standard error."""
    lines = []
    for task, metrics in scores.items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr{',' + filtered if filtered else ''}")
            lines.append(f"{task}  {name} {value:.4f}{f' ± {error:.4f}' if error is not None else ''}")
    return "\n".join(lines)
