"""Ranks of a test, as forks of one process that has imported what they need: torch alone takes a rank seconds."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from surefoot.distributed.listening import listen, serve_store
from surefoot.system.loopback import ADDRESS
from surefoot.system.process import end_with_parent, leave


def run_on_ranks(main: Callable[[], None], num_ranks: int) -> NoReturn:
    """Run `main` on each of `num_ranks` ranks and exit with status 0, or with 1 if a rank failed.

    Ranks find each other as those of torchrun do. They end with this process, whose caller sets the deadline.
    """
    listener = listen(ADDRESS, 0)
    shared = {
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(listener.getsockname()[1]),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = set()
    for rank in range(num_ranks):
        process = os.fork()
        if process == 0:
            os.environ |= {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            end_with_parent()
            _run(main)
        ranks.add(process)
    store = serve_store(listener, timedelta(minutes=1))  # after the forks: its thread would be in none of them
    while ranks:
        process, status = os.wait()
        ranks.discard(process)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    del store
    leave(0)


def _run(main: Callable[[], None]) -> NoReturn:
    try:
        main()
    except BaseException:  # noqa: BLE001 - a rank has no caller
        traceback.print_exc()
        leave(1)
    leave(0)
