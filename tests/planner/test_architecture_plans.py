"""Every architecture that trains can be planned, except those whose code decides by values."""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.errors import ModelError
from surefoot.planner.devices import Device
from surefoot.planner.forecast import forecast
from tests.models.architectures import ARCHITECTURES, tiny_model

CPU = Device("cpu", 1 << 40, 1e11, 1e9, is_gpu=False)
DECIDES_BY_VALUES = {"blt", "jetmoe", "qwen4_exp", "qwen4_exp_text", "qwen4_exp_text+ngrams", "xlm", "xmod"}
IN_EVERY_SUITE = {"openai-gpt", "doge", "gemma4_text+global_heads", "longcat_flash"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.models] * (name not in IN_EVERY_SUITE))
        for name, line in ARCHITECTURES.items()
        if line.reason is None and line.is_built
    ],
)
def test_an_architecture_is_planned(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    settings = {"dataset": "rows.jsonl", "output_dir": "run", "max_length": 32, "per_device_train_batch_size": 4}
    run = load_config(None, [], {**settings, "model": str(tmp_path), "target_modules": "all", "device": "cpu"}).run
    if name in DECIDES_BY_VALUES:
        with pytest.raises(ModelError, match="decides by values"):
            forecast(run, tmp_path, CPU)
    else:
        assert forecast(run, tmp_path, CPU).host_peak[1] > 0


@pytest.mark.parametrize(
    ("name", "layers", "renamed", "missing"),
    [
        ("lfm2", {}, {"intermediate_size": "block_ff_dim"}, ()),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]}, {},
         ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")),
    ],
)  # fmt: skip
def test_a_config_as_it_is_released_is_planned(
    name: str, layers: dict[str, Any], renamed: dict[str, str], missing: tuple[str, ...], tmp_path: Path
) -> None:
    config = {**tiny_model(name).config.to_diff_dict(), **layers}
    config = {renamed.get(key, key): value for key, value in config.items() if key not in missing}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"dataset": "rows.jsonl", "output_dir": "run", "max_length": 32, "model": str(tmp_path), "device": "cpu"}
    assert forecast(load_config(None, [], settings).run, tmp_path, CPU).host_peak[1] > 0
