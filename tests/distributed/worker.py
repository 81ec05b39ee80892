"""Many runs, one after the other, on ranks that are started once: `worker.py JOBS.json NUM_RANKS`.

A job is the settings of a run. With `reshard_to`, its checkpoint is loaded on these ranks and saved again there. After
a run, process_groups.txt in its folder says how many process groups a rank is in.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import surefoot
from surefoot.config import load_config
from surefoot.config.resolve import resolve
from surefoot.distributed.process_group import World, init_distributed
from surefoot.system.process import leave
from surefoot.training.async_checkpoint import Saver
from surefoot.training.phases import Phases
from surefoot.training.run_dir import Resume
from surefoot.training.trainer import _assemble, _check_model, _choose_auto, _open, _Run
from tests.support.ranks import run_on_ranks


def reshard(settings: dict[str, Any], target: str, ranks: World) -> None:
    loaded = resolve(load_config(None, (), {**settings, "output_dir": target}), ranks.size)
    resume = Resume(Path(settings["resume_from_checkpoint"]), [])
    if ranks.is_first:
        Path(target).mkdir(parents=True)
    with ExitStack() as cleanup:
        run = _Run(loaded, resume, ranks, lambda _: None, Phases(lambda _: None, ranks.rank))
        base = _check_model(run)
        run = replace(run, loaded=_choose_auto(run, base))
        assembled = _assemble(run, _open(run, base), cleanup, lambda: False)
    train_context = assembled.loop.train_context
    saver = Saver(Path(target), {}, None, ranks)
    saver.save(train_context.saved_tensors, train_context.optimizer, assembled.state)
    saver.wait()


def run_jobs() -> None:
    with init_distributed("cpu") as ranks:
        for settings in json.loads(Path(sys.argv[1]).read_text()):
            target = settings.pop("reshard_to", None)
            if target is None:
                surefoot.train(settings, screen=False)
                if ranks.is_first:
                    count = len(torch.distributed.distributed_c10d._world.pg_map)
                    Path(settings["output_dir"], "process_groups.txt").write_text(str(count))
            else:
                reshard(settings, target, ranks)


if int(sys.argv[2]) == 1:
    run_jobs()
    leave(0)
run_on_ranks(run_jobs, int(sys.argv[2]))
