"""Which kernel binaries were built here: a record of their hashes in a folder that only this user can write to.

A kernel in a checkpoint is code. It may run if its hash equals that of a binary which this machine built itself, so the
record is worth as much as the folder it lies in: `~/.cache/lmpress/kernels` (or below $XDG_CACHE_HOME) belongs to this
user and is closed to everyone else, or nothing in it is believed. One empty file per binary, named by its sha256: there
is no line to tear when two processes record at once.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from compress.errors import InputError

SHA256 = re.compile(r"[0-9a-f]{64}")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MEND = "or set XDG_CACHE_HOME to a folder of your own"


def record(sha256: str) -> None:
    """Remember that a binary with this hash was built here. InputError where the cache folder cannot be used."""
    if not SHA256.fullmatch(sha256):
        raise ValueError(f"not a sha256: {sha256!r}")
    folder = _private(cache_folder() / "built")
    try:
        os.close(os.open(folder / sha256, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InputError(f"{folder}: cannot write ({error.strerror}): free some space, {MEND}") from None


def built_here(sha256: str) -> bool:
    """Whether a binary with this hash was built here. Creates nothing; InputError where others can write the record."""
    base = _base()
    folder = base / "lmpress" / "kernels" / "built"
    if not SHA256.fullmatch(sha256) or not (folder / sha256).is_file():
        return False
    _check_ancestors(base)
    for part in (base / "lmpress", base / "lmpress" / "kernels", folder):
        _check(part)
    return True


def cache_folder() -> Path:
    """The folder for what is built here, created at need; InputError where it cannot be, or where others can write."""
    base = _base()
    _check_ancestors(base)
    return _private(_private(base / "lmpress") / "kernels")


def _base() -> Path:
    """$XDG_CACHE_HOME or ~/.cache, links resolved. The XDG specification has relative paths ignored."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(os.path.realpath(chosen if os.path.isabs(chosen) else Path.home() / ".cache"))
    except RuntimeError:
        raise InputError("this user has no home folder: set XDG_CACHE_HOME to a folder of your own") from None


def _private(folder: Path) -> Path:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created ({error.strerror}): make room for it, {MEND}") from None
    _check(folder)
    return folder


def _check(folder: Path) -> None:
    """`folder` itself, no link to another, is ours and nobody else writes to it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise InputError(f"{folder}: not a folder: remove it, {MEND}")
    if status.st_uid != os.geteuid():
        raise InputError(f"{folder}: belongs to user {status.st_uid}, not {os.geteuid()}: remove it, {MEND}")
    if status.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise InputError(f"{folder}: others can write to it (mode {mode:o}): chmod 700 it, {MEND}")


def _check_ancestors(base: Path) -> None:
    """Nobody can put another folder in our place. A sticky folder (/tmp) lets users rename only what is theirs."""
    for folder in (base, *base.parents):
        if not folder.exists():
            continue
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise InputError(f"{folder}: everyone can write to it (mode {stat.S_IMODE(mode):o}): chmod o-w it, {MEND}")
