"""`surefoot plan`: what it adds up, what it suggests, and what it refuses."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import surefoot
from surefoot import cli
from surefoot.config import load_config
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.distributed.parallel_dims import Layout
from surefoot.errors import ConfigError, ModelError
from surefoot.planner import sizes, traced_model
from surefoot.planner.command import plan
from surefoot.planner.devices import DEVICES, Device
from surefoot.planner.forecast import Forecast, forecast
from surefoot.planner.sharded_model import ShardedModel
from surefoot.planner.sizes import Shape
from surefoot.planner.suggest import format_settings, suggest
from surefoot.planner.text import format_forecast
from tests.models.architectures import tiny_config, tiny_model
from tests.support.processes import surefoot as command

pytestmark = pytest.mark.slow

PLANS = Path(__file__).parents[2] / "examples" / "plans"
GIB = 1 << 30
CPU = Device("cpu", 1 << 40, 1e11, 1e9, is_gpu=False)
LOCAL = ("rollout_engine=local", "vllm_args=null")
"""What makes the run of the example answer itself."""


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example of Qwen2.5-VL-72B with a vision tower of four layers, for what is no matter of its size."""
    folder = tmp_path_factory.mktemp("shallow")
    model = Path(shutil.copytree(PLANS / "qwen2.5-vl-72b", folder / "plans" / "qwen2.5-vl-72b"))
    config = json.loads((model / "config.json").read_text())
    config["vision_config"] |= {"depth": 4, "fullatt_block_indexes": [3]}
    (model / "config.json").write_text(json.dumps(config))
    return str(shutil.copy(PLANS.parent / "qwen2.5-vl-72b-grpo.yaml", folder))


def told(settings: dict[str, Any], device: Device = CPU, **more: Any) -> Forecast:
    run = load_config(None, [], {**settings, **more}).run
    return forecast(run, Path(run.model), device)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize(
    "more", [{}, {"tuning": "full", "lora_rank": 8}, {"quantization": "int8"}], ids=["lora", "full", "int8"]
)
def test_what_lies_at_rest_is_what_the_ledger_of_a_run_counts(
    settings: dict[str, Any], model_folder: Callable[[str], Path], kind: str, more: dict[str, Any]
) -> None:
    settings = {**settings, "model": str(model_folder(kind)), "max_steps": 2, **more}
    run = surefoot.train(settings, screen=False).run_folder
    (counted,) = (entry.values for entry in read_history(run).entries if entry.kind == "memory")
    owners = told(settings).phases["save"].host
    assert owners.get("frozen weights", 0) == pytest.approx(counted["frozen"], rel=0.01, abs=4096)
    assert owners["trained weights" if more.get("tuning") == "full" else "LoRA weights"] == counted["trained"]
    assert owners["optimizer"] == pytest.approx(counted["optimizer"], rel=0.01, abs=4096)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"zero_stage": 2}, marks=pytest.mark.matrix),
        pytest.param({"zero_stage": 3}, marks=pytest.mark.matrix),
        pytest.param({"zero_stage": 3, "tuning": "full", "lora_rank": 8}, marks=pytest.mark.matrix),
        {"zero_stage": 2, "tuning": "full", "lora_rank": 8, "expert_parallel_size": 2},
    ],
    ids=["lora-2", "lora-3", "full-3", "full-ep"],
)
def test_what_each_of_two_ranks_holds_is_what_their_ledgers_count(
    settings: dict[str, Any], more: dict[str, Any]
) -> None:
    settings = {**settings, "nproc_per_node": 2, "max_steps": 2, **more}
    run = surefoot.train(settings, screen=False).run_folder
    counted = [entry.values for entry in read_history(run).entries if entry.kind == "memory"]
    assert len(counted) == 2
    owners = told(settings).phases["save"].host
    trained = "trained weights" if more.get("tuning") == "full" else "LoRA weights"
    for name, field in (("frozen weights", "frozen"), (trained, "trained"), ("optimizer", "optimizer")):
        most = max(values[field] for values in counted)
        assert owners.get(name, 0) == pytest.approx(most, rel=0.02, abs=8192), name


@pytest.mark.long
def test_a_card_that_is_too_small_gets_settings_that_fit(settings: dict[str, Any]) -> None:
    settings = {
        **settings, "tuning": "full", "lora_rank": 8, "max_length": 4096, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    large = told(settings, Device("card", 1 << 40, 1e13, 1e10))
    card = Device("card", int(0.6 * large.device_peak[1]), 1e13, 1e10)
    small = told(settings, card)
    assert large.fits
    assert not small.fits

    def ask(run: Any, *, is_least: bool = False) -> Forecast:
        return forecast(run, Path(settings["model"]), card, is_least=is_least)

    assert ask(small.run, is_least=True).device_peak[1] < small.device_peak[1]
    changes = suggest(small, ask)
    assert changes
    speeds = [1 / other.seconds_per_token for _, other in changes]
    assert speeds == sorted(speeds, reverse=True)
    for changed, other in changes:
        assert other.fits
        pasted = yaml.safe_load(format_settings(changed))
        again = load_config(None, [], {**settings, **pasted, "device": "cpu", "offload": None}).run
        assert again.sequences_per_step == small.sequences_per_step == 16, "the run learns the same"
    assert suggest(large, ask) == []


def test_a_step_on_a_cpu_takes_what_products_and_all_else_take(settings: dict[str, Any]) -> None:
    def cpu(flops_per_s: float, moved_bytes_per_s: float) -> Device:
        return Device("cpu", 1 << 40, flops_per_s, math.inf, is_gpu=False, moved_bytes_per_s=moved_bytes_per_s)

    full = {**settings, "tuning": "full", "lora_rank": 8}
    products, others = told(full, cpu(1e9, math.inf)).step_s, told(full, cpu(math.inf, 1e9)).step_s
    both = told(full, cpu(1e9, 1e9))
    assert min(products, others) > 0
    assert both.step_s == pytest.approx(products + others)
    update_s = 7 * 4 * both.sizes.whole.all_trained / 1e9  # AdamW reads and writes seven numbers for each
    assert others > update_s
    two = told({**full, "nproc_per_node": 2, "zero_stage": 0}, cpu(1e9, 1e9))
    assert two.step_s == pytest.approx(2 * both.step_s), "two ranks share the cores, and each has as many rows"
    cut = told({**full, "nproc_per_node": 2, "zero_stage": 2}, cpu(1e9, 1e9))
    assert two.step_s - cut.step_s == pytest.approx(update_s, rel=0.01), "each updates a half"


def test_what_cannot_fit_is_not_run(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is too small for the weights: no setting helps, and that is known at once."""
    small = told({**settings, "tuning": "full", "lora_rank": 8}, Device("card", 1 << 16, 1e13, 1e10))
    traced = []
    monkeypatch.setattr("surefoot.planner.forecast.trace_of", lambda *_, **__: traced.append(1))

    def ask(run: Any, *, is_least: bool = False) -> Forecast:
        return forecast(run, Path(settings["model"]), small.device, is_least=is_least)

    assert suggest(small, ask) == []
    assert traced == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more", "fits"),
    [
        ("qwen1.5-moe-lora", ["device=a100"], True),
        ("qwen3-30b-a3b-nf4", ["device=rtx4090"], True),
        ("qwen-72b-lora", ["device=a100"], False),
        ("mixtral-8x7b-full-ep", ["device=h100", "expert_parallel_size=2"], False),
        ("mixtral-8x7b-full-ep",
         ["device=h100", "offload=cpu", "expert_parallel_size=4", "gradient_checkpointing=true"], True),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (
            ("qwen-72b-lora", ["device=a100", "zero_stage=3", "gradient_checkpointing=true"], True),
            ("mixtral-8x7b-full-ep", ["device=h100", "expert_parallel_size=4"], False),
            ("mixtral-8x7b-full-ep", ["device=h100", "expert_parallel_size=8"], False),
            # Two ranks have the same experts: FSDP gathers them whole, beside each rank's own half.
            ("mixtral-8x7b-full-ep",
             ["device=h100", "offload=cpu", "expert_parallel_size=4", "per_device_train_batch_size=2",
                  "gradient_checkpointing=false"], False),
            ("mixtral-8x7b-full-ep", ["device=h200", "zero_stage=3", "gradient_checkpointing=true"], True),
            ("mixtral-8x7b-full-ep", ["device=b200", "nodes=4"], True),
        )),
    ],
)  # fmt: skip
def test_the_seeds_own_cases(name: str, more: list[str], fits: bool) -> None:
    assert plan(str(PLANS / f"{name}.yaml"), more).forecast.fits is fits


@pytest.mark.long
def test_four_bits_are_suggested_and_what_they_save_is_said() -> None:
    path = str(PLANS / "qwen3-30b-a3b-nf4.yaml")
    plain = plan(path, ["device=rtx4090", "quantization=null"])
    assert not plain.forecast.fits
    assert any(changed.get("quantization") == "nf4" for changed, _ in plain.changes)
    stored = plan(path, ["device=rtx4090"])
    assert "nf4 in linear layers and experts, 15.7 GiB instead of 56.9 GiB in bfloat16" in stored.as_text()
    assert "the smallest with enough memory: a10\n" in stored.as_text()
    assert stored.forecast.sizes.whole.total == plain.forecast.sizes.whole.total
    assert "without reading weights back from nf4" in stored.as_text()


@pytest.mark.matrix
def test_the_run_that_hung_at_its_start_fits_without_ever_gathering_the_model() -> None:
    path = str(PLANS.parent / "qwen2.5-vl-72b-grpo.yaml")
    assert plan(path, ["device=a100"]).forecast.fits
    told = plan(path, ["device=a100", *LOCAL]).forecast
    assert told.sizes.whole.total - told.sizes.whole.all_trained == pytest.approx(73.4e9, rel=0.002)
    assert told.fits
    assert told.device_peak == ("rollout", pytest.approx(32 * GIB, rel=0.05))
    assert max(owners.device.get("gathered weights", 0) for owners in told.phases.values()) < 10 * GIB
    whole = plan(path, ["device=a100", *LOCAL, "zero_stage=2"])
    assert not whole.forecast.fits
    assert any(changed.get("zero_stage") == 3 for changed, _ in whole.changes)
    gathered_s = told.gathered_bytes_per_token / told.device.link_bytes_per_s
    assert told.rollout_s == pytest.approx(told.run.max_completion_length * gathered_s), "all of a rank at a time"
    assert told.seconds_per_token == pytest.approx((told.step_s + told.rollout_s) / told.tokens_per_step)
    assert whole.forecast.rollout_s == 0, "the weights are there"


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_keys_and_values_are_those_of_a_real_cache(
    settings: dict[str, Any], model_folder: Callable[[str], Path], kind: str
) -> None:
    grpo = {"method": "grpo", "reward_funcs": ["length"], "num_generations": 4, "max_completion_length": 7,
            "global_batch_size": 8, "max_length": 30}  # fmt: skip
    owners = told(settings, model=str(model_folder(kind)), **grpo).phases["rollout"].host
    model = AutoModelForCausalLM.from_pretrained(model_folder(kind))
    with torch.no_grad():
        cache = model(input_ids=torch.ones(8, 37, dtype=torch.int64), use_cache=True).past_key_values
    assert owners["keys and values"] == sum(
        part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
    )
    fewer = told(settings, model=str(model_folder(kind)), **grpo, rollout_batch_size=2).phases["rollout"].host
    assert fewer["keys and values"] == owners["keys and values"] / 4
    least, most = (one.get("reading prompts") or one["drawing tokens"] for one in (fewer, owners))
    assert 0 < least <= most / 2
    server = told(settings, model=str(model_folder(kind)), **grpo, rollout_engine="vllm")
    assert not {"keys and values", "drawing tokens", "reading prompts"} & server.phases["rollout"].host.keys(), (
        "they are the server's"
    )
    assert server.phases["sync"].host["weights that are written"] == 4 * server.sizes.whole.all_trained


def test_targets_in_single_layers_are_planned(settings: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.num_hidden_layers = 12
    config.save_pretrained(tmp_path)
    targets = [f"model.layers.{number}.self_attn.q_proj" for number in range(1, 12, 2)]
    forecast = told(settings, model=str(tmp_path), target_modules=targets)
    assert forecast.sizes.whole.all_trained > 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "layers"), [("qwen3_next", 17), ("falcon_h1", 12), ("gemma3_text", 12)])
def test_layers_that_repeat_are_forecast_from_a_few(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layers: int
) -> None:
    config = tiny_config(name)
    config.num_hidden_layers = layers
    if name != "falcon_h1":  # whose kinds follow from the number of layers
        config.layer_types = (config.layer_types * layers)[:layers]
    config.save_pretrained(tmp_path)
    few = told(settings, model=str(tmp_path), target_modules="all")
    assert few.sizes.layer_period is not None
    assert few.sizes.layer_period < layers / 2
    monkeypatch.setattr(sizes, "_find_period", lambda *_: None)
    for cached in (traced_model.sizes_of, traced_model.trace_of):
        cached.cache_clear()
    whole = told(settings, model=str(tmp_path), target_modules="all")
    for cached in (traced_model.sizes_of, traced_model.trace_of):
        cached.cache_clear()
    for phase, owners in whole.phases.items():
        assert few.phases[phase].host == pytest.approx(owners.host, rel=1e-3, abs=4096)
    assert few.step_s == pytest.approx(whole.step_s, rel=1e-2)


@pytest.mark.long
def test_a_plan_says_nothing_of_the_kernels_of_this_machine(settings: dict[str, Any], tmp_path: Path) -> None:
    """transformers warns of each kernel that is not installed where it builds a model."""
    shutil.copytree(settings["model"], tmp_path / "model")  # its tokenizer
    tiny_config("nemotron_h").save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "model": str(tmp_path / "model"), "device": "auto"}))
    planned = command("plan", str(tmp_path / "run.yaml"), "device=h200")
    assert planned.returncode == 0, planned.stderr
    assert "[transformers]" not in planned.stdout + planned.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "lfm2", "mamba2"])
def test_recurrent_layers_keep_no_keys(settings: dict[str, Any], tmp_path: Path, name: str) -> None:
    grpo = {"method": "grpo", "reward_funcs": ["length"], "num_generations": 4, "max_completion_length": 7,
            "global_batch_size": 8, "max_length": 30}  # fmt: skip
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    owners = told(settings, model=str(tmp_path), target_modules="all", **grpo).phases["rollout"].host
    with torch.no_grad():
        cache = model(input_ids=torch.ones(8, 37, dtype=torch.int64), use_cache=True)
    layers = getattr(cache, "past_key_values", None) or cache.cache_params
    keys = [getattr(layer, "keys", None) for layer in getattr(layers, "layers", [])]
    assert owners.get("keys and values", 0) == 2 * sum(part.nbytes for part in keys if part is not None)


def test_a_model_whose_code_decides_by_values_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_model("jetmoe").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="decides by values"):
        told(settings, model=str(tmp_path), target_modules="all")


@pytest.mark.matrix
def test_the_page_of_a_plan_of_grpo(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(PLANS.parent / "qwen2.5-vl-72b-grpo.yaml")
    assert cli.main(["plan", path, "device=a100"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^a sync .* 0\.78 GiB: 0\.57% ", said, re.M)
    assert "gathers" not in said
    assert cli.main(["plan", path, "device=a100", *LOCAL]) == 0
    said = capsys.readouterr().out
    assert "without sampling and rewards" in said
    assert "for its rollout" in said
    assert " gathers 137.5 GiB " in said
    assert cli.main(["plan", path, "device=a100", "vllm_args=null"]) == 3
    said = capsys.readouterr().out
    assert re.search(r"vLLM server .* 136\.7 GiB .* 72\.8 GiB$", said, re.M)
    fitting = 'vllm_args: ["--tensor-parallel-size", "8", "--gpu-memory-utilization", "0.4"]'
    assert fitting in said, "a setting that fits"
    assert cli.main(["plan", path, "device=a100", "vllm_args=null", "vllm_server=http://10.0.0.2:8000"]) == 0
    assert "vLLM server has separate devices" in capsys.readouterr().out


@pytest.mark.long
def test_a_server_must_hold_the_model_in_its_share() -> None:
    def asked(*args: str, **more: str) -> Any:
        given = [f"{name}={value}" for name, value in more.items()]
        path = str(PLANS.parent / "qwen2.5-vl-72b-grpo.yaml")
        return plan(
            path, ["device=h200", "rollout_engine=vllm", f"vllm_args={json.dumps(list(args))}", *given]
        ).forecast

    eight = ("--tensor-parallel-size", "8")
    assert asked(*eight, "--gpu-memory-utilization", "0.4").fits
    assert not asked("-tp", "2", "--gpu-memory-utilization", "0.4").fits
    assert not asked("--gpu-memory-utilization=0.5", vllm_devices="'8,9'").fits, "137 GiB on one card"
    assert asked("--tensor-parallel-size=2", vllm_devices="'8,9'").fits

    awake, asleep = (
        asked(*eight, "--gpu-memory-utilization", "0.4"),
        asked(*eight, "--gpu-memory-utilization", "0.4", vllm_sleep="true"),
    )
    weights = 2 * (asleep.sizes.whole.total - asleep.sizes.whole.all_trained)
    assert asleep.phases["step"].host["sleeping server"] * 8 == pytest.approx(weights, rel=1e-6)
    assert "sleeping server" not in asleep.phases["rollout"].host
    assert "sleeping server" not in awake.phases["step"].host


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "holds"),
    [
        ([], {"load", "step", "update", "save", "evaluate", "rollout", "sync", "export"}),
        (["vllm_sleep=true"], {"rollout", "sync"}),
        (["vllm_devices=6,7"], {"load", "step", "update", "save", "evaluate", "rollout", "sync", "export"}),
        (["vllm_devices=8,9"], set()),
        (["vllm_server=http://10.0.0.2:8000"], set()),
        (["device=cpu", "nproc_per_node=2"], set()),
    ],
)
def test_a_server_takes_its_share_of_the_devices_that_train(shallow: str, more: list[str], holds: set[str]) -> None:
    share = ["vllm_args=null"] if "vllm_server" in "".join(more) else ["vllm_args=[--gpu-memory-utilization, '0.5']"]
    device = [] if "device=cpu" in more else ["device=a100"]
    phases = plan(shallow, [*device, "rollout_engine=vllm", *share, *more]).forecast.phases
    owners = {name: _of_vllm({**phase.device, **phase.host}) for name, phase in phases.items()}
    half = int(DEVICES["a100"].memory_bytes * 0.5)
    assert {name: sum(sizes) for name, sizes in owners.items() if sizes} == dict.fromkeys(holds, half)
    assert all(min(sizes) > 0 for sizes in owners.values() if sizes), "weights, and keys and values"


def _of_vllm(owners: dict[str, int]) -> list[int]:
    return [size for owner, size in owners.items() if owner.startswith("vLLM's")]


@pytest.mark.parametrize(("more", "size"), [((), "134.65"), (("dtype=float32",), "269.29")])
def test_full_fine_tuning_sends_a_server_the_whole_model(more: tuple[str, ...], size: str) -> None:
    grpo = ("method=grpo", "packing=false", "reward_funcs=length", "rollout_engine=vllm", "nproc_per_node=8")
    run = load_config(str(PLANS / "qwen-72b-lora.yaml"), [*grpo, "tuning=full", *more]).run
    said = format_forecast(forecast(run, PLANS / "qwen-72b", DEVICES["h200"]), [], [], 0.0)
    assert re.search(rf"^a sync .* output_dir, {re.escape(size)} GiB", said, re.M)


@pytest.mark.long
def test_parameters_are_those_that_the_models_are_known_by() -> None:
    known = {"qwen1.5-moe-lora": 14.3e9, "mixtral-8x7b-full-ep": 46.7e9, "qwen-72b-lora": 72.3e9}
    for name, count in known.items():
        counted = plan(str(PLANS / f"{name}.yaml"), ["device=h200"]).forecast.sizes.whole
        lora = counted.all_trained if counted.frozen else 0
        assert counted.total - lora == pytest.approx(count, rel=0.002), name


@pytest.mark.long
def test_host_memory_that_is_too_small_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["plan", str(PLANS / "mixtral-8x7b-full-ep.yaml"), "device=h200", "host_gib=64", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert status == 3
    assert "SF716" in [finding["code"] for finding in said["findings"]]


@pytest.mark.long
def test_the_page_of_a_plan_is_that_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    documented = re.search(r"\$ surefoot plan (\S+) (.*)\n([^`]*)", (PLANS.parents[1] / "docs/before.md").read_text())
    assert documented is not None
    assert cli.main(["plan", str(PLANS.parents[1] / documented[1]), *documented[2].split(), "price=2"]) == 3
    said = capsys.readouterr().out
    lines = [line for line in documented[3].splitlines() if line not in ("", "...")]
    assert len(lines) > 8
    assert [line for line in lines if line not in said.splitlines()] == []
    for part in (
        "device memory of a rank, GiB",
        "DOES NOT FIT",
        "SF719",
        "What to change",
        "device hours",
        "at 2 an hour",
    ):
        assert part in said


def test_the_page_of_a_plan_tells_the_length_of_its_cost(settings: dict[str, Any]) -> None:
    for max_steps, length in ((1, "; 1 step: "), (None, "; 1000 steps (an example: max_steps is not set): ")):
        assert length in format_forecast(told({**settings, "max_steps": max_steps}), [], [], 0.0)


def test_heads_that_do_not_divide_are_named_where_transformers_lets_them_pass(tmp_path: Path) -> None:
    config = json.loads((PLANS / "qwen-72b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 8193}))
    with pytest.raises(ModelError, match="hidden_size=8193 .*num_attention_heads=64"):
        plan(str(PLANS / "qwen-72b-lora.yaml"), ["device=h200", f"model={tmp_path}"])


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        ({}, ["device=tpu"], "device=tpu: .* b200, h200"),
        ({}, ["device=h200", "price=much"], "price=much "),
        ({}, ["device=h200", "host_gib=inf"], "host_gib=inf "),
        ({}, ["device=h200", "host_gib=1e308"], "host_gib=1e308 "),
        ({}, ["device=h200", "max_length=100000000"], "per_device_train_batch_size=.* 100000000 "),
        ({}, ["device=h200", "expert_parallel_size=2", "nproc_per_node=2"], "expert_parallel_size=2 .* 0 experts"),
        ({}, ["device=h200", "dp_replicate_size=3"], "dp_replicate_size=3 .* 1 ranks"),
        ({"num_key_value_heads": 3}, ["device=h200"], "num_attention_heads=4 .*num_key_value_heads=3"),
        ({"num_hidden_layers": 100000}, ["device=h200"], "num_hidden_layers=100000 .* 1000\\."),
        ({"hidden_size": "many"}, ["device=h200"], "hidden_size"),
        ({"num_attention_heads": 0}, ["device=h200"], "config.json: num_attention_heads=0 "),
        ({"intermediate_size": 0}, ["device=h200"], "config.json: intermediate_size=0 "),
        ({"num_hidden_layers": 0}, ["device=h200"], "config.json: num_hidden_layers=0 "),
        ({"hidden_size": None}, ["device=h200"], "config.json: .* no hidden_size,"),
        ({"num_hidden_layers": None}, ["device=h200"], "config.json: .* no num_hidden_layers,"),
        ({"head_dim": None, "hidden_size": 65}, ["device=h200"], r"\(65\) .*multiple"),
        ({"hidden_act": "nope"}, ["device=h200"], "config.json: hidden_act=nope "),
        ({"model_type": "perceptron"}, ["device=h200"], "perceptron"),
        ({}, ["device=cuda"], "device=cuda, .*no GPU"),
    ],
)
def test_what_cannot_be_planned(
    model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    config = json.loads((model_folder("llama") / "config.json").read_text())
    changed = {name: value for name, value in {**config, **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"model": str(tmp_path), "dataset": "rows.jsonl", "output_dir": "run"}))
    assert cli.main(["plan", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert "Traceback" not in error


def test_a_deep_model_is_forecast_from_a_few_of_its_layers(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((model_folder("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    settings = {**settings, "model": str(tmp_path)}
    few = told(settings)
    monkeypatch.setattr(traced_model, "FEW_LAYERS", 9)
    traced_model.trace_of.cache_clear()
    whole = told(settings)
    assert few.host_peak[1] == pytest.approx(whole.host_peak[1], rel=0.01)
    assert few.step_s == pytest.approx(whole.step_s)
    activations = [sum(s for n, s in one.phases["step"].host.items() if "activ" in n) for one in (few, whole)]
    assert activations[0] == pytest.approx(activations[1], rel=0.02)


@pytest.mark.matrix
def test_a_few_layers_are_a_period_of_their_kinds(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and second two of these layers have no full attention between them."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    changes = {"max_position_embeddings": 4096, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    config = tiny_config("gemma3_text").to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    long = {**settings, "model": str(tmp_path), "max_length": 2048}
    few = told(long)
    monkeypatch.setattr(traced_model, "FEW_LAYERS", len(kinds))
    traced_model.trace_of.cache_clear()
    whole = told(long)
    assert few.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert few.host_peak[1] == pytest.approx(whole.host_peak[1], rel=0.01)


def test_offloaded_gradients_lie_in_host_memory(settings: dict[str, Any]) -> None:
    card = Device("card", 1 << 40, 1e13, 1e10)
    settings = {**settings, "tuning": "full", "lora_rank": 8, "zero_stage": 3}
    held, away = told(settings, card), told({**settings, "offload": "cpu", "device": "auto"}, card)
    trained = held.phases["update"].device["trained weights"]
    assert away.phases["update"].host["gradients"] == trained
    assert away.phases["update"].host["optimizer"] == 2 * trained
    assert not {"trained weights", "optimizer", "gradients"} & away.phases["update"].device.keys()


def test_what_a_device_holds_while_gradients_are_offloaded_is_the_most_of_all_else(settings: dict[str, Any]) -> None:
    card = Device("card", 1 << 40, 1e13, 1e10)
    settings = {**settings, "tuning": "full", "lora_rank": 8, "zero_stage": 3, "max_length": 200}
    held, away = told(settings, card), told({**settings, "offload": "cpu", "device": "auto"}, card)

    def computed(one: Forecast) -> int:
        at_rest = {"frozen weights", "trained weights", "optimizer", "gradients", "communication buffers"}
        return sum(size for name, size in one.phases["step"].device.items() if name not in at_rest)

    assert computed(away) >= computed(held)
    for one, share in ((held, 1.0), (away, 0.0)):  # they leave once they are summed
        assert ShardedModel(one.sizes, Layout.of(one.run, 1)).gradient_share == share
    assert away.phases["step"].host["gradients"] == held.phases["update"].device["gradients"]


def test_pinned_memory_comes_in_powers_of_two(settings: dict[str, Any]) -> None:
    assert Shape(8, 4096, is_expert=False, is_trained=True).pinned_bytes(2) == 16 << 10
    assert Shape(9, 4096, is_expert=False, is_trained=True).pinned_bytes(2) == 32 << 10  # five rows, the larger part
    card = Device("card", 1 << 40, 1e13, 1e10)
    settings = {**settings, "tuning": "full", "lora_rank": 8, "zero_stage": 3, "save_steps": 5}
    model = AutoModelForCausalLM.from_pretrained(settings["model"])
    exact = [4 * one.numel() for one in model.parameters()]
    rounding = sum((1 << (size - 1).bit_length()) - size for size in exact)
    assert rounding > 0.02 * sum(exact)
    saved = told(settings, card).phases["step"].host
    assert (saved["copy to save"], saved["rounding of pinned memory"]) == (3 * sum(exact), 3 * rounding)
    away = told({**settings, "offload": "cpu", "device": "auto"}, card).phases["step"].host
    assert (
        away["rounding of pinned memory"] == 2 * rounding
    )  # weights and gradients; what is saved is copied from there


def test_of_ranks_that_hold_the_same_one_makes_the_copy_to_save(settings: dict[str, Any]) -> None:
    settings = {**settings, "tuning": "full", "lora_rank": 8, "save_steps": 5}
    alone = told(settings).phases["save"].host["copy to save"]
    many = told({**settings, "nproc_per_node": 4, "zero_stage": 0, "global_batch_size": 4}).phases["save"].host
    assert many["copy to save"] == pytest.approx(alone / 4, abs=4)


@pytest.mark.long
def test_rows_of_one_micro_batch_cost_what_they_cost_apart(settings: dict[str, Any]) -> None:
    """Attention is within a sample: as many tokens in fewer, larger micro-batches are no more products."""
    card = replace(DEVICES["a100"], memory_bytes=1 << 40)
    settings |= {"device": "cuda", "packing": False, "max_length": 2048, "global_batch_size": 8}
    times = [told(settings, card, per_device_train_batch_size=rows).step_s for rows in (1, 4, 8)]
    assert times[1:] == [pytest.approx(times[0], rel=0.02)] * 2


def test_a_price_is_in_the_json_too(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({**settings, "device": "auto"}))
    assert cli.main(["plan", str(tmp_path / "run.yaml"), "device=h100", "price=3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cost_per_1000_steps"] == pytest.approx(3 * said["device_hours_per_1000_steps"])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2_moe", {"num_experts": None}, "config.json: .* no num_experts,"),
        ("qwen2_moe", {"moe_intermediate_size": None}, "config.json: .* no moe_intermediate_size,"),
        ("qwen2_moe", {"num_experts_per_tok": 0}, "config.json: num_experts_per_tok=0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": -5}, "config.json: shared_expert_intermediate_size=-5 "),
        ("qwen2_moe", {"num_experts_per_tok": 99}, "config.json: num_experts_per_tok=99, .* 6 experts"),
        ("llama", {"num_key_value_heads": 0}, "config.json: num_key_value_heads=0 "),
        ("llama", {"head_dim": 0}, "config.json: head_dim=0 "),
    ],
)
def test_experts_and_heads_that_are_not_said_are_named(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, kind: str, changes: Any, message: str
) -> None:
    model = Path(shutil.copytree(model_folder(kind), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    (tmp_path / "run.yaml").write_text(json.dumps({**settings, "model": str(model)}))
    with pytest.raises(ModelError, match=message):
        plan(str(tmp_path / "run.yaml"), [])


@pytest.mark.parametrize("left_out", [(), ("moe_intermediate_size", "num_experts_per_tok")])
def test_a_dense_model_of_a_family_with_experts_is_planned(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, left_out: tuple[str, ...]
) -> None:
    model = Path(shutil.copytree(model_folder("qwen2_moe"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | {"num_experts": 0}
    (model / "config.json").write_text(json.dumps({name: v for name, v in config.items() if name not in left_out}))
    (tmp_path / "run.yaml").write_text(json.dumps({**settings, "model": str(model)}))
    sizes = plan(str(tmp_path / "run.yaml"), []).forecast.sizes
    assert sizes.num_experts == 0
    assert sizes.whole.expert_frozen == sizes.whole.expert_trained == 0


QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
"""As the hub has them; transformers itself writes `num_local_experts`."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_model_is_planned_by_whichever_name_its_config_has_for_experts(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    model = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    config = {name if key == "num_experts" else key: value for key, value in QWEN3_MOE.items()}
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text(json.dumps({**settings, "model": str(model)}))
    assert plan(str(tmp_path / "run.yaml"), []).forecast.sizes.num_experts == 8
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "config.json").write_text(json.dumps({key: v for key, v in config.items() if key != name}))
    with pytest.raises(ModelError, match="no num_(local_)?experts,"):
        plan(str(tmp_path / "run.yaml"), [f"model={other}"])


def test_code_of_a_model_is_never_run(
    settings: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Although a config names it, and nobody is asked."""
    model = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "configuration_theirs.TheirConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration_theirs.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    (tmp_path / "run.yaml").write_text(json.dumps({**settings, "model": str(model)}))
    assert cli.main(["plan", str(tmp_path / "run.yaml")]) == 2
    assert cli.main(["doctor", str(tmp_path / "run.yaml")]) == 3
    with pytest.raises(ModelError, match="model_type='?theirs"):
        surefoot.train({**settings, "model": str(model)}, screen=False)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.long
def test_values_narrower_than_queries_are_planned(tmp_path: Path) -> None:
    """Multi-head latent attention, as DeepSeek's."""
    from transformers import DeepseekV3Config

    DeepseekV3Config(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=16,
        q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, vocab_size=500,
        first_k_dense_replace=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"model": str(tmp_path), "dataset": "rows.jsonl", "output_dir": "run"}))
    assert plan(str(run), ["device=h200", "max_length=64"]).forecast.fits


def test_experts_that_are_whole_on_a_rank_are_not_offloaded() -> None:
    with pytest.raises(ConfigError, match="offload=cpu .*expert_parallel_size=.* whole"):
        plan(str(PLANS / "mixtral-8x7b-full-ep.yaml"), ["device=h100", "offload=cpu"])


@pytest.mark.long
def test_a_rollout_that_does_not_fit_is_cut_into_waves(shallow: str) -> None:
    more = ["device=a100", *LOCAL, "max_prompt_length=16000", "global_batch_size=512", "max_completion_length=256"]
    changes = plan(shallow, more).changes
    assert changes[0][0].keys() == {"rollout_batch_size"}


@pytest.mark.matrix
def test_experts_that_several_ranks_share_are_gathered() -> None:
    def gathered(size: int) -> int:
        asked = ["device=b200", "nodes=2", f"expert_parallel_size={size}"]
        step = plan(str(PLANS / "mixtral-8x7b-full-ep.yaml"), asked).forecast.phases["step"]
        return step.device["gathered weights"]

    experts_bytes = 4 * 45.1e9
    assert gathered(4) - gathered(8) == pytest.approx(experts_bytes / 8, rel=0.01)
    assert gathered(2) - gathered(4) == pytest.approx(experts_bytes / 4, rel=0.01)


@pytest.mark.matrix
def test_a_frozen_tower_takes_no_more_than_a_trained_one(shallow: str) -> None:
    full = ["method=sft", "reward_funcs=null", "num_generations=null", "max_completion_length=null", *LOCAL,
            "rollout_engine=null", "max_prompt_length=null", "target_modules=null", "lora_rank=null",
            "lora_alpha=null", "tuning=full", "zero_stage=2", "nnodes=8", "rdzv_endpoint=a:29500",
            "device=b200"]  # fmt: skip
    frozen, trained = (
        plan(shallow, [*full, f"freeze_vision_tower={freezes}"]).forecast.phases["step"].device
        for freezes in ("true", "false")
    )
    owners = ("gradients", "communication buffers")
    assert 0 < sum(frozen.get(one, 0) for one in owners) <= sum(trained.get(one, 0) for one in owners)


@pytest.mark.long
def test_what_the_config_refuses_is_not_suggested(shallow: str) -> None:
    stale = plan(
        shallow, ["device=a100", "max_staleness=1", 'vllm_args=["-tp", "8", "--gpu-memory-utilization", "0.7"]']
    )
    assert not stale.forecast.fits
    assert not any("vllm_sleep" in changed for changed, _ in stale.changes)


@pytest.mark.long
def test_prompts_that_are_read_count(shallow: str) -> None:
    few, many = (
        plan(shallow, ["device=a100", *LOCAL, "max_prompt_length=16000", *more]).forecast.phases["rollout"].device
        for more in (["num_generations=8"], ["num_generations=2"])
    )
    assert many["reading prompts"] == pytest.approx(4 * few["reading prompts"], rel=0.01)
