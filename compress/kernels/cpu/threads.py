"""How many threads the CPU kernels may use: what the affinity mask and the cgroup limits leave of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Above this many logical processors, one thread per physical core. The two threads of a core share its vector units and
# its queue of outstanding loads: a decode step waits for memory, which the cores of a large machine saturate without
# their second threads, and these only add waiting at the end of every layer. A few cores do not saturate it, and small
# virtual machines often tell siblings where there are none, so there every logical processor counts.
ALL_UP_TO = 8


def available_threads(root: Path = Path("/"), processors: set[int] | None = None) -> int:
    """At least 1. `root`: where /proc and /sys lie; `processors`: logical processors, by default those allowed."""
    processors = _allowed() if processors is None else processors
    count = len(processors) if len(processors) <= ALL_UP_TO else _cores(root, processors)
    limits = (quota for folder in _groups(root) for quota in _quotas(folder))
    return max(1, min([count, *(math.ceil(quota) for quota in limits)]))


def _allowed() -> set[int]:
    """Processors that this process may run on. Not every system has an affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cores(root: Path, processors: set[int]) -> int:
    """Physical cores among `processors`; one of unknown topology counts as a core."""
    folder = root / "sys" / "devices" / "system" / "cpu"
    siblings = (_text(folder / f"cpu{number}" / "topology" / "thread_siblings_list") for number in processors)
    return len({told or f"processor {number}" for number, told in zip(processors, siblings, strict=True)})


def _quotas(folder: Path) -> Iterator[float]:
    """The limit of one control group, in processors: cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`. Empty if unlimited."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
    # "max" (v2) and -1 (v1) mean no limit.
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:
        yield int(words[0]) / int(words[1])


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that limit this process, up to the root of each mounted hierarchy."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for kind, top, folder in mounts:
            if kind == ("cgroup" if controllers else "cgroup2"):
                yield from _upwards(folder, path, top)


def _upwards(folder: Path, path: str, top: str) -> Iterator[Path]:
    """From the group at `path` to `folder`, where the subtree `top` of the hierarchy is mounted.

    A container sees its own group mounted but may be told its path outside: then only the mounted folder is there.
    """
    group = PurePosixPath("/") / path
    inside = group.relative_to(top) if group.is_relative_to(top) else group.relative_to("/")
    if ".." in inside.parts:
        inside = PurePosixPath()
    yield from (folder / part for part in (inside, *inside.parents))


def _mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """(cgroup or cgroup2, the subtree mounted, where) of every hierarchy that can limit processors; see proc(5)."""
    for line in _text(root / "proc" / "self" / "mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        fields, types = place.split(), kind.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        if types[0] == "cgroup2" or (types[0] == "cgroup" and "cpu" in types[2].split(",")):
            yield types[0], fields[3], root / fields[4].lstrip("/")


def _text(path: Path) -> str:
    """A small file of the kernel's, stripped; empty where it is not to be had."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
