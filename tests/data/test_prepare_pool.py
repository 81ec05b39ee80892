"""Shards are made once, by workers, and shared; a kill loses only the shard in work; failures are named."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from surefoot.data import prepare_pool
from surefoot.data.dataset import Dataset
from surefoot.data.prepare_pool import Progress
from surefoot.errors import DataError
from surefoot.system.atomic_io import cache_folder
from tests.data.opening import open_dataset, prepared
from tests.support.data import counting_rows, write_jsonl
from tests.support.models import make_tokenizer
from tests.support.processes import command_lines


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def always_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_pool, "SMALL_BYTES", 0)


def samples(dataset: Dataset) -> list[tuple[list[int], list[float], str]]:
    return [(sample.ids.tolist(), sample.weights.tolist(), sample.place) for sample in dataset]


def shards() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in cache_folder().rglob("*.safetensors")}


def big_file(path: Path, rows: int = 9000) -> Path:
    return write_jsonl(path, [{**row, "n": n} for n, row in enumerate(counting_rows(rows))])


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".jsonl", pytest.param(".jsonl.gz", marks=pytest.mark.matrix)])
def test_workers_prepare_what_one_process_prepares(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = big_file(tmp_path / "a.jsonl")
    if suffix.endswith(".gz"):
        subprocess.run(["gzip", "-k", str(path)], check=True)
        path = tmp_path / "a.jsonl.gz"
    alone = samples(prepared(path, tokenizer, num_workers=0))
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(prepare_pool, "SMALL_BYTES", 0)
    seen: list[Any] = []
    dataset = open_dataset(path, tokenizer, num_workers=2)
    dataset.preparation._on_progress = seen.append
    dataset.prepare()
    assert samples(dataset) == alone
    assert len(alone) == 9000
    assert seen[-1].rows == 9000
    assert seen[-1].rows_per_second > 0
    if suffix == ".jsonl":
        assert seen[-1].eta_s == 0


@pytest.mark.matrix
def test_who_waits_says_that_more_is_there(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the thread that waits: for its own workers, and for another process."""
    monkeypatch.setattr(prepare_pool, "SMALL_BYTES", 0)
    monkeypatch.setattr(prepare_pool, "GROWTH_EVERY_S", 0.0)
    path = big_file(tmp_path / "a.jsonl", 20_000)
    other = open_dataset(path, tokenizer)
    other.preparation._only_waits = True
    heard: list[Any] = []
    other.preparation._on_progress = heard.append
    dataset = open_dataset(path, tokenizer, num_workers=1)
    threads: set[str] = set()
    dataset.preparation._on_progress = lambda told: threads.add(f"{threading.current_thread().name} {told is None}")
    dataset.preparation.start([])
    beside = threading.Thread(target=other.preparation.run)
    beside.start()
    dataset.preparation.wait()
    beside.join(30)
    assert heard
    assert set(heard) == {None}
    assert threads == {"preparation False", "MainThread True"}


def test_what_is_prepared_is_prepared_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", counting_rows(20))
    first = samples(prepared(path, tokenizer))
    before = shards()
    assert samples(prepared(path, tokenizer, max_length=9999, train_on="assistant")) == first
    assert shards() == before
    tokenizer_of_another_model = make_tokenizer()
    tokenizer_of_another_model.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"  # noqa: E501
    assert samples(prepared(path, tokenizer_of_another_model)) != first
    assert len(shards()) == 2


def test_a_changed_file_is_prepared_anew(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", counting_rows(20))
    old = time.time() - 1000
    os.utime(path, (old, old))
    assert prepared(path, tokenizer).counts().read == 20
    assert list(cache_folder().glob("data/scans/*.json")), "an old file's content is remembered by its stamp"
    assert prepared(path, tokenizer).counts().read == 20
    write_jsonl(path, counting_rows(21))
    assert prepared(path, tokenizer).counts().read == 21


def test_a_file_changed_while_it_is_prepared_poisons_nothing(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": "a", "completion": text} for text in ("ORIGINAL", "REPLACED")]
    path = write_jsonl(tmp_path / "a.jsonl", rows[:1])
    dataset = open_dataset(path, tokenizer)
    write_jsonl(path, rows[1:])
    with pytest.raises(DataError, match=r"a\.jsonl .*changed"):
        dataset.prepare()
    write_jsonl(path, rows[:1])
    assert "ORIGINAL" in tokenizer.decode(next(iter(prepared(path, tokenizer))).ids)
    other = write_jsonl(tmp_path / "b.jsonl", rows)
    dataset = open_dataset(other, tokenizer)
    other.unlink()
    with pytest.raises(DataError, match=r"b\.jsonl.*No such file"):
        dataset.prepare()


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_more_files_than_may_be_open(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_pool, "FILES_AT_ONCE", 7)
    monkeypatch.setattr(prepare_pool, "SMALL_BYTES", 0)
    for n in range(20):
        write_jsonl(tmp_path / "many" / f"{n:02d}.jsonl", [{"prompt": "a", "completion": str(n)}])
    dataset = prepared(tmp_path / "many", tokenizer, num_workers=workers)
    assert dataset.counts().read == 20


def test_reasons_that_quote_what_is_no_text_can_be_stored(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"\\ud800": 1}\n')
    dataset = prepared(path, tokenizer, skip_bad_rows=True)
    ((place, reason),) = dataset.skipped()
    assert place == "a.jsonl:2"
    assert "\\ud800" in reason


PREPARE = """
import sys
from pathlib import Path
from tests.support.models import make_tokenizer
from tests.data.opening import open_dataset
from surefoot.data import prepare_pool
prepare_pool.SMALL_BYTES = 0
dataset = open_dataset(Path(sys.argv[1]), make_tokenizer(), num_workers=2)
dataset.preparation._on_progress = lambda progress: progress and print(progress.rows, flush=True)
dataset.preparation.run()
print("done", flush=True)
"""


def start_preparing(path: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(path)], cwd=root, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )


@pytest.mark.long
@pytest.mark.usefixtures("always_workers")
def test_after_a_kill_preparing_goes_on_where_it_stopped(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = big_file(tmp_path / "a.jsonl", 30_000)
    process = start_preparing(path)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline()
    workers = own_workers()
    assert workers
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()
    deadline = time.monotonic() + 30
    while any(one.is_running() for one in workers):  # workers end with their jobs
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kept = shards()
    assert 2 <= len(kept) < 8
    dataset = open_dataset(path, tokenizer, num_workers=2)
    seen: list[Any] = []
    dataset.preparation._on_progress = seen.append
    dataset.prepare()
    assert dataset.counts().read == 30_000
    assert seen[-1].eta_s == 0, "what was there is not waited for"
    assert kept.items() <= shards().items(), "shards that were there are not made again"
    again = [(sample[0], sample[1]) for sample in samples(dataset)[:40]]
    assert again == [
        (sample[0], sample[1])
        for sample in samples(prepared(write_jsonl(tmp_path / "b.jsonl", counting_rows(40)), tokenizer))
    ]


def own_workers() -> list[psutil.Process]:
    """Of this test: another suite on this machine has its own."""
    return [process for process, line in command_lines(os.getpid()).items() if "surefoot.data.prepare_worker" in line]


@pytest.mark.long
def test_two_processes_share_one_preparation(tmp_path: Path) -> None:
    path = big_file(tmp_path / "a.jsonl", 20_000)
    processes = [start_preparing(path) for _ in range(2)]
    printed = [process.communicate(timeout=100)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [lines[-1] for lines in printed] == ["done", "done"]
    assert sum(len(lines) - 1 for lines in printed) == 5, "five chunks, each prepared by one of them"


@pytest.mark.long
@pytest.mark.usefixtures("always_workers")
def test_training_data_can_be_asked_for_while_the_rest_is_prepared(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = big_file(tmp_path / "a.jsonl", 20_000)
    dataset = open_dataset(path, tokenizer, num_workers=1)
    dataset.preparation.start([(0, 4), (0, 2)])
    part = dataset.chunk_samples(4)
    assert len(part.samples) == 20_000 - 4 * 4096
    assert not dataset.preparation.is_complete
    assert dataset.counts().read < 20_000
    dataset.preparation.run()  # waits for the one in the background
    assert dataset.counts().read == 20_000


@pytest.mark.long
@pytest.mark.usefixtures("always_workers")
def test_stopping_ends_the_workers_and_keeps_the_shards(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = open_dataset(big_file(tmp_path / "a.jsonl", 60_000), tokenizer, num_workers=1)
    dataset.preparation.start([])
    dataset.chunk_samples(0)
    dataset.preparation.stop()
    assert own_workers() == []
    assert 1 <= len(shards()) < 15


def broken_template() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for %}"
    return tokenizer


@pytest.mark.usefixtures("always_workers")
@pytest.mark.parametrize("background", [False, True])
def test_a_failure_in_a_worker_reaches_the_user(tmp_path: Path, background: bool) -> None:
    dataset = open_dataset(big_file(tmp_path / "a.jsonl", 5000), broken_template(), num_workers=1)
    if background:
        dataset.preparation.start([])
    with pytest.raises(DataError, match=r"a\.jsonl:\d+: .*Jinja: line 1"):
        dataset.chunk_samples(0) if background else dataset.prepare()


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "workers", "doing"),
    [(60_000, 1, r" chunk \d"), (6_000, 3, "")],  # some of the three have nothing to do
)
@pytest.mark.usefixtures("always_workers")
def test_a_killed_worker_is_named_with_its_signal(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: int, workers: int, doing: str
) -> None:
    dataset = open_dataset(big_file(tmp_path / "a.jsonl", rows), tokenizer, num_workers=workers)
    dataset.preparation._on_progress = lambda _: kill_workers()
    with pytest.raises(DataError, match=rf"worker .* signal 9.*{doing}"):
        dataset.prepare()
    assert shards() or workers > 1, "what was prepared is kept"


def kill_workers() -> None:
    """All but the process that holds them."""
    for worker in own_workers():
        with suppress(psutil.NoSuchProcess):
            if worker.ppid() != os.getpid():
                worker.kill()


def test_a_missing_an_empty_and_a_blank_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name, content in (("empty.jsonl", ""), ("blank.jsonl", "\n \n"), ("none.json", "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=rf"{name} .*(0 bytes|no rows).*\(run\.yaml:2\)"):
            open_dataset(tmp_path / name, tokenizer)


def progress_of(rows: int, done: int, total: int, seconds: float) -> Any:
    return Progress(rows, done, total, seconds)


def test_progress_tells_rate_and_time_left() -> None:
    halfway = progress_of(100, 50, 100, 2.0)
    assert halfway.rows_per_second == 50
    assert halfway.eta_s == 2.0
    assert progress_of(10, 0, 0, 0.0).eta_s is None
