"""Modules that are trained in full beside LoRA: the same training as PEFT's, and adapters that PEFT opens."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import surefoot
from surefoot.config import load_config
from surefoot.errors import ConfigError, ModelError
from surefoot.inference.load import ModelFiles, load
from surefoot.methods.base import BatchTotals
from surefoot.methods.sft.method import SftObjective
from surefoot.models.adapter import read_adapter
from surefoot.models.build import BuiltModel, build_model, trainable_parameters
from surefoot.models.decoder_layers import indexer_names
from surefoot.models.generate import generating
from surefoot.models.lora import LoraSettings, checked_targets
from surefoot.models.quantization.formats import Int8Format
from surefoot.planner.trace import make_shaped_batch
from surefoot.training.export import export
from surefoot.training.trainer import train
from tests.models.architectures import tiny_config
from tests.support import rewards
from tests.support.adapters import check_peft_and_merge, logits_of, save
from tests.support.data import write_jsonl
from tests.support.runs import SignalAfter, assert_same_run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BOTH = ("embed_tokens", "lm_head", "model.norm")


@pytest.fixture(params=["two weights", "one weight", "one weight, stored twice"])
def base(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model whose output layer has its own weight, or that of the embeddings."""
    folder = tmp_path / "base"
    config = tiny_config("qwen2", vocab_size=512)
    config.tie_word_embeddings = request.param != "two weights"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if request.param == "one weight, stored twice":
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


def is_shared(built: BuiltModel) -> bool:
    return built.model.lm_head.weight is built.model.model.embed_tokens.weight


def build(
    base: Path, *modules: str, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[BuiltModel, LoraSettings]:
    settings = LoraSettings(rank=4, alpha=8, modules_to_save=modules, **{"targets": ("all",), **more})
    built = build_model(base, lora=settings, device=CPU, dtype=dtype)
    torch.manual_seed(11)
    for parameter in trainable_parameters(built.model).values():
        parameter.data += torch.randn_like(parameter) * 0.2
    return built, settings


def in_full(built: BuiltModel) -> set[str]:
    return {name for name in trainable_parameters(built.model) if "lora_" not in name}


def test_what_is_named_is_trained_in_float32(base: Path) -> None:
    built, _ = build(base, *BOTH, dtype=torch.bfloat16)
    names = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if is_shared(built) else {"lm_head.weight"})
    assert in_full(built) == names
    assert {parameter.dtype for parameter in trainable_parameters(built.model).values()} == {torch.float32}
    assert built.autocast
    assert built.model.model.embed_tokens(torch.tensor([[1]])).dtype == torch.bfloat16, "layers compute in it"


def test_losses_and_gradients_are_those_of_peft(base: Path, tmp_path: Path) -> None:
    built, settings = build(base, *BOTH)
    adapter = save(built, settings, tmp_path / "adapter", base)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    ids = torch.randint(3, 500, (1, 20))
    batch = make_shaped_batch([20], 19)
    batch.ids.copy_(ids)
    batch.position_ids.copy_(torch.arange(20)[None])
    batch.cu_seq_lens.copy_(torch.tensor([0, 20]))
    batch.target_positions.copy_(torch.arange(19))
    batch.targets.copy_(ids[0, 1:])
    batch.answer_of.zero_()
    loss = SftObjective(built, 0.0).loss(batch, BatchTotals(20, 19, 19.0)).total
    loss.backward()
    wanted = peft(input_ids=ids, labels=ids).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    theirs = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", "").replace(".default", ""): p.grad
        for name, p in peft.named_parameters()
        if p.requires_grad
    }
    ours = {name.replace("lora_A", "lora_A.weight").replace("lora_B", "lora_B.weight"): parameter.grad
            for name, parameter in trainable_parameters(built.model).items()}  # fmt: skip
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("modules", [BOTH, ("embed_tokens",), ("lm_head",)])
def test_peft_and_the_merged_folder_give_the_trained_models_logits(
    base: Path, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    built, settings = build(base, *modules)
    shared = {"lm_head.weight": "model.embed_tokens.weight"} if is_shared(built) else {}
    named = {f"model.{name}.weight".replace("model.lm", "lm").replace("model.model", "model") for name in modules}
    assert in_full(built) == {shared.get(name, name) for name in named}
    with generating(built.model):
        wanted = logits_of(built.model)
    adapter = save(built, settings, tmp_path / "adapter", base)
    check_peft_and_merge(base, adapter, wanted, tmp_path / "merged")
    opened, _ = load(ModelFiles(base, adapter, "it"))
    torch.testing.assert_close(logits_of(opened), wanted, atol=1e-4, rtol=1e-4)
    shapes = {name: parameter.shape for name, parameter in trainable_parameters(built.model).items()}
    values = read_adapter(adapter, shapes, settings, built.model)
    assert all(torch.equal(values[name], value) for name, value in trainable_parameters(built.model).items())


def test_a_run_goes_on_from_its_checkpoint_and_its_adapter(base: Path, data_file: Path, tmp_path: Path) -> None:
    def run(name: str, *observers: SignalAfter, **more: Any) -> Path:
        settings = {"model": str(base), "dataset": str(data_file), "output_dir": str(tmp_path / name), "device": "cpu",
                    "modules_to_save": "embed_tokens,lm_head", "max_steps": 4, "lora_rank": 4, "learning_rate": 1e-2,
                    "max_length": 128, "report": False}  # fmt: skip
        train(load_config(None, (), settings | more), observers, screen=False)
        return tmp_path / name

    whole = run("whole")
    run("stopped", SignalAfter(2, signal.SIGTERM))
    assert_same_run(whole, run("stopped"))
    begun = run("begun", init_adapter=str(whole / "adapter"), max_steps=1, learning_rate=0.0)
    untouched = AutoModelForCausalLM.from_pretrained(base)
    models = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), one / "adapter")
              for one in (whole, begun)]  # fmt: skip
    wanted = logits_of(models[0])
    torch.testing.assert_close(logits_of(models[1]), wanted, atol=1e-5, rtol=1e-5)
    moved = models[0].get_output_embeddings().weight - untouched.get_output_embeddings().weight
    assert moved.abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of PEFT
def test_a_weight_of_which_the_files_hold_two_versions_is_two_weights(
    base: Path, data_file: Path, tmp_path: Path
) -> None:
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    values = {"model": str(base), "dataset": str(data_file), "output_dir": str(tmp_path / "run"), "device": "cpu",
             "modules_to_save": ["embed_tokens", "lm_head"], "max_steps": 2, "save_steps": 1, "learning_rate": 1e-2,
             "max_length": 128, "report": False}  # fmt: skip
    run = surefoot.train(values, screen=False).run_folder
    logits = []
    for step, merges in ((None, False), (2, False), (None, True)):
        target = export(run, tmp_path / f"{step}-{merges}", merge=merges, step=step)
        model = AutoModelForCausalLM.from_pretrained(target if merges else base)
        logits.append(logits_of(model if merges else PeftModel.from_pretrained(model, target)))
    for found in logits:
        torch.testing.assert_close(found, logits[0], atol=1e-4, rtol=1e-4)
    opened, _ = load(ModelFiles(base, run / "adapter", "it"))
    torch.testing.assert_close(logits_of(opened), logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (("embed_token",), "embed_token is no module of Qwen2ForCausalLM. Nearest: embed_tokens"),
        (("act_fn",), "act_fn has nothing to train in"),
        (("mlp",), r"mlp means model\.layers\.0\.mlp\.gate_proj, which target_modules names too"),
        (("k_proj.lora_A",), "k_proj.lora_A is no module"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(base: Path, modules: tuple[str, ...], said: str) -> None:
    with pytest.raises(ModelError, match=f"modules_to_save: {said}"):
        build(base, *modules)


def test_a_shared_weight_is_not_adapted_and_trained_in_full(base: Path) -> None:
    settings: dict[str, Any] = {"targets": ("q_proj", "lm_head")}
    if json.loads((base / "config.json").read_text())["tie_word_embeddings"]:
        with pytest.raises(ModelError, match="modules_to_save: embed_tokens means lm_head, which target_modules names"):
            build(base, "embed_tokens", **settings)
    else:
        assert in_full(build(base, "embed_tokens", **settings)[0]) == {"model.embed_tokens.weight"}


def test_names_mean_what_they_do_in_peft(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3_moe")
    options = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), options)
    saved = {name for name, parameter in peft.named_parameters() if parameter.requires_grad and "lora_" not in name}
    names = {name.removeprefix("base_model.model.").replace("modules_to_save.default.", "") for name in saved}
    assert len(names) > 5
    assert in_full(build(folder, "norm", targets=("q_proj",))[0]) == names


def test_parts_that_get_no_gradient_are_left_out() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v32"))
    indexer = indexer_names(model)[0]
    inside = next(name for name, _ in model.get_submodule(indexer).named_parameters()).rpartition(".")[0]
    settings = LoraSettings(rank=4, alpha=8, targets=("attention",), modules_to_save=(f"{indexer}.{inside}",))
    with pytest.raises(ModelError, match="modules_to_save: .* is no module"):
        checked_targets(model, settings)
    with pytest.raises(ModelError, match="in which nothing gets a gradient"):
        checked_targets(model, replace(settings, targets=("mlp",), modules_to_save=("self_attn",)))


def test_single_layers_are_planned(settings: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.num_hidden_layers = 12
    config.save_pretrained(tmp_path)
    names = [f"layers.{number}.input_layernorm" for number in range(12)]
    plan = surefoot.plan({**settings, "model": str(tmp_path), "modules_to_save": names})
    whole = surefoot.plan({**settings, "model": str(tmp_path)})
    trained = plan.forecast.sizes.whole.all_trained - whole.forecast.sizes.whole.all_trained
    assert trained == 12 * config.hidden_size


@pytest.mark.parametrize(("text", "names"), [("embed_tokens,", ["embed_tokens"]), (" a , b ", ["a", "b"])])
def test_names_in_one_text_are_told_apart(text: str, names: list[str]) -> None:
    values = {"model": "m", "dataset": "d", "output_dir": "o", "modules_to_save": text}
    assert load_config(None, (), values).run.modules_to_save == names
    with pytest.raises(ConfigError, match="modules_to_save"):
        load_config(None, (), {**values, "modules_to_save": ["a", ""]})


def test_experts_and_quantised_layers_are_refused(model_folder: Any) -> None:
    with pytest.raises(ModelError, match=r"modules_to_save: experts means .*\.experts, which is not trained in full"):
        build(model_folder("qwen2_moe"), "experts", targets=("attention",))
    with pytest.raises(ModelError, match=r"modules_to_save: o_proj means .*o_proj, whose frozen weights are quantised"):
        build(model_folder("qwen2_moe"), "o_proj", targets=("q_proj",), weight_format=Int8Format())


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": "selective", "optim": "muon"},
        {"quantization": "int8"},
        {"method": "grpo", "reward_funcs": [f"{Path(rewards.__file__)}:longest"], "num_generations": 4, "beta": 0.0,
         "max_completion_length": 8, "global_batch_size": 8},
    ],
    ids=["recomputed", "quantised", "grpo"],
)  # fmt: skip
def test_runs_in_bfloat16_train_them(settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    if "method" in changes:
        settings["dataset"] = str(write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "one two"}] * 16))
    modules = {"modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"], "dtype": "bfloat16"}
    run = surefoot.train({**settings, **modules, **changes, "max_steps": 2}, screen=False)
    before = load_file(Path(settings["model"]) / "model.safetensors")
    saved = load_file(run.run_folder / "adapter/adapter_model.safetensors")
    whole = {name.removeprefix("base_model.model."): value for name, value in saved.items() if "lora_" not in name}
    assert len(whole) == 2 + 2
    for name, value in whole.items():
        assert value.dtype == torch.float32
        assert not torch.equal(value, before[name].float()), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tuning": "full"}, "tuning=full .* modules_to_save asks for LoRA"),
        ({"method": "grpo", "reward_funcs": ["length"], "beta": 0.1}, "beta=0.1 with lm_head in modules_to_save"),
        ({"method": "grpo", "reward_funcs": ["length"], "beta": 0.0, "rollout_engine": "vllm"},
         "rollout_engine=vllm with lm_head in modules_to_save"),
    ],
)  # fmt: skip
def test_settings_that_contradict_it_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(
            None, (), {"model": "m", "dataset": "d", "output_dir": "o", "modules_to_save": "lm_head", **changes}
        )
