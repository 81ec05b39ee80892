"""What watching a run costs: step time and memory of the same run with health on and off, in turns.

    python benchmarks/health_overhead.py

One model with random weights, two ranks; ratios are of one run. Writes benchmarks/results/<date>-health-overhead.md.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).parent
PAIRS = 6
STEPS = 30
WARMUP_STEPS = 8


def model(folder: Path) -> Path:
    """About 20 M parameters, in 8 layers of 8 experts."""
    from surefoot.diagnostics.drill import write_job

    write_job(folder)
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8}
    experts = {"num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    ends = {"eos_token_id": 0, "pad_token_id": 0}
    MixtralForCausalLM(MixtralConfig(**sizes, **experts, **ends)).save_pretrained(folder / "model")
    return folder


def run(folder: Path, name: str, *, health: bool) -> tuple[list[float], float]:
    """(seconds of each step after the first few, most MiB of proportional memory of the supervisor)."""
    settings: dict[str, Any] = {
        "model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "output_dir": str(folder / name),
        "max_length": 512, "packing": True, "global_batch_size": 8, "per_device_train_batch_size": 4, "device": "cpu",
        "nproc_per_node": 2, "max_steps": STEPS, "save_steps": 0, "health": health, "learning_rate": 1e-4,
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(settings))
    process = subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", str(folder / f"{name}.json")], stderr=subprocess.DEVNULL
    )
    most = 0.0

    def sample() -> None:
        nonlocal most
        while process.poll() is None:
            try:
                most = max(most, psutil.Process(process.pid).memory_full_info().pss / 2**20)
            except psutil.NoSuchProcess:
                return
            time.sleep(0.5)

    sampler = threading.Thread(target=sample)
    sampler.start()
    if process.wait() != 0:
        raise SystemExit(f"{name} failed")
    sampler.join()
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["step_time_s"] for line in lines][WARMUP_STEPS:]
    return times, most


def event_cost_us(folder: Path) -> float:
    from surefoot.diagnostics.monitor.event_log import Recorder
    from surefoot.events import PhaseBegan, PhaseEnded, RunEnded

    recorder, count = Recorder(folder / "alone", 0), 20_000
    began = time.perf_counter()
    for step in range(count):
        recorder.observe(PhaseBegan(0, step, "forward"))
        recorder.observe(PhaseEnded(0, step, "forward"))
    took_s = time.perf_counter() - began
    recorder.observe(RunEnded())
    return took_s / count / 2 * 1e6


def events_of_a_step(run_folder: Path) -> float:
    """On one rank."""
    from surefoot.diagnostics.monitor.event_log import read_history

    of_rank = [entry for entry in read_history(run_folder).entries if entry.rank == 0 and entry.step]
    return len(of_rank) / len({entry.step for entry in of_rank})


def found_cpu(folder: Path) -> float:
    """Of a supervisor that watches a run of two ranks, as a share of one core."""
    settings = json.loads((folder / "warm.json").read_text())
    settings |= {"output_dir": str(folder / "cpu"), "max_steps": 10_000}
    (folder / "cpu.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "surefoot", "train", str(folder / "cpu.json")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    watched = psutil.Process(process.pid)
    while not (folder / "cpu" / "metrics.jsonl").is_file():
        time.sleep(0.1)
    before, began = watched.cpu_times(), time.monotonic()
    time.sleep(30)
    after, took_s = watched.cpu_times(), time.monotonic() - began
    process.terminate()
    process.wait()
    return (after.user + after.system - before.user - before.system) / took_s


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = model(Path(name))
        run(folder, "warm", health=True)
        ratios, on, off, memory = [], [], [], []
        for pair in range(PAIRS):
            order = (True, False) if pair % 2 else (False, True)
            found = {health: run(folder, f"{pair}-{health}", health=health) for health in order}
            medians = {health: statistics.median(times) for health, (times, _) in found.items()}
            on.append(medians[True])
            off.append(medians[False])
            memory.append(found[True][1])
            ratios.append(medians[True] / medians[False])
            print(
                f"pair {pair}: {medians[True]:.4f} s on, {medians[False]:.4f} s off, ratio {ratios[-1]:.4f}", flush=True
            )
        event_us, events = event_cost_us(folder), events_of_a_step(folder / "0-True")
        cpu = found_cpu(folder)
    share = event_us * events / 1e6 / statistics.median(on)
    today = datetime.date.today().isoformat()
    text = f"""# What health costs ({today})

{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}.
`python benchmarks/health_overhead.py`: a Mixtral form of 8 layers and 8 experts, 2 ranks, gloo; {PAIRS} pairs of runs
of {STEPS} steps with `health: true` and `health: false` in turns. Where pairs differ by more than the figure that is
wanted, the machine's own noise is larger than what is measured; the last rows measure the parts by themselves.

| | wanted | seen |
|---|---|---|
| step time, on / off, median of the pairs | <= 1.01 | {statistics.median(ratios):.4f} |
| the same, each pair | | {", ".join(f"{ratio:.3f}" for ratio in ratios)} |
| step time with health, median | | {statistics.median(on):.3f} s |
| step time without, median | | {statistics.median(off):.3f} s |
| recording one event | | {event_us:.1f} us |
| recording the events of a step of {events:.0f} events, share of the step | <= 1 % | {share:.3%} |
| CPU of the supervisor, share of one core | | {cpu:.1%} |
| proportional memory (PSS) of the supervisor, most | <= 60 MB | {max(memory) * 1.048576:.0f} MB |
"""
    (HERE / "results" / f"{today}-health-overhead.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
