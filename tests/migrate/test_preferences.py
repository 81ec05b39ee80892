"""Runs of DPO of other programs become runs of DPO with the same loss, or are refused."""

from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from tests.support.imports import get_values, import_command, import_file

TRL = "trl dpo --model_name_or_path m --dataset_name d --output_dir o --use_peft"
TRL_KTO = TRL.replace("dpo", "kto")
SWIFT = "swift rlhf --rlhf_type dpo --model m --dataset d"
LLAMAFACTORY = "model_name_or_path: m\nstage: dpo\nfinetuning_type: lora\ndataset: d\ntemplate: qwen3\n"
AXOLOTL = "base_model: m\ndatasets: [{path: d}]\nadapter: lora\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (TRL, {"method": "dpo", "loss_type": None, "learning_rate": 1e-6, "truncation": "right", "train_on": None}),
        (f"{TRL} --loss_type ipo --beta 0.2", {"loss_type": "ipo", "beta": 0.2}),
        (
            f"{TRL} --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.5",
            {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2], "sft_weight": 1.5},
        ),
        (f"{TRL} --loss_type robust --label_smoothing 0.1", {"loss_type": "robust", "label_smoothing": 0.1}),
        (f"{TRL} --truncation_mode keep_end --rpo_alpha 0.5", {"truncation": "left", "sft_weight": 0.5}),
        (f"{TRL} --rpo_alpha null --f_divergence_type reverse_kl", {"sft_weight": None}),
        (f"{TRL} --lora_dropout 0.1", {"lora_dropout": None}),
        (f"{TRL} --lora_dropout 0.1 --disable_dropout false", {"lora_dropout": None}),
        (f"{TRL} --ref_model m --precompute_ref_log_probs true", {"method": "dpo"}),
        (
            SWIFT.replace("dpo", "simpo"),
            {"method": "dpo", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "sft_weight": 1.0},
        ),
        (
            f"{SWIFT.replace('dpo', 'cpo')} --cpo_alpha 0.3",
            {"method": "dpo", "loss_type": "cpo", "beta": 0.1, "simpo_gamma": None, "sft_weight": 0.3},
        ),
        (
            f"{SWIFT.replace('dpo', 'cpo')} --loss_type simpo --rpo_alpha 0.2",
            {"loss_type": "simpo", "beta": 0.1, "simpo_gamma": 1.0, "sft_weight": 1.0},
        ),
        (f"{SWIFT.replace('dpo', 'simpo')} --loss_type sigmoid", {"loss_type": "cpo", "beta": 2.0}),
        (f"{SWIFT} --cpo_alpha 0.3", {"loss_type": None, "sft_weight": None}),
        (f"{SWIFT} --beta 0.3 --ld_alpha 0.5", {"method": "dpo", "beta": 0.3, "ld_alpha": 0.5, "lora_dropout": None}),
    ],
)
def test_commands_carry_their_loss(words: str, expected: dict[str, Any]) -> None:
    values = get_values(import_command(words))
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LLAMAFACTORY}pref_loss: simpo\nsimpo_gamma: 0.7\npref_beta: 2\n",
         {"loss_type": "simpo", "simpo_gamma": 0.7, "beta": 2}),
        (f"{LLAMAFACTORY}pref_ftx: 0.2\n", {"method": "dpo", "sft_weight": 0.2}),
        (f"{AXOLOTL}rl: dpo\nrl_beta: 0.2\n", {"method": "dpo", "beta": 0.2}),
        (f"{AXOLOTL}rl: ipo\n", {"method": "dpo", "loss_type": "ipo"}),
        (f"{AXOLOTL}rl: simpo\n",
         {"method": "dpo", "loss_type": "simpo", "beta": 0.1, "simpo_gamma": 0.5, "sft_weight": 1.0}),
        (f"{AXOLOTL}rl: simpo\nrl_beta: null\ncpo_alpha:\n", {"beta": 0.1, "sft_weight": 1.0}),
        (f"{AXOLOTL}rl: simpo\nrl_beta: 2.5\nsimpo_gamma: 0.8\ncpo_alpha: 0\n",
         {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.8, "sft_weight": 0}),
        (f"{AXOLOTL}rl: dpo\ndpo_norm_loss: true\n", {"loss_type": "sigmoid_norm"}),
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [ipo]\n", {"loss_type": "ipo"}),
    ],
)  # fmt: skip
def test_files_carry_their_loss(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    values = get_values(import_file(tmp_path / "run.yaml", text))
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--loss_type aot", "loss_type='aot'.*losses of method dpo: sigmoid"),
        ("--loss_type sft", "with sft alone it is a run of method sft"),
        ("--loss_type sigmoid ipo --loss_weights 1.0", "a number for each of the 2 losses"),
        ("--label_smoothing 0.1", "label_smoothing='0.1'.*robust and exo_pair"),
        ("--f_divergence_type js_divergence", "f_divergence_type='js_divergence'.*reverse_kl"),
        ("--use_weighting true", "pairs are not weighted"),
        ("--sync_ref_model true", "the reference stays the model that training begins with"),
        ("--ref_model_name_or_path other", "ref_model_name_or_path='other'.*training begins with"),
    ],
)
def test_what_would_learn_something_else_is_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_command(f"{TRL} {options}")


@pytest.mark.parametrize("losses", ["hinge", "sigmoid hinge"])
def test_a_loss_that_dpo_has_only_with_a_reference_is_refused(losses: str) -> None:
    with pytest.raises(ConfigError, match="loss_type='.*hinge'.*one of sigmoid, simpo"):
        import_command(f"{SWIFT.replace('dpo', 'cpo')} --loss_type {losses}")


@pytest.mark.parametrize("options", ["--adapters a", "--adapters a --ref_adapters b", "--ref_adapters a"])
def test_an_adapter_to_start_from_is_the_reference_or_refused(options: str) -> None:
    """Peers compare with the model without any adapter, unless another setting names the same one."""
    with pytest.raises(ConfigError, match="the same adapter to start from and as the reference"):
        import_command(f"{SWIFT} {options}")
    assert get_values(import_command(f"{SWIFT} --adapters a --ref_adapters a"))["init_adapter"] == "a"
    assert get_values(import_command(f"{SWIFT} --loss_type simpo --adapters a"))["init_adapter"] == "a"
    assert get_values(import_command(f"{SWIFT.replace('dpo', 'simpo')} --adapters a"))["init_adapter"] == "a"


def test_a_file_whose_method_is_guessed_says_so(tmp_path: Path) -> None:
    run = import_file(tmp_path / "run.yaml", "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nbeta: 0.1\n")
    assert get_values(run)["method"] == "dpo"
    assert "the file does not name its method" in run.left_out["method = dpo"]


def test_full_fine_tuning_is_carried() -> None:
    assert get_values(import_command(TRL.replace(" --use_peft", "")))["tuning"] == "full"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{TRL_KTO} --undesirable_weight 0.5",
         {"method": "kto", "undesirable_weight": 0.5, "learning_rate": 1e-6, "shuffle": False}),
        (f"{TRL_KTO} --loss_type apo_zero_unpaired --train_sampling_strategy random",
         {"loss_type": "apo_zero_unpaired", "shuffle": True}),
        (f"{SWIFT.replace('dpo', 'kto')} --beta 0.2 --loss_type apo_zero_unpaired",
         {"method": "kto", "beta": 0.2, "loss_type": "apo_zero_unpaired"}),
        (f"{SWIFT.replace('dpo', 'orpo')} --beta 0.2", {"method": "orpo", "beta": 0.2, "train_on": None}),
    ],
)  # fmt: skip
def test_commands_of_other_methods_carry_their_loss(words: str, expected: dict[str, Any]) -> None:
    values = get_values(import_command(words))
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LLAMAFACTORY.replace('dpo', 'kto')}kto_chosen_weight: 1.5\npref_beta: 0.3\npref_loss: sigmoid\n",
         {"method": "kto", "desirable_weight": 1.5, "beta": 0.3, "loss_type": None}),
        (f"{LLAMAFACTORY}pref_loss: orpo\npref_beta: 0.3\n", {"method": "orpo", "beta": 0.3, "train_on": None}),
        (f"{AXOLOTL}rl: kto\nkto_undesirable_weight: 0.2\nrl_beta: 0.4\n",
         {"method": "kto", "undesirable_weight": 0.2, "beta": 0.4, "shuffle": False}),
        (f"{AXOLOTL}rl: kto\nkto_desirable_weight: 0\n", {"method": "kto", "desirable_weight": None}),
        (f"{AXOLOTL}rl: orpo\norpo_alpha: 0.2\n", {"method": "orpo", "beta": 0.2, "train_on": "all"}),
    ],
)  # fmt: skip
def test_files_of_other_methods_carry_their_loss(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    values = get_values(import_file(tmp_path / "run.yaml", text))
    assert {name: values.get(name) for name in expected} == expected


def test_losses_of_pairs_are_not_those_of_labels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="losses of method kto: kto, apo_zero_unpaired"):
        import_command(f"{SWIFT.replace('dpo', 'kto')} --loss_type ipo")
    with pytest.raises(ConfigError, match="method kto has no such setting"):
        import_command(f"{TRL_KTO} --label_smoothing 0.1")
    with pytest.raises(ConfigError, match="method kto adds no such loss"):
        import_file(tmp_path / "run.yaml", f"{LLAMAFACTORY.replace('dpo', 'kto')}pref_ftx: 0.2\n")


def test_limits_of_one_part_of_a_pair_are_named() -> None:
    run = import_command(f"{TRL} --max_prompt_length 512")
    assert run.left_out["max_prompt_length = 512"] == "max_length limits the question with one answer"
