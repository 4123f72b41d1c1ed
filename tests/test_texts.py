"""Calibration text: every kind of source, packing against a slow loop, and one line for all that can be wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from compress import texts
from compress.errors import InputError
from compress.texts import READ_AHEAD, Packed, encode_and_pack, fingerprint, read_documents
from tests.tiny import byte_tokenizer

EOS, BOS = 257, 256
MESSAGES = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
RENDERED = "<bos>user: Hi.<eos><bos>assistant: Ho.<eos>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte."""
    return byte_tokenizer()


@dataclass(frozen=True)
class Bytes:
    """A tokenizer whose ids are the text's bytes. prefix: what it puts in front of every text."""

    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    prefix: tuple[int, ...] = ()

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*self.prefix, *text.encode()] if add_special_tokens else list(text.encode())}


PLAIN = Bytes()
STARTING = Bytes(prefix=(BOS,))  # as the tokenizers of Llama and Gemma do
BARE = Bytes(None, None)


def read(source: Path | str, tokenizer: Any | None = None) -> list[str]:
    """Every document there is."""
    return list(read_documents(source, tokenizer))


def write_parquet(file: Path, columns: dict[str, list[Any]]) -> Path:
    from pyarrow import table
    from pyarrow.parquet import write_table

    write_table(table(columns), file)
    return file


def write(file: Path, content: str | bytes) -> Path:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "\ufeffOne.\n\nTwo.\r\n")
    assert read(file) == ["One.\n\nTwo.\r\n"]


def test_lines_and_rows_are_documents(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "One.\u2028 Still one."}),
        "",
        json.dumps({"text": "  "}),
        json.dumps({"text": "Two."}),
    ]
    assert read(write(tmp_path / "a.jsonl", "\n".join(lines))) == ["One.\u2028 Still one.", "Two."]
    file = write_parquet(tmp_path / "a.parquet", {"text": ["One.", "Two."], "url": ["x", "y"]})
    assert read(str(file)) == ["One.", "Two."]


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "c.txt", "Three.")
    write(tmp_path / "b" / "z.jsonl", '{"text": "Two."}')
    write(tmp_path / "a.txt", "One.")
    write(tmp_path / "notes.md", "No.")
    assert read(tmp_path) == ["One.", "Two.", "Three."]


def test_chat_goes_through_the_template(tmp_path: Path, tokenizer: Any) -> None:
    lines = [json.dumps({"messages": MESSAGES}), json.dumps({"text": "Hi."})]
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert read(file, tokenizer) == [RENDERED, "<bos>user: Hi.<eos>"]
    file = write_parquet(tmp_path / "a.parquet", {"messages": [MESSAGES]})
    assert read(file, tokenizer) == [RENDERED]
    assert read(write(tmp_path / "a.txt", "Ho."), tokenizer) == ["<bos>user: Ho.<eos>"]


class Broken(Exception):
    """Stands for what datasets raises by itself."""


def install_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset: Any, offline: bool = False) -> None:
    """Put a stand-in for package datasets, with this `load_dataset`, in its place."""
    package, exceptions = ModuleType("datasets"), ModuleType("datasets.exceptions")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    package.config = SimpleNamespace(HF_HUB_OFFLINE=offline)  # type: ignore[attr-defined]
    exceptions.DatasetsError = Broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)


@pytest.mark.parametrize("offline", [False, True])
def test_datasets_by_name(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*arguments: str, split: str, streaming: bool) -> list[dict[str, str]]:
        calls.append((*arguments, split, streaming))
        return [{"text": "One."}, {"text": "Two."}]

    install_datasets(monkeypatch, load_dataset, offline)
    for name in ("owner/set", "owner/set:test[:9]", "owner/set:small:test"):
        assert read(name) == ["One.", "Two."]
    online = not offline  # what lies in the cache is not streamed, and neither are slices
    assert calls == [
        ("owner/set", "train", online),
        ("owner/set", "test[:9]", False),
        ("owner/set", "small", "test", online),
    ]


def test_no_more_of_a_dataset_is_read_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: str, **__: Any) -> Iterator[dict[str, str]]:
        while True:
            yield {"text": "x" * 99}

    install_datasets(monkeypatch, endless)
    packed = encode_and_pack(read_documents("owner/set"), PLAIN, 2, 50, 0, "owner/set")
    assert packed.ids.shape == (2, 50)
    assert packed.notes == (f"owner/set: reading ended behind document {READ_AHEAD + 1}, which is enough",)


@pytest.mark.parametrize("error", [Broken, ConnectionError, FileNotFoundError], ids=["own", "network", "file"])
@pytest.mark.parametrize("rows", [0, 1], ids=["at once", "later"])
def test_a_dataset_that_does_not_load_is_one_line(
    rows: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: str, **__: Any) -> Iterator[dict[str, str]]:
        if not rows:
            raise error("Couldn't reach 'owner/set'\non the Hub")
        return broken_rows()

    def broken_rows() -> Iterator[dict[str, str]]:
        yield {"text": "One."}
        raise error("Couldn't reach 'owner/set'\non the Hub")

    install_datasets(monkeypatch, load_dataset)
    with pytest.raises(InputError, match="^owner/set: neither a path nor a dataset .* on the Hub: name a local text$"):
        read("owner/set")


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "One."}\n{"text": "caf\xe9"}\n')
    documents = read_documents(file)
    assert next(documents) == "One."
    with pytest.raises(InputError, match="byte 33 is not UTF-8"):
        next(documents)


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("a.txt", "", "holds no text"),
    "blank": ("a.txt", " \n\n ", "holds no text"),
    "no lines": ("a.jsonl", "", "holds no text"),
    "nul": ("a.txt", b"abc\0def", "byte 3 is NUL"),
    "not utf-8": ("a.txt", b"caf\xe9 and more", "byte 3 is not UTF-8"),
    "binary lines": ("a.jsonl", b"\xff\xfe{", "byte 0 is not UTF-8"),
    "not json": ("a.jsonl", '{"text": "One."}\n{"text": "Two.', "line 2 is not JSON"),
    "not an object": ("a.jsonl", '["One."]', "line 1: is not an object"),
    "another field": ("a.jsonl", '{"texts": "One."}', "(fields: 'texts'); did you mean 'text'?"),
    "a number": ("a.jsonl", '{"text": 3}', "line 1: has no field 'text'"),
    "messages": ("a.jsonl", json.dumps({"messages": MESSAGES}), "set chat to true"),
    "not parquet": ("a.parquet", b"PAR1 but no more", "not a readable Parquet file"),
    "another kind": ("a.pdf", "text", "none of .txt, .jsonl, .parquet"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_one_line(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(InputError) as raised:
        read(file)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)


def test_bad_places_are_one_line(tmp_path: Path) -> None:
    for source, message in {
        str(tmp_path / "no"): "no such file or folder",
        "nothing_here.txt": "no such file or folder",
        str(tmp_path): "holds no .txt, .jsonl, .parquet file",
    }.items():
        with pytest.raises(InputError, match=message):
            read(source)
    with pytest.raises(InputError, match=r"has no column 'text' or 'messages' \(columns: body\)"):
        read(write_parquet(tmp_path / "a.parquet", {"body": ["One."]}))


def test_bad_chats_are_one_line(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", '{"messages": [3]}')
    with pytest.raises(InputError, match="line 1: field 'messages' does not fit the chat template"):
        read(file, tokenizer)
    with pytest.raises(InputError, match="has no chat template: set chat to false"):
        read(file, BARE)


def slow_pack(documents: list[str], prefix: list[int], seqlen: int) -> list[list[int]]:
    stream = [
        token for number, text in enumerate(documents) for token in ([EOS] if number else []) + list(text.encode())
    ]
    windows = []
    while len(stream) >= seqlen - len(prefix):
        windows.append(prefix + stream[: seqlen - len(prefix)])
        stream = stream[seqlen - len(prefix) :]
    return windows


@pytest.mark.parametrize("tokenizer", [PLAIN, STARTING], ids=["plain", "start token"])
def test_windows_follow_one_another(tokenizer: Bytes) -> None:
    documents = ["The first one.", "A second, longer one.", "3"]
    windows = slow_pack(documents, list(tokenizer.prefix), 8)
    packed = encode_and_pack(documents, tokenizer, len(windows), 8, 0)
    assert packed.ids.dtype is torch.int64 and packed.ids.tolist() == windows
    assert packed.notes == ()
    assert encode_and_pack(documents, tokenizer, 2, 8, None).ids.tolist() == windows[:2]


def test_a_real_tokenizer(tokenizer: Any) -> None:
    packed = encode_and_pack(["One.", "Two."], tokenizer, 1, 9, None)
    assert tokenizer.decode(packed.ids[0]) == "One.<eos>Two."


def test_without_an_end_of_text_token_documents_touch() -> None:
    assert encode_and_pack(["abc", "def"], BARE, 2, 3, None).ids.tolist() == [[97, 98, 99], [100, 101, 102]]


def test_a_seed_chooses_windows_without_repeating() -> None:
    documents = ["".join(chr(33 + number % 90) for number in range(400))]
    first, again, other = (encode_and_pack(documents, PLAIN, 10, 16, seed) for seed in (0, 0, 1))
    windows = slow_pack(documents, [], 16)
    places = [windows.index(row) for row in first.ids.tolist()]
    assert places == sorted(set(places)) and places != list(range(10))
    assert torch.equal(first.ids, again.ids) and not torch.equal(first.ids, other.ids)
    assert first.notes == ()


def test_fewer_windows_than_asked_is_a_note() -> None:
    packed = encode_and_pack(["x" * 50], PLAIN, 8, 16, 0, "web.txt")
    assert packed.ids.shape == (3, 16)
    assert packed.notes == ("web.txt: 50 tokens make 3 sequences of 16, not the 8 asked for",)


def test_no_window_is_an_error() -> None:
    with pytest.raises(InputError, match=r"^web.txt: 5 tokens are less than one sequence: .*seqlen to 5 or less$"):
        encode_and_pack(["short"], PLAIN, 8, 16, 0, "web.txt")


def test_reading_stops_when_there_is_enough() -> None:
    documents = ["x" * 99] * 100  # 100 tokens each with the end of the one before
    first = encode_and_pack(documents, PLAIN, 2, 50, None, "web.txt")
    assert first.notes == ("web.txt: reading ended behind document 2, which is enough",)
    seeded = encode_and_pack(documents, PLAIN, 2, 50, 0, "web.txt")
    assert seeded.notes == (f"web.txt: reading ended behind document {READ_AHEAD + 1}, which is enough",)
    assert encode_and_pack(documents[:2], PLAIN, 2, 50, None, "web.txt").notes == ()


def test_no_more_of_a_long_document_is_encoded_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 100)
    document = "some words and\n" * 1000
    whole = encode_and_pack([document], PLAIN, 937, 16, None, "a.txt")
    assert whole.ids.flatten().tolist() == list(document.encode())[: 937 * 16] and whole.notes == ()
    packed = encode_and_pack([document], PLAIN, 9, 16, None, "a.txt")
    assert torch.equal(packed.ids, whole.ids[:9])
    assert packed.notes == ("a.txt: reading ended behind character 190 of 15,000 in document 1, which is enough",)
    assert encode_and_pack(["x" * 250], PLAIN, 1, 250, None).ids.shape == (1, 250)  # there is no space to cut at


def test_the_fingerprint_is_that_of_the_ids() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    assert fingerprint(ids) == "73e200e2b048c86d4e8c86b86bf62bbda84c7384e34e250b01aa30ab29d234a4"
    assert fingerprint(ids.int()) == fingerprint(ids) != fingerprint(ids.flip(0))
    assert Packed(ids).notes == ()
