"""Optimizers, schedules and noise of other programs become settings, or are named."""

from typing import Any

import pytest

from surefoot.migrate.convert import convert
from surefoot.migrate.parse_input import parse_run

TRL = "trl sft --model_name_or_path m --dataset_name d --use_peft"
FACTORY = "llamafactory-cli train --model_name_or_path m --dataset d --dataset_dir online --finetuning_type lora"
SWIFT = "swift sft --model m --dataset d.jsonl"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (f"{TRL} --optim paged_adamw_8bit", {"optim": "adamw_8bit"}),
        (f"{TRL} --optim adamw_torch_fused", {"optim": "adamw"}),
        (f"{TRL} --optim lion_32bit --neftune_noise_alpha 5", {"optim": "lion", "neftune_noise_alpha": 5}),
        (f"{TRL} --optim adafactor", {"optim": "adafactor"}),
        (f"{FACTORY} --use_muon true --loraplus_lr_ratio 16", {"optim": "muon", "loraplus_lr_ratio": 16}),
        (f"{SWIFT} --optimizer muon --lorap_lr_ratio 4", {"optim": "muon", "loraplus_lr_ratio": 4}),
        (f"{TRL} --lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs {{\"num_cycles\":3}}",
         {"lr_scheduler_type": "cosine_with_restarts", "lr_cycles": 3}),
        (f"{TRL} --lr_scheduler_type polynomial --lr_scheduler_kwargs {{\"power\":2.0}}",
         {"lr_scheduler_type": "polynomial", "lr_power": 2.0}),
        (f"{TRL} --lr_scheduler_type cosine --lr_scheduler_kwargs {{\"num_cycles\":0.5}}",
         {"lr_scheduler_type": "cosine"}),
        (f"{SWIFT} --optimizer muon --optim adamw_torch", {"optim": "muon"}),
        (f"{SWIFT} --optimizer lorap --lorap_lr_ratio 16", {"loraplus_lr_ratio": 16}),
        (f"{SWIFT} --use_dora true", {"use_dora": True}),
        (f"{FACTORY} --use_dora true", {"use_dora": True}),
        (f"{TRL} --use_dora", {"use_dora": True}),
        ("megatron sft --model m --dataset d.jsonl --lr_decay_style inverse-square-root --lr_warmup_iters 10",
         {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 10}),
        ("megatron sft --model m --dataset d.jsonl --lr_decay_style WSD --lr_wsd_decay_iters 10 --train_iters 100",
         {"lr_scheduler_type": "wsd", "decay_ratio": 0.1}),
        (f"{TRL} --lr_scheduler_type inverse_sqrt --warmup_steps 10",
         {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 10}),
    ],
)  # fmt: skip
def test_they_are_carried(words: str, wanted: dict[str, Any]) -> None:
    run = convert(parse_run(words.split()))
    assert {name: run.settings[name][0] for name in wanted} == wanted
    assert run.unknown == []
    assert not any(name.startswith(("optim", "lr_s", "nef", "lora", "use_dora")) for name in run.left_out), run.left_out


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (f"{TRL} --optim galore_adamw", "optim = galore_adamw"),
        (f"{TRL} --lr_scheduler_type reduce_lr_on_plateau", "lr_scheduler_type = reduce_lr_on_plateau"),
        (f"{TRL} --lr_scheduler_type inverse_sqrt", "lr_scheduler_type = inverse_sqrt"),
        (
            f'{TRL} --lr_scheduler_type cosine --lr_scheduler_kwargs {{"num_cycles":1}}',
            'lr_scheduler_kwargs = {"num_cycles":1}',
        ),
        ("swift rlhf --rlhf_type dpo --model m --dataset d.jsonl --neftune_noise_alpha 5", "neftune_noise_alpha = 5"),
    ],
)
def test_what_has_no_counterpart_is_listed(words: str, listed: str) -> None:
    assert listed in convert(parse_run(words.split())).left_out


def test_inverse_sqrt_without_a_warm_up_is_nearly_constant() -> None:
    run = convert(parse_run(f"{TRL} --lr_scheduler_type inverse_sqrt".split()))
    assert run.settings["lr_scheduler_type"][0] == "constant"
