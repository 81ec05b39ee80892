"""Weight sync to a vLLM server: a LoRA adapter beside an unchanged base model, or a reload of all weights."""

import hashlib
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import ModelError
from surefoot.methods.rollout.engines.server import Server, ServerFailed
from surefoot.models.adapter import read_adapter, write_adapter
from surefoot.models.build import trainable_parameters
from surefoot.models.dtensor_blocks import gather_full
from surefoot.models.lora import LoraSettings

SYNC_TIMEOUT_S = 300.0
END_TIMEOUT_S = 5.0


class Sync(ABC):
    """Transfer of a policy's weights to a server, in files that the server reads."""

    def __init__(self, server: Server, folder: Path, ranks: World) -> None:
        """Create the sync. `folder`: where the files are written; the server must be able to read it."""
        self._server = server
        self._folder = folder
        self._ranks = ranks
        self.bytes_sent = 0
        """Number of bytes of the last policy that the server reads."""

    def send(self, label: str) -> str:
        """Send the current weights under a label; return the name of the model to request. Collective.

        Raises: StoppedOnFinding (SF801, SF805) on all ranks.
        """
        target = self._folder / label
        self._write(target)
        loaded: list[Any] = self._ranks.broadcast_from_rank0(lambda: [self._load(target), _count_bytes(target)])
        name, self.bytes_sent = str(loaded[0]), int(loaded[1])
        return name

    @abstractmethod
    def _write(self, target: Path) -> None:
        """Write the current weights into a new folder. Collective."""

    @abstractmethod
    def _load(self, target: Path) -> str:
        """Let the server load a folder; return the name of its model. Rank 0 calls it."""

    @abstractmethod
    def remove_older(self) -> None:
        """Remove older policies, and files that the server no longer needs, once the newest works. Rank 0 calls it.

        Raises: StoppedOnFinding (SF801).
        """

    def end(self) -> None:
        """Remove the run's policies, at its end, from a server that keeps running. Rank 0 calls it."""
        self.remove_older()


class AdapterSync(Sync):
    """`Sync` of LoRA: each policy is an adapter with its own name, which also keys the server's prefix cache."""

    def __init__(
        self,
        server: Server,
        model: PreTrainedModel,
        settings: LoraSettings,
        folder: Path,
        ranks: World = SINGLE_PROCESS,
    ) -> None:
        super().__init__(server, folder, ranks)
        self._model = model
        self._settings = settings
        self._start = secrets.token_hex(4)
        """Part of the names of this start's adapters: a server may have others of the same versions."""
        self._loaded: dict[str, Path] = {}
        """Adapters that the server has loaded, oldest first; filled on rank 0."""
        self._digests: dict[str, str] = {}
        """Digest of each tensor of the adapter that was written last."""

    def remove_older(self) -> None:
        *older, _ = self._loaded
        for name in older:
            try:
                self._server.post("/v1/unload_lora_adapter", {"lora_name": name}, SYNC_TIMEOUT_S)
            except ServerFailed as error:
                raise self._server.stopped("SF801", f"adapter {name} stays loaded: {error}") from error
            shutil.rmtree(self._loaded.pop(name), ignore_errors=True)

    def end(self) -> None:
        for name in self._loaded:
            with suppress(ServerFailed):  # the run may be over because the server has ended
                self._server.post("/v1/unload_lora_adapter", {"lora_name": name}, END_TIMEOUT_S)

    def _write(self, target: Path) -> None:
        """Gather each trained parameter, one at a time, and write it on rank 0."""
        parameters = trainable_parameters(self._model)
        digests = self._digests
        digests.clear()

        def gather_tensors() -> Any:
            for name, parameter in parameters.items():
                value = gather_full(parameter)
                digests[name] = _digest(value)
                yield name, value

        tensors = gather_tensors()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}

        def write() -> None:
            try:
                if self._ranks.is_first:
                    # The first write of a start also removes the adapters of an earlier start.
                    shutil.rmtree(target if self._loaded else self._folder, ignore_errors=True)
                    target.mkdir(parents=True)
                    write_adapter(target, shapes, tensors, self._settings, "", self._model)
            finally:
                for _ in tensors:  # for other ranks, and for rank 0 if it could not write: gathering needs all ranks
                    pass

        self._ranks.run_or_raise_on_all(write, names_rank=False)

    def _load(self, target: Path) -> str:
        """Check that the file holds every tensor, and let the server load it."""
        digests = self._digests
        shapes = {name: parameter.shape for name, parameter in trainable_parameters(self._model).items()}
        try:
            tensors = read_adapter(target, shapes, self._settings, self._model)
            file_digests = {name: _digest(value) for name, value in tensors.items()}
        except ModelError as error:
            raise self._server.stopped("SF805", f"the adapter {target.name} is not whole: {error}") from error
        wrong = sorted(name for name in digests if file_digests.get(name) != digests[name])
        if wrong:
            raise self._server.stopped(
                "SF805",
                f"{len(wrong)} of {len(digests)} tensors of the adapter {target.name} differ from those that were "
                f"trained, {wrong[0]} first",
                tensors=len(digests),
                wrong=", ".join(wrong[:8]),
            )
        checksum = hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()[:12]
        name = f"{target.name}-{checksum}-{self._start}"
        request: dict[str, Any] = {"lora_name": name, "lora_path": str(target)}
        if any(len(shape) == 3 for shape in shapes.values()):
            request["is_3d_lora_weight"] = True  # the experts of a layer are in one tensor
        try:
            self._server.post("/v1/load_lora_adapter", request, SYNC_TIMEOUT_S)
        except ServerFailed as error:
            raise self._server.stopped("SF801", f"the adapter {target.name} could not be loaded: {error}") from error
        self._loaded[name] = target
        return name


class FullSync(Sync):
    """`Sync` of full fine-tuning: the model is written a layer at a time, and the server reloads its weights from it.

    It takes as long as writing and reading the model; `folder` may be a file system in memory.
    """

    def __init__(
        self,
        server: Server,
        write: Callable[[Path], object],
        folder: Path,
        timeout_s: float,
        ranks: World = SINGLE_PROCESS,
    ) -> None:
        """Create the sync. `write`: writes the current model into a new folder, a layer at a time. Collective."""
        super().__init__(server, folder, ranks)
        self._write_model = write
        self._timeout_s = timeout_s

    def remove_older(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, target: Path) -> None:
        self._ranks.broadcast_from_rank0(self.remove_older)
        self._write_model(target)

    def _load(self, target: Path) -> str:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
        try:
            self._server.post("/collective_rpc", reload, self._timeout_s)
            # Each cache holds results of the old weights for prompts and images.
            for cache in ("/reset_prefix_cache", "/reset_encoder_cache"):
                if self._server.post(cache, {}, SYNC_TIMEOUT_S).get("success") is False:
                    raise ServerFailed(f"POST {cache} was answered with success: false")
            models = self._server.get("/v1/models", SYNC_TIMEOUT_S)
            return str(models["data"][0]["id"])
        except (ServerFailed, LookupError, TypeError) as error:
            raise self._server.stopped(
                "SF801",
                f"the server did not take the weights {target.name}: {error}. It must run with "
                "VLLM_SERVER_DEV_MODE=1 in its environment",
            ) from error


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _digest(value: Tensor) -> str:
    """Return the digest of a value in float32, the type in which adapters are written."""
    return hashlib.blake2b(value.detach().float().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
