"""Whatever a checkpoint holds, it is whole or it is named as damaged, and the one before is used."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import surefoot
from surefoot.errors import CheckpointError, DataError
from surefoot.system.json_files import DamagedFile
from surefoot.training.checkpoint import CHECKS, TrainState, checkpoint_folder, find_newest, load_checkpoint, verify
from surefoot.training.manifest import seal
from tests.support.checkpoints import as_format_3, read_json, reseal, save_steps, small_parameters

WEIGHTS, MOMENTS = "model/rank-00000.safetensors", "optimizer/rank-00000.safetensors"
Damage = Callable[[Path], Any]
"""Does something to a checkpoint."""
DEEP = {"a": 0}
for _ in range(300):
    DEEP = {"a": DEEP}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 1 to 3."""
    folder = tmp_path_factory.mktemp("saved")
    save_steps(folder, range(1, 4), None, lambda _: None)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def assert_passed_over(run: Path, name: str) -> None:
    """The newest checkpoint is damaged; the finding names the file."""
    newest, findings = find_newest(run)
    assert newest == checkpoint_folder(run, 2)
    (finding,) = findings
    assert finding.code == "SF601"
    assert name in finding.cause.replace(str(run), "")
    assert len(finding.cause) < 1500


def write(name: str, content: bytes) -> Damage:
    return lambda checkpoint: (checkpoint / name).write_bytes(content)


def edit(name: str, **changes: Any) -> Damage:
    """Change keys of a JSON file; `...` removes one. The manifest is made to agree."""

    def damage(checkpoint: Path) -> None:
        values = {**read_json(checkpoint / name), **changes}
        kept = {key: value for key, value in values.items() if value is not ...}
        if name == "manifest.json":
            kept = seal({key: value for key, value in kept.items() if key != "sha256"})
        (checkpoint / name).write_text(json.dumps(kept))
        if name != "manifest.json":
            reseal(checkpoint)

    return damage


def as_grpo(checkpoint: Path) -> None:
    """Make a checkpoint one of a run of GRPO."""
    config = read_json(checkpoint / "manifest.json")["config"]
    edit("manifest.json", config={**config, "method": "grpo"})(checkpoint)


def remove(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


def cut(value: Any) -> str:
    """Name a case."""
    return "left out" if value is ... else str(value)[:40]


def files(**changes: Any) -> Damage:
    """Change the names of the manifest; `...` removes one."""

    def damage(checkpoint: Path) -> None:
        names = {**read_json(checkpoint / "manifest.json")["files"], **changes}
        edit("manifest.json", files={name: digest for name, digest in names.items() if digest is not ...})(checkpoint)

    return damage


GARBAGE = {
    "nothing": b"",
    "half": b"{",
    "zeros": bytes(100),
    "bytes": b"\xff\xfe\x00\x80" * 50,
    "null": b"null",
    "list": b"[]",
    "number": b"3",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "deep but whole": json.dumps(DEEP).encode(),
    "digits": b'{"format_version": ' + b"9" * 5000 + b"}",
    "large": bytes(100 << 20),
}


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_place_of_json_is_damage(run: Path, name: str, content: bytes) -> None:
    newest = checkpoint_folder(run, 3)
    (newest / name).write_bytes(content)
    if name == "state.json":
        reseal(newest)
    assert_passed_over(run, f"step-00000003/{name}")


def test_every_flipped_bit_of_a_manifest_is_seen_or_changes_nothing(run: Path) -> None:
    newest = checkpoint_folder(run, 3)
    path = newest / "manifest.json"
    content, manifest = path.read_bytes(), read_json(path)
    seen = 0
    for index in range(len(content)):
        for bit in (0, 4, 5):
            flipped = bytearray(content)
            flipped[index] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                assert verify(newest) == manifest
            except DamagedFile:
                seen += 1
    assert seen > len(content) * 2


WRONG: dict[str, list[Any]] = {
    "format_version": ["4", "3", None, [], 4.0, True, -1, 0, 1, 2, ...],
    "step": ["3", 2, 4, -3, None, 3.0, True, 10**30, ...],
    "config": [None, [], "x", {"per_device_train_batch_size": "x"}, {"global_batch_size": [1]}, ...],
    "surefoot_version": [...],
    "files": [{}, None, [], "state.json", {"state.json": "0" * 64}, ...],
    "unknown": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values], ids=cut)
def test_a_manifest_that_says_other_things_is_damage(run: Path, key: str, value: Any) -> None:
    edit("manifest.json", **{key: value})(checkpoint_folder(run, 3))
    assert_passed_over(run, "step-00000003/manifest.json")


def test_a_manifest_with_a_key_twice_is_damage(run: Path) -> None:
    path = checkpoint_folder(run, 3) / "manifest.json"
    path.write_text('{"step": 3, ' + path.read_text()[1:])
    assert_passed_over(run, "step-00000003/manifest.json")


NAMES: dict[str, Damage] = {
    "no state": files(**{"state.json": ...}),
    "no weights": files(**{WEIGHTS: ...}),
    "no moments": files(**{MOMENTS: ...}),
    "a rank without moments": files(**{"model/rank-00001.safetensors": "0" * 64}),
    "a rank far away": files(**{"model/rank-99999.safetensors": "0" * 64}),
    "above": files(**{"../step-00000002/state.json": "0" * 64}),
    "absolute": files(**{"/etc/hostname": "0" * 64}),
    "round about": files(**{"model/../state.json": "0" * 64}),
    "nul": files(**{"model/\0": "0" * 64}),
    "no digest": files(**{"state.json": None}),
    "a short digest": files(**{"state.json": "0"}),
    "a list for a digest": files(**{"state.json": []}),
}


@pytest.mark.parametrize("damage", NAMES.values(), ids=NAMES)
def test_a_manifest_that_names_other_files_is_damage(run: Path, damage: Damage) -> None:
    damage(checkpoint_folder(run, 3))
    assert_passed_over(run, "step-00000003/manifest.json")


def link_outside(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint.parent.parent / "elsewhere")
    (checkpoint / WEIGHTS).symlink_to(checkpoint.parent.parent / "elsewhere")


def link_folder_outside(checkpoint: Path) -> None:
    (checkpoint / "model").rename(checkpoint.parent.parent / "elsewhere")
    (checkpoint / "model").symlink_to(checkpoint.parent.parent / "elsewhere")


def link_in_circles(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / WEIGHTS).symlink_to(checkpoint / WEIGHTS)


def make_pipe(name: str) -> Damage:
    def damage(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)

    return damage


def make_folder(name: str) -> Damage:
    def damage(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        (checkpoint / name).mkdir()

    return damage


def flip(name: str) -> Damage:
    def damage(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[-5] ^= 1
        (checkpoint / name).write_bytes(content)

    return damage


def copy_rank(checkpoint: Path) -> None:
    shutil.copy(checkpoint / WEIGHTS, checkpoint / "model/rank-00001.safetensors")


ON_DISK: dict[str, tuple[str, Damage]] = {
    "weights flipped": (WEIGHTS, flip(WEIGHTS)),
    "moments flipped": (MOMENTS, flip(MOMENTS)),
    "state flipped": ("state.json", flip("state.json")),
    "manifest missing": ("manifest.json", remove("manifest.json")),
    "state missing": ("state.json", remove("state.json")),
    "weights missing": (WEIGHTS, remove(WEIGHTS)),
    "another rank's weights": ("model/rank-00001.safetensors", copy_rank),
    "another file": ("model/notes.txt", write("model/notes.txt", b"mine")),
    "another folder": ("optimizer/old", lambda checkpoint: (checkpoint / "optimizer/old").mkdir()),
    "weights linked": (WEIGHTS, link_outside),
    "folder linked": (WEIGHTS, link_folder_outside),
    "a circle of links": (WEIGHTS, link_in_circles),
    "manifest is a pipe": ("manifest.json", make_pipe("manifest.json")),
    "state is a pipe": ("state.json", make_pipe("state.json")),
    "weights are a folder": (WEIGHTS, make_folder(WEIGHTS)),
    "manifest is a folder": ("manifest.json", make_folder("manifest.json")),
}


@pytest.mark.parametrize("is_format_3", [False, True], ids=["format 4", "format 3"])
@pytest.mark.parametrize("name", ON_DISK)
def test_files_that_are_not_the_named_ones_are_damage(run: Path, name: str, is_format_3: bool) -> None:
    newest = checkpoint_folder(run, 3)
    file, damage = ON_DISK[name]
    if is_format_3:
        as_format_3(newest)
    damage(newest)
    assert_passed_over(run, f"step-00000003/{file}")


def test_hidden_files_and_notes_do_no_harm(run: Path) -> None:
    newest = checkpoint_folder(run, 3)
    (newest / "model/.nfs0000000001").write_text("left by the file system")
    (newest / ".DS_Store").touch()
    (newest / "README.md").write_text("The best one so far.")
    assert find_newest(run) == (newest, [])


def test_a_checkpoint_in_the_place_of_another_is_damage(run: Path) -> None:
    shutil.rmtree(checkpoint_folder(run, 3))
    shutil.copytree(checkpoint_folder(run, 1), checkpoint_folder(run, 3))
    assert_passed_over(run, "step-00000003/manifest.json")


def test_each_field_of_a_state_is_checked() -> None:
    assert CHECKS.keys() == {field.name for field in fields(TrainState)}
    values = json.loads(json.dumps(asdict(TrainState())))
    assert all(is_right(values[name]) for name, is_right in CHECKS.items())


COMPLETION = {"ids": [1, 2], "logprobs": [-0.5, -0.1], "finish": "stop", "policy_version": 3}
AHEAD = {"ahead": {"epoch": 0, "window": 0, "used": 4}, "completions": [COMPLETION]}
IN_USE = {
    "began": 0.0,
    "epoch": 0.5,
    "next": {"epoch": 0, "window": 0, "used": 4},
    "about": {"reward": 0.5, "policy_version": 1.0},
}
TRAJECTORY = {
    "prompt": [1], "ids": [2, 3], "rollout_logprobs": [-1.0, -2.0], "advantage": 1.0, "weight": 0.5, "place": "a:1"
}  # fmt: skip
WRONG_STATE: dict[str, list[Any]] = {
    "step": ["3", -3, 2, 3.0, True, None, float("nan"), ...],
    "tokens": [-1, 1.5, None, ...],
    "trained_tokens": ["", ...],
    "loss_sum": ["1", None, float("nan"), float("inf"), 10**400, [], ...],
    "epoch": [-0.5, True, float("inf"), ...],
    "warmup_end": [None, ...],
    "position": [None, {}, [0, 0, 0], {"epoch": 0, "window": 0}, {"epoch": 0, "window": 0, "used": -1}, ...],
    "data_seen": [None, [], {"a": 1}, ...],
    "reward_files": ["x", ...],
    "base_fingerprint": [3, ...],
    "data_fingerprint": [None, ...],
    "evaluation_is_due": [0, "false", ...],
    "unknown": [1],
    "pending": [
        None, [1], [{}], [[]], ...,
        [{**AHEAD, "more": 1}],
        [{**AHEAD, "ahead": {"epoch": 0}}],
        [{**AHEAD, "completions": None}],
        [{**AHEAD, "completions": [{**COMPLETION, "ids": ["a"]}]}],
        [{**AHEAD, "completions": [{**COMPLETION, "ids": [1]}]}],
        [{**AHEAD, "completions": [{**COMPLETION, "ids": [-1, 0]}]}],
        [{**AHEAD, "completions": [{**COMPLETION, "more": 1}]}],
        [{**AHEAD, "completions": [{**COMPLETION, "policy_version": "3"}]}],
        [TRAJECTORY],
        [IN_USE, {**TRAJECTORY, "advantage": None}],
        [IN_USE, {**TRAJECTORY, "old_logprobs": [0.0]}],
        [IN_USE, {**TRAJECTORY, "images": [{"path": "x"}]}],
        [{**IN_USE, "about": {"reward": "x"}}, TRAJECTORY],
        [{**IN_USE, "next": 3}, TRAJECTORY],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_STATE.items() for value in values], ids=cut
)
def test_a_state_that_is_none_is_damage(run: Path, key: str, value: Any) -> None:
    if key == "pending":
        for step in (2, 3):
            as_grpo(checkpoint_folder(run, step))
    edit("state.json", **{key: value})(checkpoint_folder(run, 3))
    assert_passed_over(run, "step-00000003/state.json")


def test_a_state_with_completions_is_sound_for_grpo_alone(run: Path) -> None:
    newest = checkpoint_folder(run, 3)
    edit("state.json", pending=[IN_USE, TRAJECTORY, AHEAD])(newest)
    assert find_newest(run)[0] == checkpoint_folder(run, 2)
    as_grpo(newest)
    images = [{"path": "a.png", "sha256": "0", "stamp": [1, 2], "rows": 1, "columns": 1}]
    edit("state.json", pending=[IN_USE, TRAJECTORY, {**TRAJECTORY, "images": images}, AHEAD])(newest)
    assert find_newest(run) == (newest, [])


def rewrite(name: str, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> Damage:
    """Write a file of tensors anew, with a change to its tensors and to what it says of its blocks."""

    def damage(checkpoint: Path) -> None:
        path = checkpoint / name
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["blocks"])
        metadata = {"format": "pt"}
        if change(tensors, about) != "no blocks":
            metadata["blocks"] = json.dumps(about)
        save_file(tensors, path, metadata=metadata)
        reseal(checkpoint)

    return damage


def header(name: str, length: int) -> Damage:
    """Say that the header has another length."""

    def damage(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(length.to_bytes(8, "little") + content[8:])
        reseal(checkpoint)

    return damage


def as_type(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, _: tensors.update({name: value.to(dtype) for name, value in tensors.items()})


PIECES: dict[str, tuple[str, Damage]] = {
    "integers": (WEIGHTS, rewrite(WEIGHTS, as_type(torch.int64))),
    "no blocks": (WEIGHTS, rewrite(WEIGHTS, lambda *_: "no blocks")),
    "blocks of others": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(x=[[0], [1]]))),
    "a block without a place": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(bias=[]))),
    "a place in words": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(bias=[["0"], [2]]))),
    "a place below zero": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(bias=[[-1], [2]]))),
    "a place too far": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(bias=[[1], [2]]))),
    "a huge shape": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(bias=[[0], [10**30]]))),
    "other dimensions": (WEIGHTS, rewrite(WEIGHTS, lambda _, about: about.update(bias=[[0, 0], [2, 1]]))),
    "half a tensor": ("model", rewrite(WEIGHTS, lambda _, about: about.update(bias=[[0], [4]]))),
    "the other half": ("model", rewrite(WEIGHTS, lambda _, about: about.update(bias=[[2], [4]]))),
    "no tensors": ("optimizer", rewrite(WEIGHTS, lambda tensors, about: (tensors.clear(), about.clear()))),
    "a moment less": (
        "optimizer",
        rewrite(MOMENTS, lambda tensors, about: (tensors.pop("exp_avg.bias"), about.pop("exp_avg.bias"))),
    ),
    "a huge header": (WEIGHTS, header(WEIGHTS, 2**63)),
    "a header beyond the file": (WEIGHTS, header(WEIGHTS, 2**20)),
    "no header": (WEIGHTS, header(WEIGHTS, 0)),
    "garbage": (WEIGHTS, lambda checkpoint: (write(WEIGHTS, b"\xff" * 1000)(checkpoint), reseal(checkpoint))),
    "empty": (MOMENTS, lambda checkpoint: (write(MOMENTS, b"")(checkpoint), reseal(checkpoint))),
}


@pytest.mark.parametrize("name", PIECES)
def test_tensors_that_cannot_be_trained_on_are_damage(run: Path, name: str) -> None:
    file, damage = PIECES[name]
    damage(checkpoint_folder(run, 3))
    assert_passed_over(run, f"step-00000003/{file}")


def test_tensors_of_another_type_are_refused(run: Path) -> None:
    """All agree with each other, so only the run that is to go on can tell."""
    newest = checkpoint_folder(run, 3)
    for name in (WEIGHTS, MOMENTS):
        rewrite(name, as_type(torch.float16))(newest)
    verify(newest)
    parameters = small_parameters()
    with pytest.raises(CheckpointError, match="float16 .*float32"):
        load_checkpoint(newest, parameters, torch.optim.AdamW(parameters.values()))


def test_a_newer_format_is_one_only_if_its_manifest_proves_itself(run: Path) -> None:
    newest = checkpoint_folder(run, 3)
    reseal(newest, format_version=5, surefoot_version="9.9", is_new=True)
    with pytest.raises(CheckpointError, match="version 5; .* 3 and 4.* 9.9"):
        find_newest(run)
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"9.9"', '"9.8"'))
    assert_passed_over(run, "step-00000003/manifest.json")


def test_format_3_is_read(run: Path) -> None:
    newest = checkpoint_folder(run, 3)
    state = read_json(newest / "state.json")
    for name in ("base_fingerprint", "data_seen", "evaluation_is_due", "reward_files", "pending"):
        state.pop(name)
    (newest / "state.json").write_text(json.dumps(state))
    reseal(newest)
    assert_passed_over(run, "step-00000003/state.json")
    as_format_3(newest)
    assert find_newest(run) == (newest, [])
    parameters = small_parameters()
    load_checkpoint(newest, parameters, torch.optim.AdamW(parameters.values()))
    assert torch.equal(parameters["weight"].detach(), load_file(newest / WEIGHTS)["weight"])


@pytest.mark.parametrize("named", [{}, {"state.json": "0" * 64}])
def test_format_3_that_names_too_little_is_damage(run: Path, named: dict[str, str]) -> None:
    """This went on from flipped weights before."""
    newest = checkpoint_folder(run, 3)
    as_format_3(newest)
    manifest = read_json(newest / "manifest.json")
    (newest / "manifest.json").write_text(json.dumps({**manifest, "files": named}))
    flip(WEIGHTS)(newest)
    assert_passed_over(run, "step-00000003/manifest.json")


def test_a_newer_manifest_does_not_pass_for_format_3(run: Path) -> None:
    """Its own checksum would not be looked at."""
    path = checkpoint_folder(run, 3) / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 4', '"format_version": 3'))
    assert_passed_over(run, "step-00000003/manifest.json")


def test_a_run_goes_on_from_format_3(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = surefoot.train(settings, screen=False, save_steps=2).run_folder
    half = shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(checkpoint_folder(half, 4))
    as_format_3(checkpoint_folder(half, 2))
    result = surefoot.train(settings, screen=False, save_steps=2, output_dir=half)
    assert (result.status, result.steps, result.findings) == ("completed", 4, [])
    weights = [load_file(folder / "adapter/adapter_model.safetensors") for folder in (whole, half)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.long
def test_a_damaged_checkpoint_that_is_named_is_refused_by_the_command(
    settings: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    run = surefoot.train(settings, screen=False).run_folder
    newest = checkpoint_folder(run, 4)
    edit("manifest.json", format_version="4")(newest)
    (tmp_path / "run.yaml").write_text(
        json.dumps({**settings, "output_dir": str(tmp_path / "new"), "resume_from_checkpoint": str(newest)})
    )
    done = here("train", str(tmp_path / "run.yaml"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"{newest}/manifest.json" in done.stderr
    done = here("export", str(run), str(tmp_path / "adapter"), "--step", "4")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_place_beyond_the_data_is_named(settings: dict[str, Any]) -> None:
    run = surefoot.train(settings, screen=False, save_steps=2).run_folder
    newest = checkpoint_folder(run, 2)
    edit("state.json", position={"epoch": 0, "window": 9, "used": 0})(newest)
    with pytest.raises(DataError, match="window 9 of data with 1 windows"):
        surefoot.train(
            settings, screen=False, output_dir=run.with_name("new"), resume_from_checkpoint=newest, save_steps=2
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"position": {"epoch": 10**400, "window": 0, "used": 0}},
        {"pending": [{"began": 0, "epoch": 0, "next": {"epoch": 0, "window": 0, "used": 0}, "about": {}}]},
    ],
    ids=["epoch", "no policy version"],
)
def test_counters_that_no_run_reaches_are_damage(run: Path, changes: dict[str, Any]) -> None:
    for step in (2, 3):
        as_grpo(checkpoint_folder(run, step))
    edit("state.json", **changes)(checkpoint_folder(run, 3))
    assert_passed_over(run, "step-00000003/state.json")


@pytest.mark.parametrize("name", ["manifest.json", "state.json", WEIGHTS])
def test_a_file_that_may_not_be_read_is_no_damage(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything."""
    refused = checkpoint_folder(run, 3) / name
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != refused)
    with pytest.raises(CheckpointError, match=f"step-00000003/{name}: permission denied"):
        find_newest(run)
