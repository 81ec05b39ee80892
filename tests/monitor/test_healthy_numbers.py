"""Forty healthy runs, in which no rule about losses and gradients finds anything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.diagnostics.monitor.explain import explain
from tests.support.data import counting_rows, write_jsonl

OF_NUMBERS = {"SF401", "SF402", "SF403", "SF406", "SF407", "SF408", "SF409", "SF410"}
FULL: dict[str, Any] = {"tuning": "full"}
GRPO: dict[str, Any] = {
    "method": "grpo",
    "reward_funcs": [{"func": "regex", "args": {"pattern": "[aeiou]"}}],
    "num_generations": 4,
    "global_batch_size": 8,
    "max_completion_length": 6,
    "max_steps": 25,
}
KINDS = ("llama", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
RUNS: dict[str, dict[str, Any]] = {
    **{f"{kind}-lora": {"kind": kind} for kind in KINDS},
    **{f"{kind}-full": {"kind": kind, **FULL} for kind in KINDS},
    **{f"schedule-{name}": {"lr_scheduler_type": name} for name in ("linear", "cosine", "constant")},
    "warmup": {"warmup_steps": 60},
    "warmup-of-the-whole-run": {"warmup_steps": 120, **FULL},
    "warmup-high-rate": {"warmup_steps": 40, "learning_rate": 1e-2, **FULL},
    "high-rate-lora": {"learning_rate": 3e-3},
    "high-rate-full": {"learning_rate": 1e-3, **FULL},
    "low-rate": {"learning_rate": 1e-6},
    "one-row": {"rows": 1, "global_batch_size": 1},
    "four-rows": {"rows": 4, "global_batch_size": 4},
    "batches-of-one": {"global_batch_size": 1},
    "batches-of-one-full": {"global_batch_size": 1, "learning_rate": 1e-3, **FULL},
    "large-batches": {"global_batch_size": 32, "max_steps": 60},
    "packing": {"packing": True, "max_length": 512},
    "truncation": {"max_length": 40, "truncation": "right"},
    "gradient-checkpointing": {"gradient_checkpointing": True, **FULL},
    "accumulation": {"per_device_train_batch_size": 1},
    "aux-loss": {"kind": "mixtral", "router_aux_loss_coef": 0.01, **FULL},
    "routers": {"kind": "qwen3_moe", "target_modules": ["attention", "router"]},
    "evaluations": {"rows": 200, "eval_fraction": 0.2, "eval_steps": 20},
    "weight-decay": {"weight_decay": 0.1, **FULL},
    "no-clipping": {"max_grad_norm": 0},
    "all-tokens": {"train_on": "all"},
    "bfloat16": {"dtype": "bfloat16"},
    "grpo": GRPO,
    "grpo-beta": {**GRPO, "beta": 0.1},
    "grpo-full": {**GRPO, **FULL},
    "grpo-moe": {**GRPO, "kind": "qwen3_moe"},
    "resumed": {"resumes": True, "lr_scheduler_type": "constant"},
    "resumed-full": {"resumes": True, "lr_scheduler_type": "constant", **FULL},
}
"""Name -> settings; `kind` of the model, number of `rows`, and whether a second start `resumes` the run."""


def test_there_are_forty() -> None:
    assert len(RUNS) >= 40


@pytest.mark.campaign
@pytest.mark.parametrize("name", RUNS)
def test_healthy_numbers_have_no_finding(name: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"max_length": 128, "global_batch_size": 4, "max_steps": 120, "device": "cpu", "save_steps": 0}
    settings |= {"report": False, **RUNS[name]}
    kind, count, resumes = settings.pop("kind", "llama"), settings.pop("rows", 60), settings.pop("resumes", False)
    rows = counting_rows(count)
    if settings.get("method") == "grpo":
        rows = [{"prompt": row["messages"][:1]} for row in rows]
    settings |= {
        "model": str(model_folder(kind)),
        "dataset": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        "output_dir": str(tmp_path / "run"),
    }
    if resumes:
        surefoot.train({**settings, "max_steps": 60, "save_steps": 60}, screen=False)
        settings["save_steps"] = 60
    result = surefoot.train(settings, screen=False)
    assert result.status == "completed"
    assert result.steps == settings["max_steps"]
    found = {finding.code for finding in (*result.findings, *explain(result.run_folder).findings)}
    assert not found & OF_NUMBERS
