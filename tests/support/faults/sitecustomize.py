"""Loaded by Python at its start where this folder is on PYTHONPATH: makes one rank of a run fail, once.

FAULT is `rank:what:when:file`; the file is made when the fault strikes, so that a restarted rank is sound; without one
the fault strikes in each start. `rank` is `alone` for the process of a run with one rank. `what` is an exception, a
signal, or `cut`: a kill while it sends.
MEET_WITHIN_S: how long ranks wait for each other at the start. LATE_RANK: whose time for rollouts is over after a few
tokens, or LATE_AFTER so many looks at the clock, while the others' is not.
"""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

if "MEET_WITHIN_S" in os.environ and "RANK" in os.environ:
    from surefoot.distributed import store

    store.DEADLINE = timedelta(seconds=int(os.environ["MEET_WITHIN_S"]))
    store.LATE = store.DEADLINE / 3

if "RANK" in os.environ and os.environ["RANK"] == os.environ.get("LATE_RANK"):
    from surefoot.methods.rollout.engines.local import LocalEngine

    asked = 0

    def is_over(_self: LocalEngine, _deadline_s: float) -> bool:
        global asked
        asked += 1
        return asked > int(os.environ.get("LATE_AFTER", "8"))

    LocalEngine._is_over = is_over  # type: ignore[method-assign]

rank, what, when, file = (os.environ.get("FAULT", "") + ":::").split(":")[:4]
own_rank = os.environ.get("RANK", "alone" if "SUREFOOT_SUPERVISED" in os.environ else None)
is_cut = what == "cut"  # both ranks are in the message that one of them leaves unfinished
if rank and (own_rank == rank or (is_cut and "RANK" in os.environ)) and not (file and Path(file).exists()):
    from surefoot.distributed import process_group
    from surefoot.models import experts
    from surefoot.training import async_checkpoint, step

    calls = 0

    def cut() -> None:
        """Die in the middle of a message that is longer than what sockets hold."""
        import torch
        import torch.distributed as dist

        message = torch.zeros(1 << 28, dtype=torch.uint8)
        dist.barrier()
        if os.environ["RANK"] == rank:
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        dist.broadcast(message, src=int(rank))

    def strike() -> None:
        if file:
            Path(file).touch()
        if is_cut:
            cut()
        if what == "raise":
            raise ValueError("broken on purpose")
        if what == "allocate":
            import torch

            torch.empty(1 << 50)
        if what == "sleep":
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, what))

    def before(module: Any, name: str) -> None:
        original = getattr(module, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            global calls
            calls += 1
            if calls == int(when.split("@")[0]):
                strike()
            return original(*args, **kwargs)

        setattr(module, name, faulty)

    places = {
        "step": (step, "_sum_of_squares"),
        "save": (async_checkpoint, "sha256_of"),
        "meet": (process_group, "rendezvous"),
        "experts": (experts, "select_gate"),
    }
    before(*places[when.split("@")[1]])
