"""Loaded by Python at its start where this folder is on PYTHONPATH: makes one rank of a run fail, once.

FAULT is `rank:what:when:file`; the file is made when the fault strikes, so that a restarted rank is sound.
"""

import os
import signal
from pathlib import Path
from typing import Any

rank, what, when, file = (os.environ.get("FAULT", "") + ":::").split(":")[:4]
if rank and os.environ.get("RANK") == rank and not Path(file).exists():
    from surefoot.training import saver, step

    calls = 0

    def strike() -> None:
        Path(file).touch()
        if what == "raise":
            raise ValueError("broken on purpose")
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

    before(*{"step": (step, "_sum_of_squares"), "save": (saver, "sha256_of")}[when.split("@")[1]])
