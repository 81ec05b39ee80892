"""Every architecture that trains can be planned, except those whose code decides by values."""

from pathlib import Path

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
