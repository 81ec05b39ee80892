"""How a policy gets to a vLLM server: an adapter beside a base model that is never touched, or all weights anew."""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import ModelError
from surefoot.methods.grpo.engines.server import Server, ServerFailed
from surefoot.models.adapter import read_adapter, write_adapter
from surefoot.models.build import trainable_parameters
from surefoot.models.dtensor_blocks import gather_full
from surefoot.models.lora import LoraSettings, adaptable_names

SYNC_TIMEOUT_S = 300.0
END_TIMEOUT_S = 5.0


class Sync(Protocol):
    """Gives a server the weights of a policy."""

    bytes_sent: int
    """Of the last policy: what the server was given to read."""

    def send(self, label: str) -> str:
        """Let the server have the weights as they are now, which are called so; returns the name of the model to ask
        for. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks.
        """

    def settle(self) -> None:
        """The newest policy works: what was there before it, and what it was sent with, may go. Rank 0 calls it.

        Raises: StoppedOnFinding (SF801).
        """

    def end(self) -> None:
        """The run is over: a server that goes on does not keep what is ours. Rank 0 calls it."""


class AdapterSync:
    """`Sync` of LoRA: each policy is an adapter under a name of its own, by which the server's prompt cache goes."""

    def __init__(
        self,
        server: Server,
        model: PreTrainedModel,
        settings: LoraSettings,
        folder: Path,
        ranks: World = SINGLE_PROCESS,
    ) -> None:
        """`folder`: where adapters are written, which the server can read."""
        self._server = server
        self._model = model
        self._settings = settings
        self._folder = folder
        self._ranks = ranks
        self._start = secrets.token_hex(4)
        """Part of the names of this start's adapters: a server may know others of the same versions."""
        self._loaded: dict[str, Path] = {}
        """On rank 0: adapters that the server has, oldest first."""
        self.bytes_sent = 0

    def send(self, label: str) -> str:
        """See `Sync`. Only trained parameters are gathered, one at a time."""
        target = self._folder / label
        wanted = self._write(target)
        said: list[Any] = self._ranks.broadcast_from_rank0(lambda: list(self._load(target, wanted)))
        self.bytes_sent = int(said[1])
        return str(said[0])

    def settle(self) -> None:
        """See `Sync`."""
        *before, _ = self._loaded
        for name in before:
            try:
                self._server.post("/v1/unload_lora_adapter", {"lora_name": name}, SYNC_TIMEOUT_S)
            except ServerFailed as error:
                raise self._server.stopped("SF801", f"adapter {name} stays loaded: {error}") from error
            shutil.rmtree(self._loaded.pop(name), ignore_errors=True)

    def end(self) -> None:
        """See `Sync`."""
        for name in self._loaded:
            with suppress(ServerFailed):  # the run may be over because the server is gone
                self._server.post("/v1/unload_lora_adapter", {"lora_name": name}, END_TIMEOUT_S)

    def _write(self, target: Path) -> dict[str, str]:
        """Rank 0 writes what the ranks gather, a tensor at a time; returns a digest of each. Collective."""
        parameters = trainable_parameters(self._model)
        digests: dict[str, str] = {}

        def values() -> Any:
            for name, parameter in parameters.items():
                value = gather_full(parameter)
                digests[name] = _digest(value)
                yield name, value

        gathered = values()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}

        def write() -> None:
            try:
                if self._ranks.is_first:
                    # Those of an earlier start go too.
                    shutil.rmtree(target if self._loaded else self._folder, ignore_errors=True)
                    target.mkdir(parents=True)
                    write_adapter(target, shapes, gathered, self._settings, "", adaptable_names(self._model))
            finally:
                for _ in gathered:  # the other ranks, and a first one that could not write: gathering takes all
                    pass

        self._ranks.run_or_raise_on_all(write, names_rank=False)
        return digests

    def _load(self, target: Path, wanted: Mapping[str, str]) -> tuple[str, int]:
        """See that the file holds every tensor, and let the server load it. Returns its name and size in bytes."""
        shapes = {name: parameter.shape for name, parameter in trainable_parameters(self._model).items()}
        try:
            found = {name: _digest(value) for name, value in read_adapter(target, shapes, self._settings).items()}
        except ModelError as error:
            raise self._server.stopped("SF805", f"the adapter {target.name} is not whole: {error}") from error
        wrong = sorted(name for name in wanted if found.get(name) != wanted[name])
        if wrong:
            raise self._server.stopped(
                "SF805",
                f"{len(wrong)} of {len(wanted)} tensors of the adapter {target.name} are not what was "
                f"trained, {wrong[0]} first",
                tensors=len(wanted),
                wrong=", ".join(wrong[:8]),
            )
        checksum = hashlib.sha256("".join(wanted[name] for name in sorted(wanted)).encode()).hexdigest()[:12]
        name = f"{target.name}-{checksum}-{self._start}"
        try:
            self._server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(target)}, SYNC_TIMEOUT_S)
        except ServerFailed as error:
            raise self._server.stopped("SF801", f"the adapter {target.name} could not be loaded: {error}") from error
        self._loaded[name] = target
        return name, _size(target)


class FullSync:
    """`Sync` of full fine-tuning: the model is written a layer at a time, and the server reads it in place of its own.

    It takes as long as writing and reading the model does; `folder` may lie in memory.
    """

    def __init__(
        self,
        server: Server,
        write: Callable[[Path], object],
        folder: Path,
        timeout_s: float,
        ranks: World = SINGLE_PROCESS,
    ) -> None:
        """`write`: writes the model as it is now into a new folder, a layer at a time. Collective."""
        self._server = server
        self._write = write
        self._folder = folder
        self._timeout_s = timeout_s
        self._ranks = ranks
        self.bytes_sent = 0

    def send(self, label: str) -> str:
        """See `Sync`."""
        target = self._folder / label
        self._ranks.broadcast_from_rank0(lambda: shutil.rmtree(self._folder, ignore_errors=True))
        self._write(target)
        said: list[Any] = self._ranks.broadcast_from_rank0(lambda: list(self._load(target)))
        self.bytes_sent = int(said[1])
        return str(said[0])

    def settle(self) -> None:
        """See `Sync`."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> None:
        """See `Sync`."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _load(self, target: Path) -> tuple[str, int]:
        """Returns the name that the server calls its model, and the bytes it read."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
        try:
            self._server.post("/collective_rpc", reload, self._timeout_s)
            # Each of these keeps what the old weights made of prompts and images.
            for cache in ("/reset_prefix_cache", "/reset_encoder_cache"):
                if self._server.post(cache, {}, SYNC_TIMEOUT_S).get("success") is False:
                    raise ServerFailed(f"POST {cache} was answered with success: false")
            models = self._server.get("/v1/models", SYNC_TIMEOUT_S)
            return str(models["data"][0]["id"]), _size(target)
        except (ServerFailed, LookupError, TypeError) as error:
            raise self._server.stopped(
                "SF801",
                f"the server did not take the weights {target.name}: {error}. It must run with "
                "VLLM_SERVER_DEV_MODE=1 in its environment",
            ) from error


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _digest(value: Tensor) -> str:
    """Of a value in float32, as adapters are written."""
    return hashlib.blake2b(value.detach().float().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
