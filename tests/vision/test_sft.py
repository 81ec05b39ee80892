"""SFT on images: what is computed equals what transformers computes, and runs do what their settings say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from surefoot import describe_data, export, load, train
from surefoot.config import load_config
from surefoot.data.collate import collate
from surefoot.data.model_processor import limits_of, load_model_processor
from surefoot.data.sampler import Position
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.distributed.process_group import World
from surefoot.errors import ConfigError, DataError, ModelError
from surefoot.methods.token_loss import TokenLoss
from surefoot.models.build import build_model, trainable_parameters
from surefoot.models.lora import find_targets
from surefoot.models.vision import vision_names
from surefoot.planner.devices import Device
from surefoot.planner.forecast import forecast
from tests.support.data import write_jsonl
from tests.support.models import make_model
from tests.support.vision import (
    COLOURS,
    KINDS,
    Make,
    built,
    draw,
    make_processor,
    make_vision_model,
    opened,
    picture_rows,
    vision_tokenizer,
)

pytestmark = pytest.mark.slow

TEXT_MODELS: dict[str, Any] = {
    "qwen2_5_vl": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_vl": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_vl_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_equal_those_of_transformers(kind: str, vision_folder: Make, vision: Any) -> None:
    base = vision_folder(kind)
    _, samples, reader = opened(vision(kind))
    theirs = AutoModelForImageTextToText.from_pretrained(base)
    processor = Qwen2VLImageProcessorPil.from_pretrained(base)
    ours = build_model(base, lora=None, device=torch.device("cpu"), dtype=torch.float32).model.eval()
    token_loss = TokenLoss(ours)
    token = theirs.config.image_token_id
    seen = set()
    for sample in samples:
        ids = torch.from_numpy(sample.ids.astype("int64"))[None]
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if sample.images:
            found = processor(images=[Image.open(image.path) for image in sample.images], return_tensors="pt")
            inputs |= {**found, "mm_token_type_ids": (ids == token).int()}
        labels = torch.where(torch.from_numpy(sample.weights) > 0, ids[0], -100)[None]
        with torch.no_grad():
            expected = theirs(**inputs, labels=labels)
            batch = collate([sample], reader)
            loss = token_loss(batch) / batch.num_trained
        torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
        seen.add(len(sample.images))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_equals_its_samples_one_by_one(kind: str, vision_folder: Make, vision: Any) -> None:
    _, samples, reader = opened(vision(kind))
    model = built(vision_folder(kind), targets=("attention", "vision"))
    token_loss = TokenLoss(model.model)
    parameters = trainable_parameters(model.model)
    assert any("visual" in name for name in parameters)
    token_loss(collate(samples[:5], reader)).backward()
    packed = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
    assert packed.keys() == parameters.keys()
    model.model.zero_grad()
    for sample in samples[:5]:
        token_loss(collate([sample], reader)).backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, packed[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert max(float(gradient.abs().max()) for gradient in packed.values()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_text_is_what_the_text_model_makes_of_it(kind: str, vision_folder: Make, vision: Any) -> None:
    """A model of text alone, of transformers, with the weights of the language part."""
    _, samples, reader = opened(vision(kind))
    text = next(sample for sample in samples if not sample.images)
    sees = AutoModelForImageTextToText.from_pretrained(vision_folder(kind))
    about = sees.config.text_config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config_class, model_class = TEXT_MODELS[kind]
    known = config_class().to_dict()
    given = {name: about[name] for name in known if name in about and name != "model_type"}
    given["tie_word_embeddings"] = sees.config.tie_word_embeddings
    if kind == "qwen3_vl_moe":
        given["norm_topk_prob"] = True  # as its router always does
    alone = model_class(config_class(**given))
    part = "model.language_model."
    weights = {name.replace(part, "model."): one for name, one in sees.state_dict().items() if "visual" not in name}
    alone.load_state_dict(weights)
    ids = torch.from_numpy(text.ids.astype("int64"))[None]
    labels = torch.where(torch.from_numpy(text.weights) > 0, ids[0], -100)[None]
    ours = build_model(vision_folder(kind), lora=None, device=torch.device("cpu"), dtype=torch.float32)
    token_loss = TokenLoss(ours.model.eval())
    with torch.no_grad():
        expected = alone.eval()(input_ids=ids, labels=labels).loss
        batch = collate([text], reader)
        torch.testing.assert_close(token_loss(batch) / batch.num_trained, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(token_loss(collate([text])) / batch.num_trained, expected, rtol=1e-5, atol=1e-5)


def answer(model: Any, base: Path, picture: Path) -> str:
    """What transformers' own generation says of a picture."""
    tokenizer, processor = AutoTokenizer.from_pretrained(base), Qwen2VLImageProcessorPil.from_pretrained(base)
    found = processor(images=Image.open(picture), return_tensors="pt")
    ask = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour?"}]}]
    text = tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
    cells = int(found["image_grid_thw"].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * cells), return_tensors="pt")["input_ids"]
    kinds = (ids == model.config.image_token_id).int()
    out = model.generate(input_ids=ids, mm_token_type_ids=kinds, **found, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.long
def test_a_model_learns_what_pictures_show(vision: Any, tmp_path: Path) -> None:
    rows = []
    for number in range(24):
        colour = list(COLOURS)[number % 3]
        size = (56 + 28 * (number % 4), 56 + 28 * (number % 5 % 3))
        picture = draw(tmp_path / "data" / f"{number}.png", colour, 1 + number % 3, size=size)
        rows.append({"query": "What colour?", "response": colour, "images": [picture.name]})
    path = write_jsonl(tmp_path / "data" / "colours.jsonl", rows)
    given = vision(dataset=str(path), tuning="full", max_steps=100, learning_rate=1e-2)
    del given["lora_rank"]
    train(given, screen=False, per_device_train_batch_size=24)
    base = tmp_path / "run" / "model"
    model = AutoModelForImageTextToText.from_pretrained(base)
    found = [answer(model, base, tmp_path / "data" / f"{number}.png") for number in range(24)]
    assert found == list(COLOURS) * 8


@pytest.mark.long
def test_an_adapter_says_to_peft_what_it_says_here(vision: Any, vision_folder: Make, tmp_path: Path) -> None:
    for targets, in_tower in ((["attention"], False), (["attention", "vision"], True), (["all", "vision"], True)):
        result = train(vision(target_modules=targets, overwrite_output_dir=True), screen=False)
        assert result.artifact is not None
        tensors = load_file(result.artifact / "adapter_model.safetensors")
        assert any("visual" in name for name in tensors) is in_tower
        tuned = PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(vision_folder("qwen2_5_vl")), result.artifact
        )
        ours, _ = load(vision_folder("qwen2_5_vl"), result.artifact)
        inputs = {
            **Qwen2VLImageProcessorPil.from_pretrained(vision_folder("qwen2_5_vl"))(
                images=Image.open(tmp_path / "data" / "0.png"), return_tensors="pt"
            )
        }
        cells = int(inputs["image_grid_thw"].prod()) // 4
        ids = torch.tensor([[7, 8, *[tuned.config.image_token_id] * cells, 9, 10]])
        inputs |= {"input_ids": ids, "mm_token_type_ids": (ids == tuned.config.image_token_id).int()}
        with torch.no_grad():
            torch.testing.assert_close(ours(**inputs).logits, tuned(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_full_fine_tuning_keeps_the_tower_unless_told(
    kind: str, vision: Any, vision_folder: Make, tmp_path: Path
) -> None:
    base = AutoModelForImageTextToText.from_pretrained(vision_folder(kind)).state_dict()
    tower = vision_names(AutoModelForImageTextToText.from_pretrained(vision_folder(kind)))
    for freezes in (True, False):
        target = tmp_path / f"run-{freezes}"
        given = vision(kind, tuning="full", output_dir=str(target), freeze_vision_tower=freezes, weight_decay=0.1)
        del given["lora_rank"]
        train(given, screen=False)
        tuned = AutoModelForImageTextToText.from_pretrained(target / "model").state_dict()
        changed = {name for name, value in tuned.items() if not torch.equal(value, base[name])}
        assert tuned.keys() == base.keys()
        assert bool(changed & tower) is not freezes
        assert changed - tower
    assert (tmp_path / "run-True" / "model" / "preprocessor_config.json").is_file()
    told = [entry.values for entry in read_history(tmp_path / "run-True").entries if entry.kind == "images"]
    assert len(told) == 4
    assert all(one["images"] >= 1 and one["patches"] >= 4 * one["images"] for one in told), "a token is four patches"


def test_a_checkpoint_of_full_fine_tuning_is_exported_with_the_tower_it_left_alone(vision: Any, tmp_path: Path) -> None:
    given = vision(tuning="full", save_steps=2)
    del given["lora_rank"]
    train(given, screen=False)
    export(tmp_path / "run", tmp_path / "out", step=4)
    made, whole = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "out", tmp_path / "run" / "model")
    )
    assert made.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in made.items())


def test_names_that_tower_and_decoder_share_mean_the_decoder(vision_folder: Make) -> None:
    model = AutoModelForImageTextToText.from_pretrained(vision_folder("qwen2_5_vl"))
    assert any(name.endswith(".down_proj.weight") for name in vision_names(model))
    for targets in (["down_proj"], ["mlp"], ["all"], ["mlp.down_proj"]):
        assert not any("visual" in name for name in find_targets(model, targets).linears)
    by_name = find_targets(model, ["model.visual.blocks.0.mlp.down_proj"])
    assert by_name.linears == ["model.visual.blocks.0.mlp.down_proj"]
    tower = find_targets(model, ["vision"]).linears
    assert {name.split(".")[2] for name in tower} == {"blocks", "merger"}
    with pytest.raises(ModelError, match="'vision' is empty in LlamaForCausalLM"):
        find_targets(make_model("llama"), ["vision"])


def test_equal_files_in_two_folders_have_their_own_images(vision: Any, tmp_path: Path) -> None:
    for name, colour in (("one", "red"), ("two", "blue")):
        draw(tmp_path / name / "it.png", colour)
        write_jsonl(tmp_path / name / "rows.jsonl", [{"query": "?", "response": "x", "images": ["it.png"]}])
    paths = []
    for name in ("one", "two"):
        _, (sample,), _ = opened(vision(dataset=str(tmp_path / name / "rows.jsonl")))
        paths.append(sample.images[0].path)
    assert paths == [str(tmp_path / name / "it.png") for name in ("one", "two")]
    _, (sample,), _ = opened(vision(dataset=str(tmp_path / "one" / "rows.jsonl"), image_dir=str(tmp_path / "two")))
    assert sample.images[0].path == paths[1]


def test_images_are_never_cut(vision: Any, tmp_path: Path) -> None:
    draw(tmp_path / "data" / "large.png", "red", size=(600, 600))
    rows = [*picture_rows(tmp_path / "data"), {"query": "<image>?", "response": "red", "images": ["large.png"]}]
    rows = [rows[-1] | {"images": ["0.png"]}, rows[-1]]
    path = write_jsonl(tmp_path / "data" / "long.jsonl", rows)
    data, samples, _ = opened(vision(dataset=str(path), max_length=40, max_pixels=30 * 784, truncation="right"))
    assert len(samples) == 1
    ((place, reason),) = data.train.skipped()
    assert place == "long.jsonl:2"
    assert re.search(r"\d tokens .*images, .*max_length=40$", reason)
    needed = (
        r"1 of 2 rows .* max_length=40: .* long.jsonl:2.* 1 of them have images, .*max_pixels.*: drop \([^()]*\) \("
    )
    with pytest.raises(DataError, match=needed):
        opened(vision(dataset=str(path), max_length=40, max_pixels=30 * 784))


def test_places_of_images_are_never_trained(vision: Any, tmp_path: Path, vision_folder: Make) -> None:
    """With `train_on: all` too, and the counts say the same."""
    token = AutoModelForImageTextToText.from_pretrained(vision_folder("qwen3_vl")).config.image_token_id
    path = write_jsonl(tmp_path / "data" / "rows.jsonl", picture_rows(tmp_path / "data"))
    for train_on in ("all", "assistant"):
        data, samples, _ = opened(vision("qwen3_vl", dataset=str(path), train_on=train_on))
        for sample in samples:
            places = sample.ids == token
            assert places.any() == bool(sample.images)
            assert not sample.weights[places].any()
            assert sample.weights[~places].any()
        counted = sum(int(data.train.chunk_samples(number).trained.sum()) for number in range(len(data.train.chunks)))
        assert counted == sum(int((sample.weights[1:] > 0).sum()) for sample in samples)


@pytest.mark.long
def test_bad_images_stop_the_run_with_their_row(vision: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data" / "bad.jsonl", picture_rows(tmp_path / "data"))
    (tmp_path / "data" / "4.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(DataError, match=r"bad\.jsonl:5: image .*/4\.png .*on_bad_row: skip") as caught:
        train(vision(dataset=str(path)), screen=False)
    assert "every row" not in str(caught.value), "the others can be used"
    (tmp_path / "data" / "4.png").unlink()
    with pytest.raises(DataError, match=r"bad\.jsonl:5: image 4\.png "):
        train(vision(dataset=str(path)), screen=False)
    train(vision(dataset=str(path), on_bad_row="skip"), screen=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["examples"]["skipped"] == 1
    # What is put right is used: a broken image is no part of what is kept of a row.
    draw(tmp_path / "data" / "4.png", "green")
    train(vision(dataset=str(path), overwrite_output_dir=True), screen=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["examples"]["skipped"] == 0


def test_an_image_that_was_changed_is_prepared_anew(vision: Any, tmp_path: Path) -> None:
    _, before, _ = opened(vision())
    draw(tmp_path / "data" / "0.png", "blue", size=(28, 28))
    _, after, reader = opened(vision())
    assert (before[0].images[0].num_tokens, after[0].images[0].num_tokens) == (6, 1)
    assert len(after[0].ids) == len(before[0].ids) - 5
    collate(after, reader)
    assert [sample.ids.tolist() for sample in after[2:]] == [sample.ids.tolist() for sample in before[2:]]


@pytest.mark.long
def test_a_run_goes_on_with_the_rows_it_saw(vision: Any, pictures: Path, cache: Path, tmp_path: Path) -> None:
    """An image that comes between two starts would change the order of all rows."""
    (pictures.parent / "7.png").unlink()
    settings = vision(on_bad_row="skip", lr_scheduler_type="constant", warmup_ratio=0.0)
    whole = train(settings, output_dir=str(tmp_path / "whole"), screen=False).run_folder
    train(settings, max_steps=2, screen=False)
    shards = [path for path in (cache / "data").glob("*/*.safetensors") if b"7.png" in path.read_bytes()]
    assert shards
    before = [path.stat().st_mtime_ns for path in shards]
    opened(settings)
    assert [path.stat().st_mtime_ns for path in shards] == before, "nothing has changed, and nothing is made anew"
    draw(pictures.parent / "7.png", "green")
    resumed = train(settings, screen=False)
    assert resumed.examples["skipped"] == 1
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (whole, resumed.run_folder)]
    seen = [
        [(one["step"], one["loss"], one["tokens"]) for one in map(json.loads, part) if "loss" in one] for part in lines
    ]
    assert seen[0] == seen[1]

    train(settings, max_steps=2, overwrite_output_dir=True, screen=False)
    draw(pictures.parent / "0.png", "blue", size=(28, 28))
    with pytest.raises(DataError, match=r"pictures\.jsonl:1: .*12 rows .*other images"):
        train(settings, screen=False)


def test_a_missing_image_is_shown_by_surefoot_data(vision: Any, pictures: Path) -> None:
    seen = describe_data(vision(), show=2)
    assert seen.images == {"count": 12, "tokens min": 6, "tokens median": 8, "tokens mean": 8, "tokens p95": 12,
                           "tokens max": 12}  # fmt: skip
    (pictures.parent / "0.png").unlink()
    report = describe_data(vision(), show=2)
    assert report.refusal is not None
    assert "pictures.jsonl:1: image 0.png " in report.refusal
    assert report.samples[0].source == "pictures.jsonl:3"  # line 2 shows it too


def test_bad_rows_speak_for_themselves(vision: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data" / "gone.jsonl", [{"query": "?", "response": "a", "images": ["gone.png"]}])
    report = describe_data(vision(dataset=str(path)), show=1)
    assert report.refusal is not None
    assert "gone.jsonl:1: image gone.png " in report.refusal
    assert report.findings == [], "their masks are not what is wrong"


def test_a_tower_that_would_see_nothing_is_not_trained(vision: Any, vision_folder: Make, data_file: Path) -> None:
    for name in ("preprocessor_config.json",):
        (vision_folder("qwen2_5_vl") / name).rename(vision_folder("qwen2_5_vl") / "away.json")
    try:
        train(vision(dataset=str(data_file)), screen=False)
        with pytest.raises(ConfigError, match="target_modules .*vision, .*preprocessor_config"):
            train(
                vision(dataset=str(data_file), target_modules=["all", "vision"], overwrite_output_dir=True),
                screen=False,
            )
        with pytest.raises(DataError, match="image, .*preprocessor_config"):
            train(vision(overwrite_output_dir=True), screen=False)
    finally:
        (vision_folder("qwen2_5_vl") / "away.json").rename(vision_folder("qwen2_5_vl") / "preprocessor_config.json")


def test_ranks_open_the_images_of_a_step_together(vision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds an image broken must not leave the others in the step's first collective."""
    data, _, _ = opened(vision())
    asked: list[Any] = []

    def together(_: World, work: Any, **__: Any) -> Any:
        asked.append(work)
        return work()

    monkeypatch.setattr(World, "run_or_raise_on_all", together)
    _, batches = data.batches(Position())
    assert len(asked) == 1
    assert batches


@pytest.mark.parametrize("freezes", [True, False])
def test_a_plan_counts_the_tower_as_it_is_trained(freezes: bool, vision: Any, vision_folder: Make) -> None:
    given = vision(tuning="full", freeze_vision_tower=freezes)
    del given["lora_rank"]
    model = AutoModelForImageTextToText.from_pretrained(vision_folder("qwen2_5_vl"))
    tower = vision_names(model)
    frozen = sum(parameter.numel() for name, parameter in model.named_parameters() if name in tower)
    run = load_config(None, (), given).run
    told = forecast(run, vision_folder("qwen2_5_vl"), Device("cpu", 1 << 40, 1e11, 1e9, is_gpu=False))
    assert told.sizes.whole.frozen == (frozen if freezes else 0)
    assert told.sizes.whole.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "limits", [{"min_pixels": 784, "max_pixels": 12544}, {"size": {"shortest_edge": 784, "longest_edge": 12544}}]
)
def test_every_form_of_processor_files_is_read(limits: dict[str, Any], tmp_path: Path) -> None:
    made = json.loads(make_processor().to_json_string())
    del made["size"]
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {**made, **limits}}))
    config, tokenizer = make_vision_model("qwen2_5_vl", vision_tokenizer()).config, vision_tokenizer()
    cutter = load_model_processor(tmp_path, config, tokenizer).image_processor
    assert limits_of(cutter) == (784, 12544)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {**made, "size": {"height": 56, "width": 56}}})
    )
    with pytest.raises(DataError, match=r"processor_config\.json: .*size.*shortest_edge.*height=56"):
        load_model_processor(tmp_path, config, tokenizer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_pixels": 5000, "max_pixels": 2000}, "min_pixels=5000, max_pixels=2000"),
        ({"max_pixels": 300}, "max_pixels=300: .*28x28 "),
        ({"freeze_vision_tower": False}, "freeze_vision_tower=false"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], message: str, vision: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        train(vision(**given), screen=False)


def test_max_pixels_bounds_the_tokens(vision: Any, tmp_path: Path) -> None:
    draw(tmp_path / "data" / "large.png", "red", size=(600, 600))
    path = write_jsonl(tmp_path / "data" / "one.jsonl", [{"query": "?", "response": "red", "images": ["large.png"]}])
    for most, cells in ((17 * 784, 16), (5 * 784, 4), (401 * 784, 400)):
        _, (sample,), _ = opened(vision(dataset=str(path), max_pixels=most, max_length=1000))
        assert sample.images[0].num_tokens == cells


def test_settings_of_images_are_refused_for_a_model_that_reads_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_pixels: .*images, .*reads none"):
        train(settings, max_pixels=100_000, screen=False)
