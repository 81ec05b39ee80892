"""Whole runs of small models: what they write, and that the numbers are those of transformers."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import surefoot
from surefoot.config import load_config
from surefoot.errors import ConfigError, ModelError, StoppedOnFinding
from surefoot.models.generate import generating
from surefoot.models.peft_layout import UNREADABLE_BY_PEFT
from surefoot.training.model_notices import ALL_LOGITS, EXPERTS_LEFT_OUT
from surefoot.training.run_summary import last_evaluation
from surefoot.training.trainer import train
from tests.models.architectures import tiny_model
from tests.support.data import counting_rows, write_jsonl
from tests.support.models import MOE, SIZES
from tests.support.processes import surefoot as surefoot_command
from tests.support.runs import SignalAfter, train_with

pytestmark = pytest.mark.slow

METRICS = {
    "step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "tokens_per_second",
    "step_time_s", "peak_memory_bytes",
}  # fmt: skip


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(settings: dict[str, Any], **changes: Any) -> list[float]:
    result = surefoot.train({**settings, **changes}, screen=False)
    found = [line["loss"] for line in metrics_of(result.run_folder) if "loss" in line]
    shutil.rmtree(result.run_folder)
    return found


def test_checkpoints_and_evaluations_are_counted_by_epoch(settings: dict[str, Any], tmp_path: Path) -> None:
    held_out = str(write_jsonl(tmp_path / "dev.jsonl", counting_rows(45)[40:]))
    lengths = {"max_steps": None, "num_train_epochs": 2, "global_batch_size": 4, "packing": False}
    result = surefoot.train(
        {**settings, **lengths}, screen=False, saves_per_epoch=3, save_total_limit=None, eval_dataset=held_out,
        evals_per_epoch=1,
    )  # fmt: skip
    lines = metrics_of(result.run_folder)
    assert result.steps == 20
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20]
    # A third of an epoch is 3.3 steps.
    saved = [int(path.name.removeprefix("step-")) for path in sorted((result.run_folder / "checkpoints").iterdir())]
    assert saved == [4, 7, 10, 14, 17, 20]


def test_a_run_leaves_what_the_documentation_says(settings: dict[str, Any], tmp_path: Path) -> None:
    held_out = str(write_jsonl(tmp_path / "dev.jsonl", counting_rows(45)[40:]))
    result = surefoot.train(settings, screen=False, save_steps=2, eval_dataset=held_out, eval_steps=2)
    run = Path(settings["output_dir"])
    assert result.status == "completed"
    assert result.steps == 4
    assert result.findings == []
    lines = metrics_of(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line.keys() == METRICS | {"expert_load"} for line in steps)
    assert all(len(line["expert_load"]) == 2 and min(line["expert_load"]) >= 1 for line in steps)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    assert steps[-1]["tokens"] > steps[-1]["trained_tokens"] > 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary == result.as_dict()
    assert summary["examples"] == {"read": 40, "trained": 40, "truncated": 0, "skipped": 0}
    assert summary["artifact"] == str(run / "adapter")
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 0
    assert summary["evaluation"] == next(line for line in lines[::-1] if "eval_loss" in line)
    assert summary["train_loss"] == pytest.approx(sum(line["loss"] for line in steps) / 4)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]
    assert json.loads((run / "environment.json").read_text())["torch"] == torch.__version__
    assert not list(run.rglob("*.tmp"))
    from surefoot.config import load_config

    assert load_config(run / "run.yaml").run.max_steps == 4


def test_a_seed_may_be_any_number(settings: dict[str, Any]) -> None:
    """A date and a time make one that is larger than what a generator takes."""
    assert len(losses(settings, seed=20251125140000, max_steps=1)) == 1


def test_learning_works(settings: dict[str, Any]) -> None:
    """A model of random numbers can only learn in full; LoRA's learning is shown on a real model in test_examples."""
    del settings["lora_rank"]
    found = losses(settings, tuning="full", max_steps=60, learning_rate=1e-2)
    assert found[-1] < 0.3 * found[0]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen2", "llama"])
def test_the_first_loss_is_that_of_transformers(
    kind: str, settings: dict[str, Any], model_folder: Callable[[str], Path], tokenizer: Any
) -> None:
    folder = model_folder(kind)
    rows = counting_rows(4)
    ours = losses({**settings, "model": str(folder), "shuffle": False, "max_steps": 1})[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        wanted = range(len(prompt), len(ids) - 1)  # the newline after the end of the turn is not trained
        total += sum(F.cross_entropy(logits[i - 1], torch.tensor(ids[i])).item() for i in wanted)
        count += len(wanted)
    assert ours == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen2_moe", "llama"])
def test_packed_and_unpacked_losses_are_equal(
    kind: str, settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """One step over all rows: the pack's loss is that of the rows one by one."""
    data = write_jsonl(tmp_path / "few.jsonl", counting_rows(8))
    base = {**settings, "model": str(model_folder(kind)), "dataset": str(data), "max_steps": 3, "global_batch_size": 8}
    alone = losses(base, per_device_train_batch_size=1)
    packed = losses(base, packing=True, max_length=200)
    torch.testing.assert_close(torch.tensor(packed), torch.tensor(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"router_aux_loss_coef": 0.1}, {"tuning": "full"}])
def test_the_size_of_micro_batches_changes_nothing(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    if "tuning" in changes:
        settings = {key: value for key, value in settings.items() if key != "lora_rank"}
        settings["learning_rate"] = 1e-3
    found = [losses(settings, global_batch_size=8, per_device_train_batch_size=n, **changes) for n in (1, 3, 8)]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(found[0]), atol=1e-5, rtol=1e-5)


def test_the_aux_loss_is_reported_and_changes_training(settings: dict[str, Any]) -> None:
    plain = losses(settings)
    result = surefoot.train(settings, screen=False, router_aux_loss_coef=1.0)
    lines = metrics_of(result.run_folder)
    assert all(1.9 < line["aux_loss"] < 4 for line in lines), "top 2 used evenly gives 2"
    assert [line["loss"] for line in lines][1:] != plain[1:]


def logits_of(model: Any) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.randint(3, 500, (2, 12))).logits
    return result


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_artifacts_of_a_lora_run_agree(
    kind: str, settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder(kind)
    targets = ["all", "router"]
    run = surefoot.train(settings, screen=False, model=str(base), target_modules=targets).run_folder
    model, _ = surefoot.load(run)
    with generating(model):
        wanted = logits_of(model)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "adapter")
    torch.testing.assert_close(logits_of(peft), wanted, atol=1e-4, rtol=1e-4)
    merged = surefoot.export(run, tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=1e-4, rtol=1e-4)
    assert (logits_of(AutoModelForCausalLM.from_pretrained(base)) - wanted).abs().max() > 1e-3
    from_checkpoint = surefoot.export(run, tmp_path / "adapter", step=4)
    name = "adapter_model.safetensors"
    assert (from_checkpoint / name).read_bytes() == (run / "adapter" / name).read_bytes()


def test_full_fine_tuning_leaves_a_plain_model(settings: dict[str, Any], tmp_path: Path) -> None:
    del settings["lora_rank"]
    run = surefoot.train(settings, screen=False, tuning="full", learning_rate=1e-3).run_folder
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    ours, tokenizer = surefoot.load(run)
    with generating(ours):
        torch.testing.assert_close(logits_of(ours), logits_of(model), atol=1e-5, rtol=1e-5)
    exported = surefoot.export(run, tmp_path / "exported", step=4)
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(exported)), logits_of(model), atol=1e-5, rtol=1e-5
    )
    assert tokenizer.chat_template is not None
    with pytest.raises(surefoot.errors.ModelError, match="no adapter .*--merge"):
        surefoot.export(run, tmp_path / "merged", merge=True)


def test_a_run_can_start_from_an_adapter(settings: dict[str, Any], tmp_path: Path) -> None:
    first = surefoot.train(settings, screen=False, shuffle=False, lr_scheduler_type="constant")
    started = surefoot.train(
        settings, screen=False, shuffle=False, output_dir=tmp_path / "second", init_adapter=first.run_folder / "adapter"
    )
    before, after = metrics_of(first.run_folder), metrics_of(started.run_folder)
    assert after[0]["loss"] < before[0]["loss"]
    assert "init_adapter was trained on" not in (started.run_folder / "train.log").read_text()

    copied = shutil.copytree(settings["model"], tmp_path / "elsewhere")
    other = surefoot.train(
        settings, screen=False, model=str(copied), output_dir=tmp_path / "third", max_steps=1,
        init_adapter=first.run_folder / "adapter",
    )  # fmt: skip
    assert f"this run's model is {copied}" in (other.run_folder / "train.log").read_text()


def test_an_adapter_that_does_not_fit_is_refused_before_data_are_prepared(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    first = surefoot.train(settings, screen=False, max_steps=1)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": 7}])
    again = {**settings, "dataset": str(bad), "output_dir": str(tmp_path / "second")}
    dense = {"model": str(model_folder("llama")), "target_modules": "attention"}
    cases = [
        ({"init_adapter": first.run_folder}, f"is the folder of a run: its adapter is {first.run_folder}/adapter"),
        ({"init_adapter": first.artifact, "lora_rank": 3}, "lora_rank=3 but the adapter has"),
        ({"init_adapter": first.artifact, **dense}, "which this model does not have. Its base"),
        ({"init_adapter": tmp_path / "none"}, "is no PEFT adapter"),
    ]
    for changes, text in cases:
        with pytest.raises(surefoot.errors.ModelError, match=re.escape(text)) as caught:
            surefoot.train({**again, **changes}, screen=False)
        assert "argument" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": "selective"},
        {"lora_dropout": 0.1, "target_modules": ["attention", "mlp"]},
        {"use_rslora": True},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "target_modules": ["all", "router"]},
        {"lr_scheduler_type": "wsd", "warmup_steps": 2},
        {"truncation": "right", "max_length": 60},
    ],
)
def test_settings_that_only_need_to_run(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    found = losses(settings, max_steps=12, **changes)
    assert found[-1] < found[0]


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_bfloat16_follows_float32(settings: dict[str, Any], tuning: str) -> None:
    del settings["lora_rank"]
    changes = {"tuning": tuning, "learning_rate": 1e-3, "max_steps": 6}
    exact = losses(settings, **changes)
    rounded = losses(settings, dtype="bfloat16", **changes)
    torch.testing.assert_close(torch.tensor(rounded), torch.tensor(exact), atol=0.03, rtol=0.01)


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself, and fails where a warning is an error
def test_layers_with_experts_are_compiled_once_for_all(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A layer that is compiled anew for each of them is not compiled at all from the ninth on."""
    config = AutoConfig.from_pretrained(model_folder("mixtral"), num_hidden_layers=10)
    deep = shutil.copytree(settings["model"], tmp_path / "deep")
    AutoModelForCausalLM.from_config(config).save_pretrained(deep)
    settings = {**settings, "model": str(deep), "max_steps": 2, "router_aux_loss_coef": 0.01}
    plain = losses(settings)
    torch._dynamo.reset()
    counters.clear()
    compiled = losses(settings, compile=True)
    assert counters["frames"]["ok"] > 0
    assert not [what for what in counters["unimplemented"] if "limit" in what]
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", False), ("llama", True), ("mixtral", True)])
def test_compiled_layers_give_the_same_losses(
    kind: str, checkpointing: bool, settings: dict[str, Any], model_folder: Callable[[str], Path]
) -> None:
    settings = {**settings, "model": str(model_folder(kind)), "gradient_checkpointing": checkpointing}
    plain = losses(settings)
    compiled = losses(settings, compile=True)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-4, rtol=1e-4)


def test_a_non_finite_loss_stops_the_run_with_its_rows_and_the_last_good_checkpoint(settings: dict[str, Any]) -> None:
    with pytest.raises(StoppedOnFinding) as caught:
        surefoot.train(settings, screen=False, learning_rate=1e30, lr_scheduler_type="constant", save_steps=1)
    run = Path(settings["output_dir"])
    finding = caught.value.finding
    assert finding.code in ("SF401", "SF402")
    step = finding.evidence["step"]
    assert 2 <= step <= 4
    assert finding.evidence["last_good_checkpoint"] == str(run / "checkpoints" / f"step-{step - 1:08d}")
    assert finding.evidence["rows"].count("train.jsonl:") == 4
    assert finding.evidence["largest_trained_weight"] > 1e6
    assert "too large" in finding.cause
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] == step - 1
    assert [entry["code"] for entry in summary["findings"]] == [finding.code]
    assert json.loads((run / "findings.jsonl").read_text())["code"] == finding.code


def test_tensorboard_gets_the_metrics(settings: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = {**settings, "report_to": ["tensorboard"], "eval_fraction": 0.2, "eval_steps": 2}
    result = surefoot.train(given, screen=False)
    run = result.run_folder
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    logged = [point.value for point in events.Scalars("train/loss")]
    assert logged == pytest.approx([line["loss"] for line in metrics_of(run) if "loss" in line])
    assert events.Scalars("eval/loss")[-1].value == pytest.approx(result.evaluation["eval_loss"])
    again = surefoot.train(given, screen=False)
    assert again.evaluation == result.evaluation
    assert last_evaluation(run, 4)["step"] == 2
    assert last_evaluation(run, 2) == {}


def test_a_tracker_that_is_not_installed_is_refused_before_loading(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pip install trackio"):
        surefoot.train(settings, screen=False, report_to=["trackio"])


def test_lora_on_the_output_layer_is_trained(settings: dict[str, Any], model_folder: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file

    run = surefoot.train(
        settings, screen=False, model=str(model_folder("llama")), target_modules=["lm_head"]
    ).run_folder
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert adapter["base_model.model.lm_head.lora_B.weight"].abs().max() > 0


def test_the_text_part_of_a_vision_language_moe_is_trained(
    settings: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {
        **SIZES,
        **MOE,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [],
    }
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path / "vl")
    tokenizer.save_pretrained(tmp_path / "vl")
    result = surefoot.train(
        settings, screen=False, model=str(tmp_path / "vl"), target_modules=["attention", "experts"], max_steps=8
    )
    lines = metrics_of(result.run_folder)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert len(lines[0]["expert_load"]) == 2
    ids = torch.randint(3, 500, (1, 12))
    peft = PeftModel.from_pretrained(
        Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "vl"), result.artifact
    )
    ours, _ = surefoot.load(result.run_folder)
    with torch.no_grad():
        torch.testing.assert_close(peft(input_ids=ids).logits, ours(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_dropout_with_experts_among_the_targets_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="lora_dropout=0.1 .*4 expert stacks"):
        surefoot.train(settings, screen=False, lora_dropout=0.1)


@pytest.mark.parametrize(
    ("targets", "is_told"),
    [(["gate_proj", "down_proj"], True), (["gate_proj", "experts"], False), (["q_proj"], False), ("all", False)],
)
def test_names_that_mean_experts_elsewhere_are_told_of(
    settings: dict[str, Any], model_folder: Callable[[str], Path], targets: Any, is_told: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    changes = {"model": str(model_folder("qwen2_moe")), "target_modules": targets}
    surefoot.train({**settings, **changes}, max_steps=1)
    shown = "".join(capsys.readouterr())
    said = EXPERTS_LEFT_OUT.format("gate_proj, down_proj")
    assert (said in shown) == is_told, shown


@pytest.mark.parametrize(("targets", "is_told"), [(["attention", "experts"], True), (["attention"], False)])
def test_an_adapter_that_peft_will_refuse_is_told_of(
    settings: dict[str, Any], tmp_path: Path, tokenizer: Any, targets: Any, is_told: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """DBRX stores its experts one below the other in a matrix, which PEFT takes for one layer."""
    base = tmp_path / "dbrx"
    tiny_model("dbrx", vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    result = surefoot.train({**settings, "model": str(base), "target_modules": targets}, max_steps=1)
    shown = "".join(capsys.readouterr())
    assert (UNREADABLE_BY_PEFT.format("transformer.blocks.0.ffn.experts.mlp.w1", 6) in shown) == is_told, shown
    merged = surefoot.export(result.run_folder, tmp_path / "merged", merge=True)
    _, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values()), info


def test_balancing_a_dense_model_is_refused(settings: dict[str, Any], model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="router_aux_loss_coef=0.1, .*LlamaForCausalLM has no routers"):
        surefoot.train(settings, screen=False, model=str(model_folder("llama")), router_aux_loss_coef=0.1)


def test_the_model_is_stopped_from_scaling_its_logits_in_silence(
    settings: dict[str, Any], tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Granite divides its logits; the loss must be that of the model, not of the bare output layer."""
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(3)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=0.05))
    model.save_pretrained(tmp_path / "granite")
    tokenizer.save_pretrained(tmp_path / "granite")
    result = surefoot.train({**settings, "model": str(tmp_path / "granite"), "shuffle": False, "max_steps": 1})
    found = metrics_of(result.run_folder)[0]["loss"]
    assert ALL_LOGITS in capsys.readouterr().err
    row = counting_rows(4)
    total = count = 0.0
    for entry in row:
        ids = tokenizer.apply_chat_template(entry["messages"], return_dict=False)
        prompt = tokenizer.apply_chat_template(entry["messages"][:1], add_generation_prompt=True, return_dict=False)
        labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt) : -1] + [-100]])
        with torch.no_grad():
            mean = model.eval()(torch.tensor([ids]), labels=labels).loss.item()
        total += mean * (len(ids) - 1 - len(prompt))
        count += len(ids) - 1 - len(prompt)
    assert found == pytest.approx(total / count, abs=1e-4)


def test_one_rank_makes_no_process_group(settings: dict[str, Any]) -> None:
    """Nothing that a network library does, or leaks, can happen then."""
    seen: list[bool] = []

    class Look:
        def observe(self, _: Any) -> None:
            seen.append(torch.distributed.is_initialized())

    train(load_config(None, (), settings), [Look()], screen=False)
    assert len(seen) > 10
    assert not any(seen)


@pytest.mark.matrix
def test_evaluation_keeps_no_logits(settings: dict[str, Any], tmp_path: Path, tokenizer: Any) -> None:
    """All of them would be 1.8 GB here: 30 rows of about 100 trained tokens under a vocabulary of 151,936."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=151_936, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    counted = " ".join(["one two three four"] * 25)
    row = {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": counted}]}
    few, many = (write_jsonl(tmp_path / f"{count}.jsonl", [row] * count) for count in (4, 30))
    changes = {"model": str(tmp_path / "model"), "max_length": 512, "eval_steps": 1, "max_steps": 1, "health": False}
    peaks = []
    for number, held_out in enumerate((few, many)):
        told = {**settings, **changes, "eval_dataset": str(held_out), "output_dir": str(tmp_path / f"run{number}")}
        (tmp_path / "run.json").write_text(json.dumps(told))
        done = surefoot_command("train", str(tmp_path / "run.json"), "--json")
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["peak_memory_bytes"])
    assert peaks[1] - peaks[0] < 400e6


@pytest.mark.parametrize(
    ("length", "shown"),
    [({"max_steps": 4}, r"step 2 of 4 "), ({"max_steps": None, "num_train_epochs": 2}, r"step 2, epoch 0\.\d\d of 2 ")],
)
def test_an_export_of_an_unfinished_run_says_from_which_step(
    settings: dict[str, Any], length: dict[str, Any], shown: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train_with({**settings, **length}, SignalAfter(2, signal.SIGTERM)).run_folder
    surefoot.export(run, tmp_path / "unfinished")
    (record,) = [record for record in caplog.records if record.name == "surefoot.training.export"]
    assert "not complete" in record.getMessage()
    assert re.search(shown, record.getMessage())
    caplog.clear()
    finished = surefoot.train({**settings, **length}, screen=False).run_folder
    surefoot.export(finished, tmp_path / "finished")
    assert not [record for record in caplog.records if record.name == "surefoot.training.export"]


def test_targets_that_the_model_has_not_are_refused_with_their_line(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Before the data are prepared: the first config of a dense model may name experts."""
    path = tmp_path / "run.yaml"
    lines = {**settings, "model": str(model_folder("llama")), "target_modules": ["attention", "experts"]}
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in lines.items()))
    number = list(lines).index("target_modules") + 1
    with pytest.raises(ModelError, match=rf"'experts' is empty .*attention, mlp, linear, all.*run\.yaml:{number}\)"):
        surefoot.train(path, screen=False)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
