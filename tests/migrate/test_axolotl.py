"""Files of axolotl."""

from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from tests.support.imports import get_values, import_file


def test_sources_of_axolotl_that_say_more_are_listed(tmp_path: Path) -> None:
    text = (
        "base_model: m\nadapter: qlora\ndatasets:\n  - {path: a.jsonl, type: alpaca, shards: 4}\n"
        "  - {path: b.jsonl, type: my.module}\n"
    )
    run = import_file(tmp_path / "theirs.yaml", text)
    listed = {what for what in run.left_out if " = " in what}
    assert listed == {
        "shards = 4 of a.jsonl", "type = alpaca of a.jsonl", "type = my.module of b.jsonl",
    }  # fmt: skip


def test_columns_of_axolotl(tmp_path: Path) -> None:
    text = (
        "base_model: m\ndatasets:\n"
        "  - {path: a.jsonl, type: completion, field: body}\n"
        "  - {path: b.jsonl, type: chat_template, field_messages: conversations,\n"
        "     message_property_mappings: {role: from, content: value}}\n"
        "  - {path: c.jsonl, type: chat_template, field_messages: turns, field_tools: functions,\n"
        "     message_field_role: speaker, message_field_content: value}\n"
    )
    run = import_file(tmp_path / "theirs.yaml", text)
    assert get_values(run)["dataset"] == [
        {"path": "a.jsonl", "format": "text", "columns": {"text": "body"}},
        {"path": "b.jsonl"},
        {"path": "c.jsonl", "columns": {"messages": "turns", "tools": "functions"}, "tags": {"role_tag": "speaker"}},
    ]
    # Texts beside conversations are not cut into several samples.
    assert {what for what in run.left_out if " = " in what} == {"type = completion of a.jsonl"}


def test_keys_and_roles_of_axolotls_messages_are_tags(tmp_path: Path) -> None:
    text = (
        "base_model: m\ndefault_system_message: Be kind.\ndatasets:\n- path: a.jsonl\n  type: chat_template\n"
        "  message_property_mappings: {role: speaker, content: said, tool_calls: calls}\n"
        "  roles: {user: [human, customer], assistant: [gpt, agent, clerk], tool: [], critic: [judge]}\n"
        "- path: b.jsonl\n"
        "  type: {system_prompt: Be brief., field_instruction: q, field_output: a, format: '{instruction}'}\n"
    )
    run = import_file(tmp_path / "a.yml", text)
    tags = {"role_tag": "speaker", "content_tag": "said", "user_tag": "customer", "assistant_tag": "agent"}
    assert get_values(run)["dataset"] == [
        {"path": "a.jsonl", "tags": tags},
        {"path": "b.jsonl", "format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
    ]
    assert get_values(run)["system"] == "Be kind."
    assert {what for what in run.left_out if " = " in what} == {
        "message_property_mappings: tool_calls = calls of a.jsonl",
        "roles: assistant = ['agent', 'clerk'] of a.jsonl", "roles: critic = ['judge'] of a.jsonl",
        "system_prompt = Be brief. of b.jsonl", "format = {instruction} of b.jsonl",
    }  # fmt: skip


@pytest.mark.parametrize("packing", [True, False])
def test_texts_of_axolotl_are_split_into_samples(tmp_path: Path, packing: bool) -> None:
    source = "base_model: m\ndatasets:\n- {path: a.jsonl, type: completion}\n"
    values = get_values(import_file(tmp_path / "a.yml", f"{source}sample_packing: {packing}\n"))
    assert (values["train_on"], values["truncation"]) == ("all", "split")


def test_grpo_of_axolotl(tmp_path: Path) -> None:
    text = (
        "base_model: m\nadapter: lora\nrl: grpo\ndatasets:\n- path: d\n  type: chat_template\ntrl:\n  beta: 0.01\n"
        "  num_generations: 4\n  max_completion_length: 99\n  reward_funcs: [mine.reward]\n  use_vllm: true\n"
        "  vllm_server_host: 10.0.0.2\nvllm:\n  port: 8000\n"
    )
    run = import_file(tmp_path / "grpo.yml", text)
    wanted = {"method": "grpo", "beta": 0.01, "num_generations": 4, "max_completion_length": 99,
              "vllm_server": "http://10.0.0.2:8000"}  # fmt: skip
    assert {name: get_values(run)[name] for name in wanted} == wanted
    assert run.unknown == []
    assert "reward_funcs = mine.reward" in run.left_out


def test_shares_of_an_epoch_are_carried_from_axolotl(tmp_path: Path) -> None:
    text = (
        "base_model: m\ndatasets:\n- path: d\n  type: chat_template\nval_set_size: 0.1\nevals_per_epoch: 4\n"
        "saves_per_epoch: 4\ncosine_min_lr_ratio: 0.1\nlora_modules_to_save: [embed_tokens]\n"
    )
    run = import_file(tmp_path / "a.yml", text)
    assert "modules_to_save = ['embed_tokens']" in run.left_out, "nothing says that it trains LoRA"
    tuned = get_values(import_file(tmp_path / "lora.yml", f"{text}adapter: lora\n"))
    assert tuned["modules_to_save"] == ["embed_tokens"]
    wanted = {"evals_per_epoch": 4, "saves_per_epoch": 4, "min_lr_ratio": 0.1, "save_steps": None}
    assert {name: get_values(run).get(name) for name in wanted} == wanted
    assert get_values(import_file(tmp_path / "a.yml", text.replace("saves_per_epoch: 4\n", "")))["saves_per_epoch"] == 1
    assert run.unknown == []


def test_schedules_and_empty_keys_of_axolotl(tmp_path: Path) -> None:
    text = (
        "base_model: m\ndatasets:\n  - {path: a.jsonl, type: alpaca}\nlr_scheduler: constant_with_warmup\ndebug:\n"
        "lora_r:\nspecial_tokens: {eos_token: </s>}\nadapter: lora\nlora_target_modules: 'layers.[0-9]+.q_proj'\n"
    )
    run = import_file(tmp_path / "a.yaml", text)
    assert get_values(run)["lr_scheduler_type"] == "constant"
    assert run.unknown == []
    assert get_values(run)["target_modules"] == "layers.[0-9]+.q_proj"
    assert "special_tokens = {'eos_token': '</s>'}" in run.left_out


@pytest.mark.parametrize(
    ("said", "settings", "left_out"),
    [
        ("adapter: lora", {"tuning": "lora"}, None),
        ("adapter:", {"tuning": "full"}, None),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]", {}, None),
        ("plugins: [axolotl.integrations.kd.KDPlugin]", {}, "plugins = "),
        ("trust_remote_code: true", {}, "trust_remote_code"),
        ("trust_remote_code: false", {}, None),
        ("group_by_length: true", {}, "group_by_length"),
        ("wandb_project: mine", {}, "wandb_project"),
        ("hub_model_id: me/mine", {}, "hub_model_id"),
        ("loss_watchdog_threshold: 5.0", {}, "loss_watchdog_threshold"),
        ("warmup_steps: 0", {"warmup_ratio": 0.0}, None),
        ("warmup_ratio: 0", {"warmup_ratio": 0.0}, None),
        ("max_steps: 1000", {"warmup_steps": 30, "warmup_ratio": None}, None),
        ("max_steps: 9000", {"warmup_steps": 100, "warmup_ratio": None}, None),
        ("max_steps: 9000\nwarmup_ratio: 0.1", {"warmup_steps": None, "warmup_ratio": 0.1}, None),
        ("max_steps: 9000\nlr_scheduler: constant", {"warmup_steps": None, "warmup_ratio": None}, None),
        ("lora_target_linear: true\nadapter: lora", {"target_modules": "all"}, None),
        (
            "lora_target_linear: true\nlora_target_modules: [router]\nadapter: lora",
            {"target_modules": ["all", "router"]},
            None,
        ),
        (
            "lora_target_modules: [router]\nlora_target_linear: true\nadapter: lora",
            {"target_modules": ["all", "router"]},
            None,
        ),
        (
            "lora_target_parameters: [mlp.experts.down_proj]\nlora_target_linear: true\nadapter: lora",
            {"target_modules": ["all", "mlp.experts.down_proj"]},
            None,
        ),
        ("lora_target_modules: [q_proj]\nlora_target_linear: false\nadapter: lora", {"target_modules": "q_proj"}, None),
        ("sequence_len: 512\nmax_seq_length: 1024", {"max_length": 1024}, "sequence_len = 512"),
    ],
)
def test_what_a_file_says_is_carried_or_listed(
    tmp_path: Path, said: str, settings: dict[str, Any], left_out: str | None
) -> None:
    plain = "base_model: a/b\ndatasets: [{path: rows.jsonl, type: chat_template}]\n"
    before = import_file(tmp_path / "before.yaml", plain)
    run = import_file(tmp_path / "run.yaml", f"{plain}{said}\n")
    assert {name: get_values(run).get(name) for name in settings} == settings
    more = run.left_out.keys() - before.left_out.keys()
    assert [one for one in more if one.startswith(left_out)] if left_out else not more, more
    assert not run.unknown


@pytest.mark.parametrize(
    ("more", "targets", "has_notice"),
    [
        ("", "linear", True),
        ("lora_target_modules: [shared_experts.down_proj]", ["linear", "shared_experts.down_proj"], True),
        ("lora_target_parameters: [mlp.experts.down_proj]", ["linear", "mlp.experts.down_proj"], False),
    ],
)
def test_experts_are_said_to_be_left_out_unless_they_are_named(
    tmp_path: Path, more: str, targets: str | list[str], has_notice: bool
) -> None:
    text = "base_model: Qwen/Qwen3-30B-A3B\nadapter: lora\nlora_target_linear: true\n"
    run = import_file(tmp_path / "run.yaml", f"{text}{more}\ndatasets: [{{path: rows.jsonl, type: chat_template}}]\n")
    assert get_values(run)["target_modules"] == targets
    assert ("experts, among all linear layers" in run.left_out) == has_notice


@pytest.mark.parametrize("adapter", ["ia3", "dora"])
def test_adapters_that_are_not_available_do_not_become_full_training(tmp_path: Path, adapter: str) -> None:
    text = f"base_model: a/b\nadapter: {adapter}\ndatasets: [{{path: rows.jsonl, type: chat_template}}]\n"
    with pytest.raises(ConfigError, match=rf"tuning='{adapter}': .* \(adapter, run\.yaml:2\)"):
        import_file(tmp_path / "run.yaml", text)
