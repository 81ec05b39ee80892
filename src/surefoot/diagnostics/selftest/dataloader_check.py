"""Data loading speed of a run when nothing else runs."""

import threading
import time

from surefoot.config import LoadedConfig
from surefoot.data.sampler import Position
from surefoot.diagnostics.preflight.check import Check, fail, not_applicable, ok
from surefoot.errors import SurefootError
from surefoot.methods.training_data import open_data
from surefoot.models.build import load_tokenizer
from surefoot.models.resolve_model import resolve_model

PREPARED_WITHIN_S = 60.0
READ_FOR_S = 2.0


def loader(loaded: LoadedConfig) -> Check:
    """Prepare the first data of a run, which stay in the cache, and time reading steps as rank 0 would."""
    name = "loader alone"
    try:
        base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
        data = open_data(loaded, base, load_tokenizer(base, loaded.run.chat_template), lambda _event: None)
    except SurefootError as error:
        return fail(name, "SF736", str(error), error=str(error))
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        data.stop()

    timer = threading.Timer(PREPARED_WITHIN_S, stop)
    timer.daemon = True
    timer.start()
    try:
        data.prepare(Position())
        step, _ = data.batches(Position())
        timer.cancel()
        began_s, tokens, steps = time.perf_counter(), 0, 0
        while (took_s := time.perf_counter() - began_s) < READ_FOR_S:
            step, batches = data.batches(step.next)
            tokens += sum(batch.ids.shape[-1] for batch in batches)
            steps += 1
    except SurefootError as error:
        if is_late.is_set():
            return not_applicable(
                name, f"the first data are not prepared within {PREPARED_WITHIN_S:g} s: `surefoot data`"
            )
        return fail(name, "SF736", str(error), error=str(error))
    finally:
        timer.cancel()
        data.stop()
    return ok(name, f"{tokens / took_s:,.0f} tokens/s, a step in {took_s / max(1, steps) * 1000:.1f} ms")
