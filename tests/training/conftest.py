"""A small run of GRPO, and what it writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.methods.rollout import setup
from surefoot.methods.rollout.engines.local import LocalEngine
from surefoot.methods.rollout.engines.server import Server
from tests.support.data import write_jsonl
from tests.support.grpo import VOWELS, EagerEngine, prompt_rows


@pytest.fixture
def grpo(model_folder: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    """A small run whose rewards have spread."""
    return {
        "model": str(model_folder("llama")),
        "method": "grpo",
        "dataset": str(write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(12))),
        "output_dir": str(tmp_path / "run"),
        "reward_funcs": [VOWELS],
        "num_generations": 4,
        "global_batch_size": 8,
        "per_device_train_batch_size": 3,
        "max_completion_length": 6,
        "max_length": 64,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "device": "cpu",
        "report": False,
    }


@pytest.fixture
def ahead(grpo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def settings(engine: type[LocalEngine] = EagerEngine, **changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(setup, "open_server", lambda *_: Server("http://127.0.0.1:9"))
        monkeypatch.setattr(
            setup,
            "_build_vllm_engine",
            lambda _, context, train_context, *__: engine(train_context.model, context.tokenizer),
        )
        return {**grpo, "rollout_engine": "vllm", "max_staleness": 1, **changes}

    return settings
