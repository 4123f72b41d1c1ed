"""Threads: the affinity mask, every control group on the way up, and the topology, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compress.kernels.cpu.threads import available_threads

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)
EIGHT = set(range(8))


def machine(root: Path, files: dict[str, str]) -> Path:
    """`files` under `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def grouped(root: Path, mounts: str, group: str, files: dict[str, str]) -> Path:
    """A machine whose process is in control group `group`; `files` lie under /sys/fs/cgroup."""
    process = {"proc/self/mountinfo": mounts, "proc/self/cgroup": group}
    return machine(root, process | {f"sys/fs/cgroup/{name}": content for name, content in files.items()})


def topology(root: Path, siblings: dict[int, str]) -> Path:
    """Processors with their `thread_siblings_list`."""
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return machine(root, {folder.format(number): f"{told}\n" for number, told in siblings.items()})


def test_this_machine() -> None:
    assert 1 <= available_threads() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_is_kept(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert available_threads(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_without_control_groups_every_processor_counts(tmp_path: Path) -> None:
    assert available_threads(tmp_path, EIGHT) == 8


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("50000 20000", 3),
        ("", 8),
        ("nonsense 100000", 8),
        ("100000 0", 8),
    ],
)
def test_cgroup_v2_quotas_round_up(quota: str, threads: int, tmp_path: Path) -> None:
    root = grouped(tmp_path, V2, "0::/user.slice/job\n", {"user.slice/job/cpu.max": f"{quota}\n"})
    assert available_threads(root, EIGHT) == threads


@pytest.mark.parametrize("place", ["a/b/c", "a/b", "a", "."])
def test_cgroup_v2_limits_of_every_parent_count(place: str, tmp_path: Path) -> None:
    groups = {f"{name}/cpu.max": "max 100000\n" for name in ("a/b/c", "a/b", "a")}
    root = grouped(tmp_path, V2, "0::/a/b/c\n", groups | {f"{place}/cpu.max": "300000 100000\n"})
    assert available_threads(root, EIGHT) == 3


@pytest.mark.parametrize("group", ["/", "/../..", "/docker/0123"], ids=["namespace", "outside", "host's path"])
def test_a_container_sees_its_limit_at_the_mounted_folder(group: str, tmp_path: Path) -> None:
    assert available_threads(grouped(tmp_path, V2, f"0::{group}\n", {"cpu.max": "200000 100000\n"}), EIGHT) == 2


def test_a_mounted_subtree_is_named_by_its_path_outside(tmp_path: Path) -> None:
    mounts = V2.replace("0:28 / ", "0:28 /docker/0123 ")
    root = grouped(tmp_path, mounts, "0::/docker/0123/job\n", {"job/cpu.max": "200000 100000\n"})
    assert available_threads(root, EIGHT) == 2


@pytest.mark.parametrize(
    ("quota", "threads"), [("-1", 8), ("400000", 4), ("250000", 3)], ids=["none", "whole", "rounded up"]
)
def test_cgroup_v1_quotas(quota: str, threads: int, tmp_path: Path) -> None:
    files = {"cpu,cpuacct/job/cpu.cfs_quota_us": f"{quota}\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}
    group = "3:cpuset:/other\n2:cpu,cpuacct:/job/step\n1:name=systemd:/\n0::/\n"
    assert available_threads(grouped(tmp_path, V1, group, files), EIGHT) == threads


def test_other_hierarchies_do_not_count(tmp_path: Path) -> None:
    files = {"cpuset/job/cpu.cfs_quota_us": "100000\n", "cpuset/job/cpu.cfs_period_us": "100000\n"}
    assert available_threads(grouped(tmp_path, V1, "3:cpuset:/job\n", files), EIGHT) == 8


def test_the_smallest_limit_of_both_versions_counts(tmp_path: Path) -> None:
    mounts = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "500000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "unified/cpu.max": "300000 100000\n",
    }
    assert available_threads(grouped(tmp_path, mounts, "1:cpu,cpuacct:/\n0::/\n", files), EIGHT) == 3


def test_a_large_machine_counts_cores(tmp_path: Path) -> None:
    sixteen = set(range(16))
    root = topology(tmp_path, {number: f"{number % 8},{number % 8 + 8}" for number in sixteen})
    assert available_threads(root, sixteen) == 8
    # One thread of each of nine cores may be used, and then the ninth's sibling too: still nine cores.
    assert available_threads(topology(tmp_path, {8: "8,16", 16: "8,16"}), set(range(9)) | {16}) == 9


def test_a_small_machine_counts_logical_processors(tmp_path: Path) -> None:
    root = topology(tmp_path, {number: f"{number % 4},{number % 4 + 4}" for number in EIGHT})
    assert available_threads(root, EIGHT) == 8


def test_processors_of_unknown_topology_count_as_cores(tmp_path: Path) -> None:
    assert available_threads(tmp_path, set(range(12))) == 12
