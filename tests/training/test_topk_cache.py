"""The cache of a teacher's top k: what its bytes cost and lose, and a kill, a full disk, damage and mix-ups."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.distill import TopK
from compress.errors import InputError
from compress.training import topk_cache
from compress.training.topk_cache import CacheKey, bytes_per_token, head_of, is_cached, open_cache, pack, unpack, write

LENGTH, COUNT, VOCABULARY, K = 8, 7, 300, 5
KEY = CacheKey("teacher hash", "text hash", K, VOCABULARY)


@pytest.fixture(autouse=True)
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of LENGTH to a section, so that a cache of COUNT has four of them, the last one short."""
    monkeypatch.setattr(topk_cache, "PASS", 2 * LENGTH)


def text() -> Tensor:
    return torch.randint(VOCABULARY, (COUNT, LENGTH), generator=torch.Generator().manual_seed(1))


def answer(rows: Tensor, ids: Tensor) -> TopK:
    """A teacher whose logits at a position are drawn by sequence, position and token."""
    torch.testing.assert_close(ids, text()[rows])
    return head_of(torch.cat([logits_of(int(row)) for row in rows]), K)


def logits_of(row: int) -> Tensor:
    return 4 * torch.randn(LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(row))


def dying_at(sequence: int) -> Callable[[Tensor, Tensor], TopK]:
    """The teacher of `answer`, that is killed when it is asked for this sequence."""

    def answer_or_die(rows: Tensor, ids: Tensor) -> TopK:
        if sequence in rows.tolist():
            raise KeyboardInterrupt
        return answer(rows, ids)

    return answer_or_die


def quiet(done: int, count: int) -> None:
    pass


def written(folder: Path, key: CacheKey = KEY) -> Path:
    write(folder, key, text(), answer, quiet)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def full_disk(budget: int) -> Callable[[int, memoryview, int], int]:
    """An os.pwrite onto a disk with room for `budget` bytes."""
    real, left = os.pwrite, [budget]

    def limited(descriptor: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, data[: left[0]], offset)
        left[0] -= count
        return count

    return limited


def test_the_head_of_a_distribution() -> None:
    logits = logits_of(0)
    head = head_of(logits.bfloat16(), K)
    for row in range(LENGTH):
        probabilities = logits[row].bfloat16().double().exp() / logits[row].bfloat16().double().exp().sum()
        best = sorted(probabilities.tolist(), reverse=True)[:K]
        torch.testing.assert_close(head.log_probs[row].double().exp(), torch.tensor(best).double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(probabilities[head.indices[row]], torch.tensor(best).double())


@pytest.mark.parametrize("vocabulary", [300, 1 << 16, (1 << 16) + 1, 151_936, 1 << 18, (1 << 18) + 1, 1 << 24])
@pytest.mark.parametrize("k", [1, 4, 5, 64])
def test_ids_come_back_and_records_have_the_bytes_they_should(k: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(k)
    indices = torch.stack([torch.randperm(min(vocabulary, 1000), generator=generator)[:k] for _ in range(9)])
    indices[0, 0], indices[1] = vocabulary - 1, vocabulary - 1 - torch.arange(k)
    log_probs = torch.randn(9, k, generator=generator).log_softmax(1) - 0.1
    records = pack(TopK(log_probs, indices), vocabulary)
    assert records.dtype == "uint8" and records.shape == (9, bytes_per_token(k, vocabulary))
    back = unpack(records, k, vocabulary)
    assert torch.equal(back.indices, indices) and back.indices.dtype == torch.int64


def test_bytes_a_token() -> None:
    assert bytes_per_token(32, 49_152) == 130
    assert bytes_per_token(50, 49_152) == 202
    assert bytes_per_token(64, 49_152) == 258
    assert bytes_per_token(64, 151_936) == 274
    assert bytes_per_token(70, 262_144) == 300


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("k", [1, 16, 2000])
def test_rounding_costs_less_divergence_than_promised(k: int, spread: float) -> None:
    """Over k + 1 outcomes, the last one all other tokens, in double precision."""
    logits = spread * torch.randn(50, 2000, generator=torch.Generator().manual_seed(2))
    head = head_of(logits, k)
    stored = unpack(pack(head, 2000), k, 2000).log_probs.double()
    exact = head.log_probs.double()
    assert torch.all(stored.diff(dim=1) <= 0)
    # The mass of all others is as it was, though it is the difference of two numbers near 1.
    tail, stored_tail = (1 - one.exp().sum(1) for one in (exact, stored))
    assert float((tail - stored_tail).abs().max()) < 2e-6
    mass = exact.exp()
    divergence = (mass * (exact - stored)).sum(1)
    if k < 2000:
        others = tail.clamp(min=1e-12)
        divergence += others * (others / stored_tail.clamp(min=1e-12)).log()
    promised = (mass * exact**2).sum(1) / 2**23
    assert torch.all(divergence < promised + 2e-6)  # float32, in which the head was made
    assert spread != 4.0 or float(divergence.mean()) < 2e-6


def test_a_token_that_is_ruled_out_stays_finite() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -1e9, 1.0]])
    stored = unpack(pack(head_of(logits, 4), 4), 4, 4)
    assert torch.isfinite(stored.log_probs).all()
    torch.testing.assert_close(stored.log_probs.exp().sum(), torch.tensor(1.0))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    assert not is_cached(tmp_path / "cache", KEY)
    write(tmp_path / "cache", KEY, text(), answer, lambda done, count: said.append((done, count)))
    assert said == [(0, 7), (2, 7), (4, 7), (6, 7), (7, 7)]
    assert is_cached(tmp_path / "cache", KEY)
    cache = open_cache(tmp_path / "cache", KEY)
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.randint(COUNT, (60,), generator=generator), torch.randint(LENGTH, (60,), generator=generator)
    read = cache.read(rows, columns)
    for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        wanted = head_of(logits_of(row), K)
        assert torch.equal(read.indices[place], wanted.indices[column])
        torch.testing.assert_close(read.log_probs[place], wanted.log_probs[column], rtol=2**-10, atol=1e-4)
    header = json.loads((tmp_path / "cache" / "cache.json").read_text())
    stored = (tmp_path / "cache" / "model.safetensors").stat().st_size
    assert sorted(contents(tmp_path / "cache")) == ["cache.json", "model.safetensors"]
    assert header["bytes_per_token"] == 4 * K + 2
    assert stored - COUNT * LENGTH * header["bytes_per_token"] < 1500  # the names of four sections
    assert (header["finished"], header["sequences"], header["length"]) == (True, COUNT, LENGTH)


def test_long_texts_have_sections_of_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_cache, "SECTIONS", 2)
    sizes: list[int] = []

    def counting(rows: Tensor, ids: Tensor) -> TopK:
        sizes.append(len(rows))
        return answer(rows, ids)

    write(tmp_path / "cache", KEY, text(), counting, quiet)
    assert sizes == [2, 2, 2, 1]
    cache = open_cache(tmp_path / "cache", KEY)
    assert [len(section) for section in cache.sections] == [4, 3]
    rows, columns = torch.arange(COUNT), torch.full((COUNT,), 2)
    assert cache.read(rows, columns).indices.tolist() == [
        head_of(logits_of(row), K).indices[2].tolist() for row in range(COUNT)
    ]


def test_a_finished_cache_is_not_written_again(tmp_path: Path) -> None:
    written(tmp_path / "cache")

    def unasked(rows: Tensor, ids: Tensor) -> TopK:
        raise AssertionError("the teacher was asked again")

    write(tmp_path / "cache", KEY, text(), unasked, quiet)


@pytest.mark.parametrize("finished", range(4))
def test_an_interrupted_cache_goes_on_to_the_same_bytes(tmp_path: Path, finished: int) -> None:
    asked = list(range(finished))

    def counting(rows: Tensor, ids: Tensor) -> TopK:
        asked.append(int(rows[0]) // 2)
        return answer(rows, ids)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut", KEY, text(), dying_at(2 * finished), quiet)
    assert not (tmp_path / "cut").exists() and not is_cached(tmp_path / "cut", KEY)
    write(tmp_path / "cut", KEY, text(), counting, quiet)
    assert asked == [0, 1, 2, 3]
    assert contents(tmp_path / "cut") == contents(written(tmp_path / "whole"))


def test_a_section_damaged_while_it_waited_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cache", KEY, text(), dying_at(4), quiet)
    flip(tmp_path / "cache.partial" / "model.safetensors", -20)
    assert contents(written(tmp_path / "cache")) == contents(written(tmp_path / "whole"))
    assert "section '000001' is damaged and is written again" in caplog.text


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_damaged_byte_is_found(tmp_path: Path, part: float) -> None:
    file = written(tmp_path / "cache") / "model.safetensors"
    start = file.stat().st_size - COUNT * LENGTH * bytes_per_token(K, VOCABULARY)
    flip(file, start + round(part * (file.stat().st_size - 1 - start)))
    with pytest.raises(
        InputError, match=r"model.safetensors: is damaged, section '00000\d' has another sha256"
    ) as found:
        open_cache(tmp_path / "cache", KEY)
    assert f"delete {tmp_path / 'cache'} and run again" in str(found.value)


def test_a_shortened_shard_and_a_header_that_lies(tmp_path: Path) -> None:
    file = written(tmp_path / "cache") / "model.safetensors"
    header = json.loads((tmp_path / "cache" / "cache.json").read_text())
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(InputError, match="model.safetensors: is truncated"):
        open_cache(tmp_path / "cache", KEY)
    file.write_bytes(data)
    lies: list[tuple[dict[str, object], str]] = [
        ({"sha256": {}}, "is damaged, does not list the sections that are there"),
        ({"sha256": {**header["sha256"], "000009": "0"}}, "does not list the sections"),
        ({"length": LENGTH + 1}, "is damaged, does not fit the shapes of the sections"),
        ({"finished": False}, "the cache is not finished: delete"),
        ({"version": 2}, "the cache has version 2 of the format, not 1"),
    ]
    for change, message in lies:
        (tmp_path / "cache" / "cache.json").write_text(json.dumps(header | change))
        with pytest.raises(InputError, match=message):
            open_cache(tmp_path / "cache", KEY)
    (tmp_path / "cache" / "cache.json").write_text(json.dumps(header))
    open_cache(tmp_path / "cache", KEY)


MIXED = {
    "teacher": (replace(KEY, teacher="other"), "the cache is of another teacher: give another folder"),
    "text": (replace(KEY, text="other"), "the cache is of another text: give another folder"),
    "k": (replace(KEY, k=4), "the cache has k = 5, not 4: give another folder"),
    "vocabulary": (replace(KEY, vocabulary=299), "the cache is over a vocabulary of 300, not 299: give"),
    "two": (replace(KEY, teacher="other", k=4), "is of another teacher and has k = 5, not 4"),
}


@pytest.mark.parametrize("other", MIXED)
def test_a_cache_of_something_else_is_refused(tmp_path: Path, other: str) -> None:
    key, message = MIXED[other]
    folder = written(tmp_path / "cache")
    before = contents(folder)
    for use in (lambda: open_cache(folder, key), lambda: is_cached(folder, key), lambda: written(folder, key)):
        with pytest.raises(InputError, match=message) as found:
            use()
        assert str(folder / "cache.json") in str(found.value) and f"delete {folder} to" in str(found.value)
    assert contents(folder) == before


@pytest.mark.parametrize("other", MIXED)
def test_an_unfinished_cache_of_something_else_is_refused(tmp_path: Path, other: str) -> None:
    key, message = MIXED[other]
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cache", KEY, text(), dying_at(2), quiet)
    with pytest.raises(InputError, match=message) as found:
        written(tmp_path / "cache", key)
    assert f"delete {tmp_path / 'cache.partial'} to" in str(found.value)
    assert contents(written(tmp_path / "cache")) == contents(written(tmp_path / "whole"))


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(InputError, match="holds something else than a teacher's cache: give another folder"):
            written(place)
    with pytest.raises(InputError, match="holds no finished cache of a teacher: run the training that writes it"):
        open_cache(tmp_path / "nothing", KEY)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("k", [0, VOCABULARY + 1])
def test_k_beyond_the_vocabulary(tmp_path: Path, k: int) -> None:
    with pytest.raises(InputError, match=f"teacher.top_k: is {k}, with a vocabulary of 300: give 1 to that many"):
        written(tmp_path / "cache", replace(KEY, k=k))


def test_a_disk_that_is_full_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents(written(tmp_path / "whole"))
    failures: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    while not (tmp_path / "cache").exists():
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full_disk(250 * (len(failures) + 1)))  # a little more room each time
            try:
                written(tmp_path / "cache")
            except InputError as error:
                failures.append(str(error))
                assert not (tmp_path / "cache").exists() and len(failures) < 100
    assert all("cache.partial" in one and "the disk is full" in one and "\n" not in one for one in failures)
    record = bytes_per_token(K, VOCABULARY) * LENGTH
    needed = {f"{(COUNT - done) * record} bytes more are needed" for done in (0, 2, 4, 6)}
    assert len(failures) > 4 and any(part in one for one in failures for part in needed)
    assert contents(tmp_path / "cache") == whole
    open_cache(tmp_path / "cache", KEY)


def test_room_is_checked_before_the_teacher_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(InputError, match=r"cache.partial: needs \d+ bytes, the disk has 100 free: free some space"):
        write(tmp_path / "cache", KEY, text(), lambda rows, ids: pytest.fail("asked"), quiet)
    assert not (tmp_path / "cache").exists()
