"""Processors that cannot be used, and images that no model reads: each is refused with what to do."""

import json
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3nConfig, LlavaOnevisionProcessor

from surefoot import export, train
from surefoot.config import load_config
from surefoot.data.model_processor import REFUSED
from surefoot.diagnostics.preflight.dataset_sample import first_rows
from surefoot.errors import ConfigError, DataError, ModelError
from surefoot.models.build import load_tokenizer
from surefoot.models.pretrained import meta_model
from surefoot.planner.devices import Device
from surefoot.planner.forecast import forecast
from tests.support.data import counting_rows, write_jsonl
from tests.support.vision import draw, opened, picture_rows
from tests.support.vision_families import FAMILIES, write_family


@pytest.fixture
def settings_of(tmp_path: Path) -> Any:
    """kind -> the settings of a run on pictures."""
    rows = write_jsonl(tmp_path / "data" / "rows.jsonl", picture_rows(tmp_path / "data", 3))

    def settings(kind: str, **more: Any) -> dict[str, Any]:
        folder = tmp_path / kind
        return {
            "model": str(folder if folder.exists() else write_family(kind, folder)),
            "dataset": str(rows),
            "output_dir": str(tmp_path / "run"),
            "max_length": 512,
            "max_steps": 2,
            "device": "cpu",
            "report": False,
            **more,
        }

    return settings


@pytest.mark.parametrize(("kind", "package"), [("mistral3", "torchvision"), ("smolvlm", "num2words")])
def test_a_processor_whose_package_is_missing_names_it(kind: str, package: str, settings_of: Any) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*preprocessor_config\.json: .*{kind}.*{package}") as caught:
        train(settings_of(kind), screen=False)
    assert "every row with images" in str(caught.value), "on_bad_row: skip is no way out"
    with pytest.raises(ConfigError, match=rf"target_modules names vision.*{package}"):
        train(settings_of(kind, target_modules=["vision"]), screen=False)


@pytest.mark.parametrize("kind", ["mistral3", "smolvlm"])
def test_rows_of_text_need_no_package_of_a_processor(kind: str, settings_of: Any, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "text.jsonl", counting_rows(6))
    settings = settings_of(kind, dataset=str(rows))
    assert train(settings, screen=False).status == "completed"
    device = Device("cpu", 1 << 40, 1e11, 1e9, is_gpu=False)
    assert forecast(load_config(None, (), settings).run, Path(settings["model"]), device).fits


@pytest.mark.parametrize(("kind", "package"), [("mistral3", "torchvision"), ("smolvlm", "num2words")])
def test_the_doctor_names_the_package_that_rows_with_images_need(kind: str, package: str, settings_of: Any) -> None:
    check = first_rows(load_config(None, (), settings_of(kind)))
    assert (check.status, package in check.text) == ("failed", True)


def test_the_template_of_a_processor_is_that_of_its_model(settings_of: Any, tmp_path: Path) -> None:
    """Many releases have it in a file that transformers reads for processors alone, and export writes one template."""
    settings = settings_of("llava_onevision")
    base = Path(settings["model"])
    own = load_tokenizer(base).chat_template
    (base / "chat_template.jinja").unlink()
    (base / "chat_template.json").write_text(json.dumps({"chat_template": "CTX " + own}))
    assert load_tokenizer(base).chat_template == "CTX " + own
    assert load_tokenizer(base, str(base / "chat_template.json")).chat_template == "CTX " + own
    run = train(settings, screen=False).run_folder
    merged = export(run, tmp_path / "merged", merge=True)
    assert not (merged / "chat_template.json").exists()
    for template in (
        load_tokenizer(merged).chat_template,
        LlavaOnevisionProcessor.get_processor_dict(str(merged))[0]["chat_template"],
    ):
        assert template == "CTX " + own
    (base / "chat_template.jinja").write_text("OTHER " + own)
    assert load_tokenizer(base).chat_template == "CTX " + own, "as transformers' processor"
    (base / "chat_template.json").write_text('{"chat_template": null}')
    assert load_tokenizer(base).chat_template == "OTHER " + own
    (base / "processor_config.json").write_text(json.dumps({"chat_template": {"default": "MAP " + own}}))
    assert load_tokenizer(base).chat_template == "MAP " + own
    (base / "chat_template.jinja").unlink()
    for name in ("preprocessor_config.json", "processor_config.json"):
        (base / name).unlink(missing_ok=True)
    assert load_tokenizer(base).chat_template is None, "without a processor no program reads it"


def test_a_processor_without_a_version_for_pillow_names_torchvision(settings_of: Any) -> None:
    settings = settings_of("idefics3")
    file = Path(settings["model"]) / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_processor_type": "Llama4ImageProcessor"}))
    with pytest.raises(DataError, match=r"preprocessor_config\.json: .*torchvision"):
        train(settings, screen=False)


@pytest.mark.parametrize(
    ("kind", "file", "changes", "named"),
    [
        ("gemma3", "config.json", {"image_token_id": 5}, r"preprocessor_config\.json: .*image_token_id=5 "),
        ("qwen2_vl", "config.json", {"vision_config.spatial_merge_size": 3}, r"_config\.json: .*spatial_merge_size=3 "),
        ("qwen2_vl", "preprocessor_config.json", {"patch_size": 0}, r"preprocessor_config\.json: .*ZeroDivisionError"),
        ("glm4v", "config.json", {"vision_config.num_heads": 3}, r"Glm4vFor.*its vision tower cannot .*RuntimeError"),
        ("internvl", "processor_config.json", {"image_seq_length": 1}, r"InternVLFor.* \d+ tokens .*makes \d+ vectors"),
    ],
)
def test_files_of_two_models_are_named_and_no_rows_are_blamed(
    kind: str, file: str, changes: dict[str, int], named: str, settings_of: Any
) -> None:
    path = Path(settings_of(kind)["model"], file)
    content = json.loads(path.read_text())
    for name, value in changes.items():
        *parts, key = name.split(".")
        reduce(dict.__getitem__, parts, content)[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises((DataError, ModelError), match=named) as caught:
        train(settings_of(kind), screen=False)
    assert "from one release" in str(caught.value)


def test_settings_that_a_processor_has_not_are_refused(settings_of: Any) -> None:
    with pytest.raises(ConfigError, match="min_pixels=100: .*idefics3 "):
        train(settings_of("idefics3", min_pixels=100), screen=False)


def test_a_server_is_given_no_images_that_a_processor_describes(settings_of: Any) -> None:
    grpo = {"method": "grpo", "reward_funcs": ["length"], "rollout_engine": "vllm", "num_generations": 2}
    with pytest.raises(ConfigError, match="rollout_engine=vllm: .*local"):
        train(settings_of("idefics3", **grpo, vllm_server="http://127.0.0.1:9"), screen=False)


def test_images_that_no_token_separates_are_refused_with_their_row(settings_of: Any) -> None:
    settings = settings_of("glm4v")
    template = Path(settings["model"]) / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|begin_of_image|>", "").replace("<|end_of_image|>", ""))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: two of its 2 images "):
        train(settings, screen=False)


def test_an_image_is_scaled_down_to_max_pixels(settings_of: Any, tmp_path: Path) -> None:
    draw(tmp_path / "data" / "large.png", "red", size=(400, 200))
    row = {"query": "<image>?", "response": "red", "images": ["large.png"]}
    rows = write_jsonl(tmp_path / "data" / "large.jsonl", [row])
    tokens = []
    for most in (None, 28 * 28 * 8):
        more = {} if most is None else {"max_pixels": most}
        _, (sample,), reader = opened(settings_of("glm4v", dataset=str(rows), **more))
        tokens.append(sample.images[0].num_tokens)
        patches = reader.read([("", sample.images)]).tensors["pixel_values"]
        assert len(patches) == 4 * tokens[-1]
    assert tokens[1] <= 8 < tokens[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"mistral3", "smolvlm"}))
def test_a_plan_has_the_images_of_every_family(kind: str, settings_of: Any) -> None:
    settings = settings_of(kind, target_modules=["attention", "vision"])
    run, base = load_config(None, (), settings).run, Path(settings["model"])
    device = Device("cpu", 1 << 40, 1e11, 1e9, is_gpu=False)
    with_images = forecast(run, base, device)
    assert with_images.images is not None
    assert with_images.images.tokens_each > 1
    assert with_images.images.is_counted is (kind != "gemma4")


def test_images_for_a_model_that_sees_none_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    draw(tmp_path / "data" / "1.png", "red")
    rows = [*counting_rows(2), {**counting_rows(1)[0], "images": ["1.png"]}]
    path = write_jsonl(tmp_path / "data" / "seen.jsonl", rows)
    with pytest.raises(DataError, match=r"seen\.jsonl:3: .*an image, .*text only"):
        train(settings, dataset=str(path), screen=False)


@pytest.mark.long
def test_workers_measure_images_as_this_process_does(
    settings_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of("idefics3", dataset_num_proc=1)
    _, here, _ = opened(settings)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "other-cache"))
    monkeypatch.setattr("surefoot.data.prepare_pool.SMALL_BYTES", 0)
    _, there, _ = opened(settings)
    assert [len(sample.images) for sample in here] == [1, 2, 0]
    assert [sample.ids.tolist() for sample in there] == [sample.ids.tolist() for sample in here]
    assert [sample.images for sample in there] == [sample.images for sample in here]


def test_images_of_models_whose_whole_prompt_attends_both_ways_are_refused(
    settings_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(REFUSED) == ["paligemma"]
    monkeypatch.setitem(REFUSED, "gemma3", "REASON")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*REASON"):
        train(settings_of("gemma3"), screen=False)


@pytest.mark.skipif(find_spec("timm") is not None, reason="the package is installed")
def test_a_tower_that_needs_a_missing_package_is_refused(tmp_path: Path) -> None:
    Gemma3nConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="pip install timm"):
        meta_model(tmp_path)
