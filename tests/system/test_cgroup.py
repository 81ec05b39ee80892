"""Both versions of cgroups are read as they are laid out on machines and in containers."""

from pathlib import Path

import pytest

from surefoot.system import cgroup


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(cgroup, "GROUPS", tmp_path / "groups")
    return tmp_path


def write(layout: Path, groups: str, **files: str) -> None:
    (layout / "groups").write_text(groups)
    for name, text in files.items():
        path = layout / "mount" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_version_2(layout: Path) -> None:
    write(
        layout, "0::/user/job\n",
        user__job__memory_dot_events="low 0\noom 2\noom_kill 1\n", user__job__memory_dot_max="1073741824\n",
        user__job__memory_dot_current="500\n", user__job__memory_dot_stat="anon 300\ninactive_file 150\n",
        user__job__cpu_dot_stat="usage_usec 9\nnr_periods 40\nnr_throttled 10\n",
    )  # fmt: skip
    assert cgroup.oom_kills() == 1
    assert cgroup.memory_limit_bytes() == 1 << 30
    assert cgroup.memory_used_bytes() == 350
    assert cgroup.throttled_periods() == (10, 40)


def test_a_limit_of_a_group_around_it_holds(layout: Path) -> None:
    """As SLURM lays them out: the step's own group has none, the job's has."""
    write(
        layout, "0::/job/step\n",
        job__step__memory_dot_max="max\n", job__step__memory_dot_current="100\n", job__memory_dot_max="8000\n",
        job__memory_dot_current="500\n", memory_dot_stat="", job__step__cpu_dot_max="max 100000\n",
        job__cpu_dot_max="200000 100000\n", job__cpu_dot_stat="nr_periods 5\nnr_throttled 4\n",
        job__step__cpu_dot_stat="nr_periods 0\nnr_throttled 0\n",
    )  # fmt: skip
    assert cgroup.memory_limit_bytes() == 8000
    assert cgroup.memory_used_bytes() == 500
    assert cgroup.cpu_quota() == 2.0
    assert cgroup.throttled_periods() == (4, 5)
    write(layout, "0::/job/step\n", job__step__memory_dot_max="4000\n")
    assert (cgroup.memory_limit_bytes(), cgroup.memory_used_bytes()) == (4000, 100)


def test_version_1_in_a_container(layout: Path) -> None:
    """Its mount is the group itself, whatever its path outside."""
    write(
        layout, "4:memory:/outside\n1:cpu,cpuacct:/outside\n0::/\n",
        memory__memory_dot_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        **{"cpu,cpuacct__cpu_dot_stat": "nr_periods 7\nnr_throttled 0\nthrottled_time 0\n"},
    )  # fmt: skip
    assert cgroup.oom_kills() == 3
    assert cgroup.memory_limit_bytes() is None, "no limit"
    assert cgroup.throttled_periods() == (0, 7)


def test_nothing_is_claimed_where_nothing_can_be_read(layout: Path) -> None:
    assert cgroup.oom_kills() is None
    write(layout, "0::/\n", memory_dot_max="max\n", cpu_dot_stat="usage_usec 9\n")
    assert cgroup.memory_limit_bytes() is None
    assert cgroup.memory_used_bytes() is None
    assert cgroup.throttled_periods() is None
