"""The record of what was built here is believed only in a folder that nobody else can write to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from compress.errors import InputError
from compress.kernels import trust

HASH = "0123456789abcdef" * 4
OTHER = "f" * 64


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An XDG_CACHE_HOME that does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_only_what_was_recorded_was_built_here(base: Path) -> None:
    assert not trust.built_here(HASH) and not base.exists()
    trust.record(HASH)
    trust.record(HASH)
    assert trust.built_here(HASH) and not trust.built_here(OTHER)


def test_the_folders_are_closed_to_others(base: Path) -> None:
    previous = os.umask(0)
    try:
        trust.record(HASH)
    finally:
        os.umask(previous)
    folders = [base / "lmpress", base / "lmpress" / "kernels", base / "lmpress" / "kernels" / "built"]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 3
    assert trust.cache_folder() == folders[1]


@pytest.mark.parametrize("value", ["", HASH[:-1], HASH.upper(), f"../built/{HASH}", f"{HASH}\n"])
def test_a_hash_is_64_hexadecimal_digits(value: str, base: Path) -> None:
    trust.record(HASH)
    assert not trust.built_here(value)
    with pytest.raises(ValueError, match="not a sha256"):
        trust.record(value)


@pytest.mark.parametrize("part", ["lmpress", "lmpress/kernels", "lmpress/kernels/built"])
@pytest.mark.parametrize("mode", [0o770, 0o707], ids=["group", "everyone"])
def test_folders_that_others_can_write_to_are_refused(part: str, mode: int, base: Path) -> None:
    trust.record(HASH)
    (base / part).chmod(mode)
    wanted = f"{re.escape(str(base / part))}: others can write to it .mode {mode:o}.: chmod 700 it, or set XDG_CACHE_"
    for asked in (trust.record, trust.built_here):
        with pytest.raises(InputError, match=wanted):
            asked(HASH)


def test_a_parent_that_everyone_can_write_to_is_refused_unless_sticky(base: Path) -> None:
    trust.record(HASH)
    base.chmod(0o777)
    for asked in (trust.record, trust.built_here):
        with pytest.raises(
            InputError, match=rf"{re.escape(str(base))}: everyone can write to it .mode 777.: chmod o-w"
        ):
            asked(HASH)
    base.chmod(0o1777)
    assert trust.built_here(HASH)


def test_a_folder_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.record(HASH)
    mine = os.geteuid()
    monkeypatch.setattr(trust.os, "geteuid", lambda: mine + 1)
    with pytest.raises(InputError, match=f"lmpress: belongs to user {mine}, not {mine + 1}"):
        trust.built_here(HASH)


def test_a_link_in_the_place_of_a_folder_is_refused(base: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (base / "lmpress").mkdir(parents=True, mode=0o700)
    (base / "lmpress" / "kernels").symlink_to(elsewhere)
    with pytest.raises(InputError, match="kernels: not a folder: remove it, or set XDG_CACHE_HOME"):
        trust.record(HASH)


def test_a_cache_home_that_is_a_link_is_followed(base: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    base.symlink_to(tmp_path / "disk")
    trust.record(HASH)
    assert trust.built_here(HASH) and trust.cache_folder() == tmp_path / "disk" / "lmpress" / "kernels"


def test_a_file_in_the_way_is_told(base: Path) -> None:
    base.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"lmpress: cannot be created \(.*\): make room for it, or set XDG_CACHE_HOME"):
        trust.cache_folder()


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_a_usable_setting_it_is_the_home_folder(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust.cache_folder() == tmp_path / ".cache" / "lmpress" / "kernels"
