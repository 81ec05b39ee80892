"""GRPO on images: what is generated, what training makes of it, and how runs go on."""

import json
import signal
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import surefoot
from surefoot.distributed.process_group import World
from surefoot.errors import DataError
from surefoot.methods.base import Interrupted
from surefoot.methods.grpo.batch import Trajectory, collate_completions
from surefoot.methods.rollout.engines.local import LocalEngine, RolloutLimits
from surefoot.methods.rollout.engines.vllm_protocol import Policy, ServedModel, build_call, parse_completion
from surefoot.methods.rollout.types import Request, Sampling
from surefoot.methods.token_loss import TokenLogprobs
from surefoot.models.build import trainable_parameters
from tests.support.data import write_jsonl
from tests.support.runs import SignalAfter, assert_same_run, train_with
from tests.support.vision import KINDS, Make, built, draw, make_processor, opened, picture_rows

pytestmark = pytest.mark.slow


def asked(settings: dict[str, Any], each: int = 2) -> tuple[list[Request], Any]:
    """Requests for the first rows, as prompts: with one image, two and none."""
    data, samples, reader = opened({**settings, "method": "grpo", "reward_funcs": ["length"]})
    assert data.train.counts().trained == len(samples)
    requests = [
        Request([int(token) for token in sample.ids], (3, number, index), sample.images, sample.place)
        for number, sample in enumerate(samples[:4])
        for index in range(each)
    ]
    assert [len(request.images) for request in requests[::each]] == [1, 2, 0, 1]
    return requests, reader


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_that_training_sees(kind: str, vision: Any, vision_folder: Make) -> None:
    requests, reader = asked(vision(kind))
    model = built(vision_folder(kind), targets=("attention", "vision")).model
    images = frozenset({model.config.image_token_id, model.config.video_token_id})
    tokenizer = AutoTokenizer.from_pretrained(vision_folder(kind))
    made = LocalEngine(model, tokenizer, reader=reader).generate(requests, Sampling(10, banned=images), 0)
    assert not any(images & set(one.ids) for one in made)
    trajectories = [
        Trajectory(request.prompt, one.ids, one.logprobs, 0.5, 1.0, request.place, request.images)
        for request, one in zip(requests, made, strict=True)
    ]
    for share in (True, False):
        batch = collate_completions(trajectories, share_prompts=share, reader=reader)
        found, _ = TokenLogprobs(model, 1.0)(batch)
        torch.testing.assert_close(found.detach(), batch.rollout_logprobs, rtol=0, atol=5e-6)
        found.sum().backward()
        gradients = {name: p.grad.clone() for name, p in trainable_parameters(model).items() if p.grad is not None}
        model.zero_grad()
        if share:
            shared = gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, shared[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_likeliest_tokens_are_those_of_transformers(kind: str, vision: Any, vision_folder: Make) -> None:
    requests, reader = asked(vision(kind), each=1)
    base = vision_folder(kind)
    model = surefoot.load(base)[0]
    tokenizer, processor = AutoTokenizer.from_pretrained(base), Qwen2VLImageProcessorPil.from_pretrained(base)
    made = LocalEngine(model, tokenizer, reader=reader).generate(requests, Sampling(8, top_k=1), 0)
    theirs = AutoModelForImageTextToText.from_pretrained(base)
    for request, one in zip(requests, made, strict=True):
        ids = torch.tensor([request.prompt])
        inputs: dict[str, Any] = {"input_ids": ids}
        if request.images:
            found = processor(images=[Image.open(image.path) for image in request.images], return_tensors="pt")
            inputs |= {**found, "mm_token_type_ids": (ids == theirs.config.image_token_id).int()}
        theirs.model.rope_deltas = None  # left there by the row before
        expected = theirs.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert one.ids == expected[0, ids.shape[1] :].tolist()


def test_a_rank_that_reads_images_with_others_stops_at_the_next_token(vision: Any, vision_folder: Make) -> None:
    """Where it generates by itself, too: the others hear of it when they meet."""
    requests, reader = asked(vision("qwen2_5_vl"))
    model = built(vision_folder("qwen2_5_vl")).model
    tokenizer = AutoTokenizer.from_pretrained(vision_folder("qwen2_5_vl"))
    times = []

    def told() -> bool:
        times.append(len(times))
        return len(times) > 5

    engine = LocalEngine(model, tokenizer, ranks=World(), reader=reader, limits=RolloutLimits(stop_requested=told))
    with pytest.raises(Interrupted):
        engine.generate(requests, Sampling(200), 0)
    assert len(times) < 10


def test_equal_prompts_with_other_images_are_other_prompts(vision: Any, vision_folder: Make, tmp_path: Path) -> None:
    rows = []
    for colour in ("red", "blue"):
        picture = draw(tmp_path / "data" / f"{colour}.png", colour)
        rows.append({"query": "<image>?", "response": "x", "images": [picture.name]})
    path = write_jsonl(tmp_path / "data" / "two.jsonl", rows)
    _, samples, reader = opened(
        {**vision(dataset=str(path)), "method": "grpo", "reward_funcs": ["length"], "shuffle": False}
    )
    one, other = (
        Request([int(token) for token in sample.ids], (1,), sample.images, sample.place) for sample in samples
    )
    assert one.prompt == other.prompt
    model = built(vision_folder("qwen2_5_vl")).model
    tokenizer = AutoTokenizer.from_pretrained(vision_folder("qwen2_5_vl"))
    engine, sampling = LocalEngine(model, tokenizer, reader=reader), Sampling(6, temperature=0.01)
    together = engine.generate([one, other], sampling, 0)
    alone = [engine.generate([request], sampling, 0)[0] for request in (one, other)]
    for together_one, alone_one in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.tensor(together_one.logprobs), torch.tensor(alone_one.logprobs))
    assert together[0].logprobs != together[1].logprobs


@pytest.fixture
def grpo(vision: Any) -> Callable[..., dict[str, Any]]:
    def settings(**more: Any) -> dict[str, Any]:
        return vision(
            method="grpo",
            reward_funcs=[{"func": "regex", "args": {"pattern": "[aeiou]"}}],
            num_generations=4,
            global_batch_size=8,
            per_device_train_batch_size=3,
            max_completion_length=6,
            **more,
        )

    return settings


@pytest.mark.long
def test_an_interrupted_run_ends_like_a_whole_one(grpo: Any, tmp_path: Path) -> None:
    settings = grpo(num_iterations=3, beta=0.1, save_steps=2, save_total_limit=None) | {"max_steps": 5}
    whole = {**settings, "output_dir": str(tmp_path / "whole")}
    train_with(whole, SignalAfter(99, signal.SIGTERM))
    cut = {**settings, "output_dir": str(tmp_path / "cut")}
    assert train_with(cut, SignalAfter(2, signal.SIGTERM)).status == "interrupted"  # between steps on one rollout
    assert train_with(cut, SignalAfter(99, signal.SIGTERM)).status == "completed"
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_rewards_are_told_of_the_images(grpo: Any, tmp_path: Path) -> None:
    body = "    return [float(len(images)) for images in columns['images']]"
    (tmp_path / "mine.py").write_text(f"def mine(completions, **columns):\n{body}\n")
    rows = [row for row in picture_rows(tmp_path / "data") if row["images"]]
    path = write_jsonl(tmp_path / "data" / "seen.jsonl", rows)
    given = grpo(dataset=str(path)) | {"reward_funcs": [f"{tmp_path}/mine.py:mine"], "max_steps": 2}
    surefoot.train(given, screen=False)
    made = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    for one in made:
        parts = one["prompt"][0]["content"]
        assert one["reward"] == sum(part["type"] == "image" for part in parts) > 0


def test_rewards_may_open_images_whose_bytes_stand_in_the_row(grpo: Any, tmp_path: Path) -> None:
    body = (
        "    from PIL import Image\n"
        "    return [float(sum(Image.open(path).size[0] for path in paths)) for paths in columns['images']]"
    )
    (tmp_path / "mine.py").write_text(f"def mine(completions, **columns):\n{body}\n")
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    held = {"bytes": (tmp_path / "red.png").read_bytes(), "path": None}
    rows = [{"query": f"<image>colour {number}?", "response": "red", "images": [held]} for number in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    given = grpo(dataset=str(tmp_path / "rows.parquet")) | {"reward_funcs": [f"{tmp_path}/mine.py:mine"]}
    surefoot.train(given | {"max_steps": 1}, screen=False)
    made = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert {one["reward"] for one in made} == {56.0}


def test_an_image_that_goes_during_a_run_ends_it_with_its_row(grpo: Any, tmp_path: Path) -> None:
    body = (
        f"    for path in pathlib.Path('{tmp_path}/data').glob('*.png'):\n"
        "        path.write_bytes(b'')\n"
        "    return [float(i) for i in range(len(completions))]"
    )
    (tmp_path / "mine.py").write_text(f"import pathlib\n\ndef mine(completions, **columns):\n{body}\n")
    rows = [row for row in picture_rows(tmp_path / "data") if row["images"]]
    path = write_jsonl(tmp_path / "data" / "seen.jsonl", rows)
    given = grpo(dataset=str(path)) | {"reward_funcs": [f"{tmp_path}/mine.py:mine"], "max_steps": 20}
    with pytest.raises(DataError, match=r"seen\.jsonl:\d+: image .*\.png was changed"):
        surefoot.train(given, screen=False)


def test_a_server_is_shown_the_pixels_of_training(vision: Any) -> None:
    requests, reader = asked(vision())
    images = next(request.images for request in requests if len(request.images) == 2)
    patches = reader.read([("x:1", images)]).tensors["pixel_values"]
    shown = [Image.open(BytesIO(reader.png(image, "x:1"))) for image in images]
    again = [make_processor()(images=one, return_tensors="pt")["pixel_values"] for one in shown]  # scales by itself
    assert torch.equal(torch.cat(again), patches)
    token, cells = reader.settings.token_id, [image.num_tokens for image in images]
    assert cells[0] != cells[1]
    request = Request([8, *[token] * cells[0], 9, *[token] * cells[1], 7], (0,), images, "x:1")
    sampling = Sampling(3, banned=frozenset({token}))
    model = ServedModel(1000, image_token=token)
    call = build_call(request, sampling, "policy", model, ["data:0", "data:1"])
    assert call.body["token_ids"] == [8, token, 9, token, 7]
    assert call.body["content_parts"] == [{"type": "image_url", "url": f"data:{number}"} for number in (0, 1)]
    assert call.body["sampling_params"]["logit_bias"] == {str(token): -100.0}
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"token_id": token, "logprob": -float(token)} for token in (5, 6, 7)]},
        "finish_reason": "length",
    }
    answer = {"model": "policy", "choices": [choice], "prompt_token_ids": request.prompt}
    made = parse_completion(answer, request, sampling, Policy("policy", 4), model)
    assert (made.ids, made.logprobs, made.policy_version) == ([5, 6, 7], [-5.0, -6.0, -7.0], 4)
    answer["prompt_token_ids"] = [8, *[token] * (cells[0] + 1), 9, *[token] * cells[1], 7]
    with pytest.raises(ValueError, match="prompt of x:1 .* tokens.*scales images"):
        parse_completion(answer, request, sampling, Policy("policy", 4), model)


def test_the_experts_of_rollouts_on_images_are_used_again(grpo: Any, tmp_path: Path, vision_folder: Make) -> None:
    given = grpo(model=str(vision_folder("qwen3_vl_moe")), routing_replay="rollout") | {"max_steps": 2}
    surefoot.train(given, screen=False)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["routing_agreement"] for line in metrics] == [1, 1]
    assert all(line["logprob_difference"] < 1e-5 for line in metrics)
