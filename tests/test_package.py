"""The public surface, and the wheel outside the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import surefoot

ROOT = Path(__file__).parent.parent


def test_the_public_surface_is_what_is_listed() -> None:
    names = "complete describe_data doctor export import_run load plan train upcycle"
    assert surefoot.__all__ == ["__version__", *names.split()]
    assert all(getattr(surefoot, name) for name in surefoot.__all__)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, surefoot; sys.exit(any(name in sys.modules for name in ('torch', 'pydantic', 'yaml', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_train_stays_a_function_once_its_room_is_loaded() -> None:
    import surefoot.training.trainer

    assert callable(surefoot.train)


@pytest.mark.long
def test_the_wheel_builds_installs_and_trains_outside_the_repository(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    def run(*command: str, **extra: object) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, **extra)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT))
    wheel = next((tmp_path / "dist").glob("surefoot-*.whl"))
    installed = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed), str(wheel))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "max_steps": 1}))
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = run(sys.executable, "-c", "import surefoot; print(surefoot.__file__)", env=environment)
    assert where.startswith(str(installed))
    shown = run(sys.executable, "-m", "surefoot", "train", "run.yaml", env=environment)
    assert re.search(r"completed .*\b1 step\b", shown)
    assert (installed / "bin" / "surefoot").is_file()
