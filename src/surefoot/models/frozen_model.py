"""Models that are run and not trained: a whole model, or a base with an adapter in PEFT's format."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.adapter_contents import AdapterParameters, read_contents
from surefoot.models.adapter_files import CONFIG, WEIGHTS, find_base, gives_scores
from surefoot.models.build import Sharding, build_model
from surefoot.models.pretrained import meta_model
from surefoot.models.resolve_model import fingerprint, folder_here, local_path, read_json_object, resolve_model
from surefoot.models.score_head import is_scorer
from surefoot.system.atomic_io import sha256_of


@dataclass(frozen=True)
class FrozenFiles:
    """The files of a model that is run and not trained."""

    base: Path
    adapter: Path | None
    """Folder of an adapter of `base`; None for a whole model."""

    @property
    def gives_scores(self) -> bool:
        """Whether it is a reward model. Raises: ModelError for files that cannot be read."""
        if self.adapter is not None:
            return gives_scores(self.adapter)
        return is_scorer(read_json_object(self.base / "config.json"))

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights, almost surely different otherwise. Raises: ModelError for a missing file."""
        adapter = sha256_of(self.adapter / WEIGHTS) if self.adapter is not None else ""
        return f"{fingerprint(self.base)} {adapter}".strip()


def find_frozen(source: str) -> FrozenFiles:
    """Return the files of a model: of a run folder, of an adapter, which names its base, of a folder or a hub.

    Fetches what is on a hub. Raises: ModelError.
    """
    folder = local_path(source)
    if (folder / "run.yaml").is_file():
        artifacts = [folder / name for name in ("adapter", "model") if (folder / name).is_dir()]
        if not artifacts:
            raise ModelError(f"{folder} is the folder of a run that has not ended: there is no model in it yet.")
        folder = artifacts[0]
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        return FrozenFiles(resolve_model(find_base(folder), str(folder / CONFIG)), folder)
    return FrozenFiles(resolve_model(str(folder) if folder.is_dir() else source, source), None)


def count_parameters(source: str) -> int | None:
    """Return the number of parameters of a model; None if it is not on this machine. Raises: ModelError."""
    if folder_here(source) is None:
        return None
    files = find_frozen(source)
    model = meta_model(files.base, has_score=files.gives_scores)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def load_frozen(
    base: Path,
    adapter: Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    for_packed_rows: bool = True,
    has_score: bool = False,
    sharding: Sharding | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode, stored in `dtype`. `has_score`: whether it is a reward model.

    Collective with `sharding`. Raises: ModelError for files that do not belong together.
    """
    parameters = read_for_base(adapter, base, has_score=has_score) if adapter is not None else None
    model = build_model(
        base,
        lora=parameters.settings if parameters is not None else None,
        device=device,
        dtype=dtype,
        for_packed_rows=for_packed_rows,
        has_score=has_score,
        is_trained=False,
        sharding=sharding,
    ).model
    if parameters is not None:
        parameters.load_into(model)
    model.eval()
    return model


def read_for_base(adapter: Path, base: Path, *, has_score: bool = False) -> AdapterParameters:
    """Read an adapter as LoRA of its base, of which no weights are read. Raises: ModelError if they do not fit."""
    whole = meta_model(base, has_score=has_score)
    return read_contents(adapter, whole).as_parameters(whole)
