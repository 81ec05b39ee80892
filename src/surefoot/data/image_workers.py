"""Worker processes that read images ahead of the step: they decode, scale and cut them while the model computes.

    python -m surefoot.data.image_workers JOBS,ANSWERS [JOBS,ANSWERS ...]

is started by `ForkedWorkers`. A worker puts the tensors of a sample's images into a file in memory, which nothing else
has a name for: it is freed with the processes that use it, however they end.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from PIL import Image as Pillow
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoConfig

from surefoot.data.images import Image, ImageSettings, image_of, open_image
from surefoot.data.model_processor import ModelProcessor, load_model_processor
from surefoot.errors import DataError
from surefoot.system.forked_workers import ForkedWorkers, fork_workers
from surefoot.system.process import describe_end

DEADLINE_S = 600.0
"""Seconds that a worker may take for the images of a sample, after which it counts as hung."""
MAX_DEFAULT_WORKERS = 4
"""Number of workers of a rank above which none is started unless the config says so."""


def count_workers(requested: int | None, device: torch.device, num_ranks: int) -> int:
    """Return the number of workers of a rank, one of `num_ranks` on its cores: see `dataloader_num_workers`."""
    if requested is not None:
        return requested
    if device.type == "cpu":  # they would take the cores that the model computes on
        return 0
    return min(max(len(os.sched_getaffinity(0)) // num_ranks - 1, 0), MAX_DEFAULT_WORKERS)


def read_pixels(
    images: Sequence[Image], processor: ModelProcessor, settings: ImageSettings, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of a sample's images, those of floating point in `dtype` unless theirs is smaller.

    Pixels that the processor does not normalise stay as they are: the model computes with them before it casts them.
    Raises: DataError for an image that cannot be read or has changed.
    """
    pictures: list[Pillow.Image] = []
    try:
        for image in images:
            pictures.append(open_image(image, settings))
        tensors, _ = processor.process(pictures, do_resize=settings.processor is not None)
    finally:
        for picture in pictures:
            picture.close()
    if not processor.normalizes:
        return tensors
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > dtype.itemsize else tensor
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True)
class ImageSource:
    """Folder, settings and type with which a worker reads images."""

    folder: str
    """Folder of the model, with its processor."""
    settings: ImageSettings
    dtype: str


class ImageWorkers:
    """A pool of workers, each of which reads the images of one sample at a time."""

    def __init__(self, source: ImageSource, count: int) -> None:
        self._processes = ForkedWorkers(__name__, asdict(source), count)
        self._idle: queue.Queue[int] = queue.Queue()
        for number in range(count):
            self._idle.put(number)
        self._threads = ThreadPoolExecutor(count, "images")  # each waits for one worker
        self._status_lock = threading.Lock()

    def submit(self, images: Sequence[Image]) -> "Future[dict[str, Tensor]]":
        """Let a worker read the images of a sample. The result may be a DataError."""
        return self._threads.submit(self._read, images)

    def end(self) -> None:
        """End the workers. What they have not read yet is not read."""
        self._processes.kill()
        self._threads.shutdown(cancel_futures=True)
        self._processes.close()

    def _read(self, images: Sequence[Image]) -> dict[str, Tensor]:
        deadline, path = time.monotonic() + DEADLINE_S, images[0].path
        number = self._idle.get_nowait()  # there are as many as threads
        pipe = self._processes.pipes[number]
        try:
            pipe.send(json.dumps([asdict(image) for image in images]).encode(), deadline)
            answer = json.loads(pipe.receive(deadline))
            if "error" in answer:
                raise DataError(answer["error"])
            tensors: dict[str, Tensor] = load_file(answer["file"])
            return tensors
        except TimeoutError as error:
            self._processes.kill()  # a worker that answers later would answer the next sample
            raise DataError(
                f"{path}: reading it took over {DEADLINE_S:.0f} s, so its process was ended. Copy the images to a "
                "local disk if their storage is slow; with dataloader_num_workers: 0 the training process reads them."
            ) from error
        except (OSError, EOFError, SafetensorError) as error:
            raise DataError(f"{path}: {self._describe_end(number)}") from error
        finally:
            self._idle.put(number)  # its next answer replaces the file

    def _describe_end(self, number: int) -> str:
        with self._status_lock:
            status = self._processes.find_exit_status(number)
        how = "has ended" if status is None else describe_end(status)
        return (
            f"the process that read it {how}. If memory is short, lower dataloader_num_workers: with 0, the training "
            "process reads the images."
        )


class _Worker:
    """A worker's answers. The file of the last one stays open until the next: the trainer has mapped it by then."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._settings, self._dtype = ImageSettings(**setup["settings"]), getattr(torch, setup["dtype"])
        config = AutoConfig.from_pretrained(setup["folder"], local_files_only=True)
        self._processor = load_model_processor(Path(setup["folder"]), config)
        self._file: IO[bytes] | None = None

    def answer(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the name of a file with the tensors of a sample's images, or an error's text."""
        if self._file is not None:
            self._file.close()
        try:
            tensors = read_pixels([image_of(image) for image in images], self._processor, self._settings, self._dtype)
            self._file = os.fdopen(os.memfd_create("images"), "wb")
            self._file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
            self._file.flush()
        except DataError as error:
            return {"error": str(error)}
        except OSError as error:
            return {
                "error": f"{images[0]['path']}: its pixels cannot be stored in memory: {error.strerror}. Lower "
                "max_pixels or dataloader_num_workers."
            }
        return {"file": f"/proc/{os.getpid()}/fd/{self._file.fileno()}"}


if __name__ == "__main__":
    fork_workers(lambda setup: _Worker(setup).answer)
