"""Images that worker processes read ahead: the same numbers, the same errors, and nothing left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from surefoot import train
from surefoot.config import load_config
from surefoot.data import image_workers
from surefoot.data.image_workers import count_workers
from surefoot.data.images import Image
from surefoot.data.sampler import Position
from surefoot.errors import DataError
from surefoot.methods.training_data import open_data
from surefoot.models.build import load_tokenizer
from tests.support.data import write_jsonl
from tests.support.processes import command_lines
from tests.support.vision import draw, opened, picture_rows
from tests.support.vision_families import write_family

pytestmark = pytest.mark.slow


def workers_of(process: int) -> list[psutil.Process]:
    return [child for child, line in command_lines(process).items() if "surefoot.data.image_workers" in line]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_workers_has_the_numbers_of_one_without(vision: Any, tmp_path: Path, dtype: str) -> None:
    trained = {}
    for count in (0, 2):
        folder = tmp_path / f"run-{count}"
        settings = vision(dataloader_num_workers=count, output_dir=str(folder), dtype=dtype, global_batch_size=3)
        assert train(settings, screen=False).status == "completed"
        trained[count] = (losses(folder), load_file(folder / "adapter" / "adapter_model.safetensors"))
    assert trained[2][0] == trained[0][0]
    assert all(torch.equal(tensor, trained[0][1][name]) for name, tensor in trained[2][1].items())
    assert not workers_of(os.getpid())


@pytest.mark.long
def test_a_processor_without_cells_reads_the_same_in_a_worker(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "data" / "rows.jsonl", picture_rows(tmp_path / "data", 3))
    model = write_family("idefics3", tmp_path / "idefics3")
    settings = {"model": str(model), "dataset": str(rows), "output_dir": str(tmp_path / "run"), "max_length": 512}
    _, samples, reader = opened(settings)
    parts = [(sample.place, sample.images) for sample in samples]
    here = reader.read(parts)
    reader.use_workers(model, torch.float32, 2)
    there = reader.read(parts)
    reader.end_workers()
    assert here.num_images == there.num_images == 3
    assert there.tensors.keys() == here.tensors.keys()
    assert all(torch.equal(tensor, there.tensors[name]) for name, tensor in here.tensors.items())


@pytest.mark.long
def test_the_images_of_the_next_step_are_read_ahead(vision: Any) -> None:
    loaded = load_config(None, (), vision(global_batch_size=2))
    base = Path(loaded.run.model)
    data = open_data(loaded, base, load_tokenizer(base, None), lambda _: None)
    data.prepare(Position())
    reader = data.reader
    assert reader is not None
    reader.use_workers(base, torch.bfloat16, 1)
    try:
        step, batches = data.batches(Position())
        keys = [key for sequence in data.order.step(step.next_position).sequences for key in sequence]
        expected = {data.train.sample(*key).images for key in keys} - {()}
        assert expected
        assert set(reader._ahead) == expected
        pixels = [
            batch.vision.tensors["pixel_values"] for batch in batches if batch.vision and not batch.vision.is_blank
        ]
        assert {tensor.dtype for tensor in pixels} == {torch.bfloat16}
        data.batches(step.next_position)
        assert not set(reader._ahead) & expected
    finally:
        data.stop()


@pytest.mark.long
def test_a_bad_image_has_the_same_error_with_workers(vision: Any, tmp_path: Path) -> None:
    reasons = {}
    for count in (0, 1):
        settings = vision(dataloader_num_workers=count, max_steps=2, output_dir=str(tmp_path / f"run-{count}"))
        loaded = load_config(None, (), settings)
        base = Path(loaded.run.model)
        data = open_data(loaded, base, load_tokenizer(base, None), lambda _: None)
        data.prepare(Position())
        assert data.reader is not None
        data.reader.use_workers(base, torch.float32, count)
        for path in (tmp_path / "data").glob("*.png"):
            draw(path, "red", size=(97, 61 + count))
        with pytest.raises(DataError) as caught:
            data.batches(Position())
        reasons[count] = str(caught.value)
        data.stop()
    assert reasons[1] == reasons[0]
    assert "pictures.jsonl:" in reasons[0]


@pytest.mark.long
def test_a_worker_that_is_killed_is_named(vision: Any) -> None:
    _, samples, reader = opened(vision())
    reader.use_workers(Path(vision()["model"]), torch.float32, 1)
    with_images = [(sample.place, sample.images) for sample in samples if sample.images]
    try:
        reader.read(with_images[:1])
        (worker,) = [child for loader in workers_of(os.getpid()) for child in loader.children()]
        worker.kill()
        with pytest.raises(DataError, match=r"pictures\.jsonl:.*signal 9.*dataloader_num_workers"):
            reader.read(with_images[1:2])
        with pytest.raises(DataError, match="dataloader_num_workers"):
            reader.read(with_images[2:3])
    finally:
        reader.end_workers()


@pytest.mark.long
def test_a_worker_that_hangs_is_given_up(vision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, samples, reader = opened(vision())
    reader.use_workers(Path(vision()["model"]), torch.float32, 1)
    with_images = [(sample.place, sample.images) for sample in samples if sample.images]
    reader.read(with_images[:1])
    (worker,) = [child for loader in workers_of(os.getpid()) for child in loader.children()]
    worker.suspend()
    monkeypatch.setattr(image_workers, "DEADLINE_S", 0.2)
    try:
        reader.read_ahead(images for _, images in with_images)
        with pytest.raises(DataError, match="took over 0 s"):
            reader.read(with_images[1:2])
        monkeypatch.setattr(image_workers, "DEADLINE_S", 600.0)
        with pytest.raises(DataError, match="dataloader_num_workers"):  # it is not given the answer to another
            reader.read(with_images[3:4])
    finally:
        began = time.monotonic()
        reader.end_workers()
    assert time.monotonic() - began < 60
    assert not workers_of(os.getpid())


@pytest.mark.long
def test_a_file_that_is_gone_before_it_is_read_is_named(vision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, samples, reader = opened(vision())
    reader.use_workers(Path(vision()["model"]), torch.float32, 1)
    with_images = [(sample.place, sample.images) for sample in samples if sample.images]

    def load_too_late(file: str) -> dict[str, torch.Tensor]:
        (worker,) = [child for loader in workers_of(os.getpid()) for child in loader.children()]
        worker.kill()
        psutil.wait_procs([worker], timeout=10)
        return load_file(file)

    monkeypatch.setattr(image_workers, "load_file", load_too_late)
    try:
        with pytest.raises(DataError, match=r"pictures\.jsonl:.*signal 9.*dataloader_num_workers"):
            reader.read(with_images[:1])
    finally:
        reader.end_workers()


@pytest.mark.long
def test_workers_end_with_a_trainer_that_is_killed(vision: Any, tmp_path: Path) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps(vision(dataloader_num_workers=2, max_steps=100_000)), "utf-8")
    script = f"import json, surefoot; surefoot.train(json.load(open({str(config)!r})), screen=False)"
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (found := [child for loader in workers_of(trainer.pid) for child in loader.children()]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        trainer.kill()
        trainer.wait()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert not alive


def test_workers_are_few_and_leave_a_core_to_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert count_workers(None, torch.device("cpu"), 1) == 0
    for cores, ranks, expected in ((16, 1, 4), (16, 4, 3), (8, 8, 0), (2, 8, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert count_workers(None, gpu, ranks) == expected
    assert count_workers(7, torch.device("cpu"), 1) == 7


def test_images_of_a_sample_without_images_are_not_read_ahead(vision: Any) -> None:
    _, samples, reader = opened(vision())
    reader.use_workers(Path(vision()["model"]), torch.float32, 1)
    images: tuple[Image, ...] = next(sample.images for sample in samples if not sample.images)
    reader.read_ahead([images])
    assert not workers_of(os.getpid()), "no worker starts before the first image"
