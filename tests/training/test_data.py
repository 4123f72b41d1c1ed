"""Data: weights by hand, batches as a pure function, conversations, and text that the teacher writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.document import Place, validate
from compress.errors import InputError
from compress.runtime.generate import Sampling, write_sequences
from compress.runtime.load import load_model
from compress.texts import encode_and_pack, read_documents
from compress.training import data as training_data
from compress.training.conversations import assistant_spans, counted, read_conversations
from compress.training.data import repetition, rows_of, sequences_of, split
from compress.training.sequences import bundle, held_last, padded
from compress.training_settings import Data
from tests.tiny import CHAT, byte_tokenizer

CPU = torch.device("cpu")
PAD = 258
# With the mark that asks the assistant to speak, as most models have it.
ASKING = CHAT + "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
# One that drops what the assistant thought before its last turn: beginnings are not written as the whole is.
FORGETFUL = (
    "{% for m in messages %}{% if loop.last %}{{ m['content'] }}!{% else %}{{ m['content'] | length }}{% endif %}"
    "{% endfor %}"
)
TALK = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ASKING
    return tokenizer


def write_talks(file: Path, *talks: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return file


def numbered(count: int, group: int = 1) -> Any:
    """`count` rows, row i all of token i."""
    ids = torch.arange(count)[:, None].expand(-1, 3).contiguous()
    return bundle(ids, torch.ones(count, 3), {"notes": []}, group)


@pytest.mark.parametrize(("count", "batch", "group"), [(7, 3, 1), (12, 4, 2), (5, 5, 1), (3, 7, 1), (6, 4, 2)])
def test_every_epoch_takes_each_row_once(count: int, batch: int, group: int) -> None:
    stream = torch.cat([rows_of(step, batch, count, 5, group) for step in range(3 * count)]).tolist()
    epochs = [stream[at : at + count] for at in range(0, batch * 3 * count - count + 1, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch has an order of its own"
    for at in range(0, len(stream), group):
        assert stream[at] % group == 0 and stream[at : at + group] == list(range(stream[at], stream[at] + group))


def test_rows_are_a_pure_function() -> None:
    wanted = rows_of(41, 4, 100, 7)
    state = torch.get_rng_state()
    assert torch.equal(rows_of(41, 4, 100, 7), wanted) and wanted.dtype == torch.int64
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    others = [rows_of(0, 100, 100, seed).tolist() for seed in (7, 8)] + [rows_of(1, 100, 100, 7).tolist()]
    assert len({tuple(other) for other in others}) == 3
    with pytest.raises(InputError, match="training.batch: is 3, and 2 sequences belong together: give a multiple of 2"):
        rows_of(0, 3, 100, 7, 2)


def test_held_out_rows_are_spread_and_whole() -> None:
    train, held = split(held_last(numbered(12), 3), 3)
    assert held.ids[:, 0].tolist() == [2, 6, 10]
    assert sorted([*train.ids[:, 0].tolist(), *held.ids[:, 0].tolist()]) == list(range(12))
    assert train.description["sequences"] == 9 and train.sha256 == train.description["sha256"] != held.sha256
    train, held = split(held_last(numbered(12, group=2), 1), 1)
    assert held.ids[:, 0].tolist() == [6, 7] and len(train.ids) == 10
    with pytest.raises(InputError, match="data.held_out: is 3, and there are 3 sequences in all: .* to 2 or less"):
        held_last(numbered(6, group=2), 3)
    with pytest.raises(InputError, match="data.held_out: is 1, and there are 1 sequences in all: give more text$"):
        held_last(numbered(1), 1)


def test_padding_by_hand() -> None:
    ids, weights = padded([([5, 6, 7], [0.5, 0.0, 2.0]), ([8], [3.0])], PAD)
    assert ids.tolist() == [[5, 6, 7], [8, PAD, PAD]]
    assert weights.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


def test_text_is_packed_as_a_calibration_is(tiny_llama: Path, tiny_text: Path) -> None:
    data = Data(source="{text}", sequences=9, seqlen=32, held_out=2, seed=3)
    made = sequences_of(data, tiny_text, tiny_llama, CPU)
    wanted = encode_and_pack(read_documents(tiny_text), byte_tokenizer(), 9, 32, 3)
    assert made.ids[:-2].tolist() == [row for i, row in enumerate(wanted.ids.tolist()) if i not in (2, 6)]
    assert made.ids[-2:].tolist() == wanted.ids[[2, 6]].tolist()
    assert (
        (made.weights[:, :-1] == 1).all() and (made.weights[:, -1] == 0).all() and made.weights.dtype == torch.float32
    )
    digest = hashlib.sha256(made.ids.numpy().tobytes() + made.weights.numpy().tobytes()).hexdigest()
    assert made.sha256 == made.description["sha256"] == digest
    told = made.description
    assert (told["source"], told["sequences"], told["tokens"], told["weighed"]) == ("{text}", 9, 9 * 32, 9 * 31)
    assert told["notes"] == []


def test_too_little_text(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * 70)
    made = sequences_of(Data(source="x", sequences=9, seqlen=32, held_out=1), file, tiny_llama, CPU)
    assert len(made.ids) == 2
    assert made.description["notes"] == [f"{file}: 70 tokens make 2 sequences of 32, not the 9 asked for"]
    with pytest.raises(InputError, match="held_out: is 2, and there are 2 sequences in all: give more text, or set it"):
        sequences_of(Data(source="x", sequences=9, seqlen=32, held_out=2), file, tiny_llama, CPU)
    with pytest.raises(InputError, match="70 tokens are less than one sequence"):
        sequences_of(Data(source="x", sequences=9, seqlen=128), file, tiny_llama, CPU)


def test_spans_are_what_the_assistant_has_to_write(tokenizer: Any) -> None:
    conversation = assistant_spans(TALK, render_with(tokenizer, ASKING))
    assert conversation.spans is not None
    assert [conversation.text[slice(*span)] for span in conversation.spans] == ["1.<eos>", "2.<eos>"]
    conversation = assistant_spans(TALK, render_with(tokenizer, CHAT))
    assert conversation.spans is not None
    assert [conversation.text[slice(*span)] for span in conversation.spans] == [
        "<bos>assistant: 1.<eos>",
        "<bos>assistant: 2.<eos>",
    ]
    assert assistant_spans(TALK[1:2], render_with(tokenizer, CHAT)).spans == [(0, 23)], "it may speak first"
    assert assistant_spans(TALK, render_with(tokenizer, FORGETFUL)).spans is None
    assert assistant_spans(TALK[:1], render_with(tokenizer, ASKING)).spans is None


def render_with(tokenizer: Any, template: str) -> Callable[..., str]:
    def render(messages: Any, add_generation_prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    return render


def test_conversations_count_where_the_assistant_speaks(tokenizer: Any, tmp_path: Path) -> None:
    [conversation] = read_conversations(write_talks(tmp_path / "talks.jsonl", TALK), tokenizer)
    tokens, counts = counted(conversation, tokenizer)
    heard = [token for token, count in zip(tokens, counts, strict=True) if count]
    assert tokenizer.decode(heard) == "1.<eos>2.<eos>"
    assert tokenizer.decode(tokens) == conversation.text and set(counts) == {0.0, 1.0}


def test_conversations_are_packed_whole(tiny_llama: Path, tmp_path: Path) -> None:
    """The tiny model's template asks nobody, so a turn's opening counts; 3 talks fit in a row, a long one is cut."""
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    long = [{"role": "user", "content": "e" * 10}, {"role": "assistant", "content": "f" * 200}]
    mute = [{"role": "user", "content": "g" * 200}, {"role": "assistant", "content": "h"}]
    file = write_talks(tmp_path / "talks.jsonl", talk, talk, talk, talk, long, mute)
    with file.open("a") as stream:
        stream.write(json.dumps({"text": "plain"}) + "\n")
    made = sequences_of(Data(source="x", chat=True, sequences=9, seqlen=80, held_out=1), file, tiny_llama, CPU)
    once = "<bos>user: ab<eos><bos>assistant: cd<eos>"
    tokenizer = byte_tokenizer()
    turn = "<bos>assistant: cd<eos>"
    cut = f"<bos>assistant: {'f' * 50}"
    wanted = {
        once * 3: turn * 3,
        once: turn,
        f"<bos>user: {'e' * 10}<eos>{cut}": cut,
        "<bos>user: plain<eos>": "user: plain<eos>",  # all but its first token, which nothing comes before
    }
    found = {}
    for row, weights in zip(made.ids.tolist(), made.weights.tolist(), strict=True):
        heard = [token for token, weight in zip(row[1:], weights[:-1], strict=True) if weight]
        found[tokenizer.decode(row).replace("<pad>", "")] = tokenizer.decode(heard)
    assert found == wanted
    assert made.description["notes"] == [
        f"{file}: 1 of 7 conversations do not show which words are the assistant's: all of theirs count",
        f"{file}: 2 of 7 conversations are longer than 80 tokens and are cut",
        f"{file}: 1 of 7 conversations are left out: the assistant says nothing within their tokens",
        f"{file}: they make 4 sequences, not the 9 asked for",
    ]


def test_conversations_that_are_enough(tiny_llama: Path, tmp_path: Path) -> None:
    talks = [[{"role": "assistant", "content": f"{number:03}"}] for number in range(80)]
    file = write_talks(tmp_path / "talks.jsonl", *talks)
    data = Data(source="x", chat=True, sequences=2, seqlen=24, held_out=1)
    made = sequences_of(data, file, tiny_llama, CPU)
    assert len(made.ids) == 2 and made.description["notes"] == [
        f"{file}: reading ended behind conversation 33, which is enough"
    ]
    other = sequences_of(data.model_copy(update={"seed": 1}), file, tiny_llama, CPU)
    assert not torch.equal(made.ids, other.ids)


def test_bad_conversations(tiny_llama: Path, tmp_path: Path) -> None:
    data = Data(source="x", chat=True, sequences=2, seqlen=20, held_out=1)
    file = write_talks(tmp_path / "talks.jsonl", [{"role": "user", "content": "g" * 30}, TALK[1]])
    with pytest.raises(InputError, match="the assistant says nothing within 20 tokens: set data.seqlen to more"):
        sequences_of(data, file, tiny_llama, CPU)
    file = write_talks(tmp_path / "talks.jsonl", [{"rule": "user", "content": "g"}])
    with pytest.raises(InputError, match="talks.jsonl: line 1: field 'messages' does not fit the chat template"):
        sequences_of(data, file, tiny_llama, CPU)


def test_the_teacher_writes_once(tiny_llama: Path, tmp_path: Path) -> None:
    data = Data(sequences=4, seqlen=12, held_out=1, seed=2, temperature=0.8)
    told: list[tuple[int, int]] = []
    kept = tmp_path / "kept.safetensors"
    made = sequences_of(data, "self", tiny_llama, CPU, kept, lambda done, total: told.append((done, total)))
    wanted = write_sequences(load_model(tiny_llama), 256, (4, 12), Sampling(0.8, seed=2))
    assert torch.equal(made.ids[[0, 1, 3, 2]], wanted) and told[-1] == (48, 48)
    assert made.description["dropped"] == {"repetitive": 0, "identical": 0} and made.description["notes"] == []
    assert (made.description["written"], made.description["temperature"]) == (4, 0.8)
    told.clear()
    again = sequences_of(data, "self", tiny_llama, CPU, kept, lambda done, total: told.append((done, total)))
    assert not told and again.sha256 == made.sha256 and again.description == made.description
    other = sequences_of(data.model_copy(update={"seed": 3}), "self", tiny_llama, CPU, kept)
    assert other.sha256 != made.sha256, "what was kept for other settings is not taken"
    sequences_of(data, "self", tiny_llama, CPU, tmp_path / "nowhere" / "kept.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["kept.safetensors"]


def slow_repetition(tokens: list[int]) -> float:
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    runs = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    for run in runs:
        repeated += run in seen
        seen.add(run)
    return repeated / len(runs)


def test_repetition() -> None:
    generator = torch.Generator().manual_seed(0)
    for symbols in (1, 2, 5):
        ids = torch.randint(0, symbols, (40,), generator=generator)
        assert repetition(ids) == pytest.approx(slow_repetition(ids.tolist()), abs=1e-12)
    assert repetition(torch.zeros(40, dtype=torch.int64)) == pytest.approx(36 / 37)
    assert repetition(torch.arange(40)) == repetition(torch.zeros(3, dtype=torch.int64)) == 0


def test_degenerate_texts_are_dropped_and_written_anew(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops, good, other = torch.zeros(12, dtype=torch.int64), torch.arange(12), torch.arange(12).flip(0)
    writes = [torch.stack([loops, good, good, loops]), torch.stack([good, other, loops])]
    asked: list[tuple[int, Any]] = []

    def write(model: Any, start: int, shape: tuple[int, int], sampling: Sampling, progress: Any) -> torch.Tensor:
        asked.append((shape[0], sampling.seed))
        return writes[min(len(asked), len(writes)) - 1][: shape[0]]

    monkeypatch.setattr(training_data, "write_sequences", write)
    made = sequences_of(Data(sequences=4, seqlen=12, held_out=1, seed=5), "self", tiny_llama, CPU)
    assert asked == [(4, 5), (3, 6), (2, 7), (2, 8)], "only what is missing is written anew, by other seeds"
    assert sorted(made.ids[:, 0].tolist()) == [0, 11]
    assert made.description["dropped"] == {"repetitive": 3, "identical": 6} and made.description["written"] == 11
    assert made.description["notes"] == [
        "3 of 11 written sequences were dropped: repetitive",
        "6 of 11 written sequences were dropped: identical",
        "2 written sequences are left, not the 4 asked for",
    ]
    writes[:] = [loops.expand(4, -1)]
    with pytest.raises(
        InputError, match=r"all 16 sequences that the teacher wrote were dropped \(16 repeat themselves"
    ):
        sequences_of(Data(sequences=4, seqlen=12, held_out=1), "self", tiny_llama, CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"alpha": 1.5, "records": True, "source": "x"},
            "field 'data.alpha' is 1.5: it should be less than or equal to 1",
        ),
        ({"alpha": -0.1, "records": True, "source": "x"}, "field 'data.alpha' is -0.1: it should be greater than"),
        ({"alpha": 0.7, "source": "x"}, "field 'data.alpha' is 0.7: it is of records only: set records to true"),
        ({"records": True}, "'data.records' is True: what the teacher writes by itself has no records: name a file"),
        ({"chat": True}, "field 'data.chat' is True: what the teacher writes by itself has no chat: name a file"),
        ({"chat": True, "records": True, "source": "x"}, "field 'data.chat' is True: records are no conversations"),
        ({"sequences": 4, "held_out": 4}, "field 'data.held_out' is 4: none of the sequences would be left"),
        ({"sequences": 4}, "field 'data.*' is .*: none of the sequences would be left"),
        ({"temperature": 0}, "field 'data.temperature' is 0: all sequences would be the same"),
        ({"temperature": 0.5, "source": "x"}, "'data.temperature' is 0.5: it is of text that the teacher writes"),
        ({"max_repetition": 0.1, "source": "x"}, "'data.max_repetition' is 0.1: it is of text that the teacher writes"),
        (
            {"records": True, "source": "x", "rationale_prefix": "[label] "},
            "rationale_prefix' is .*: it is label_prefix",
        ),
        (
            {"records": True, "source": "x", "template": "{input}"},
            "template' is .*: it is of rationales that the teacher",
        ),
        ({"temprature": 1}, "'data.temprature' is unknown; did you mean 'temperature'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(Data, settings, Place("recipe.yaml", "data"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "'nothing' is to be filled in: write {input}"),
        ("Q: {question}\nA:", "'question' is to be filled in: write {input}"),
        ("Q: {input} {label}", "'input, label' is to be filled in"),
        ("Q: {input!r}", "'input' is to be filled in"),
        ("Q: {input:d}", "'input' is to be filled in"),
        ("Q: {input", "write braces that are text as {{ and }}"),
        ("Q: {input}}", "write braces that are text as {{ and }}"),
    ],
)
def test_templates_that_cannot_be(template: str, message: str) -> None:
    settings = {"source": "x", "records": True, "rationales": "teacher", "template": template}
    with pytest.raises(InputError, match=message):
        validate(Data, settings, Place("recipe.yaml", "data"))


def test_settings_survive_being_written_out() -> None:
    for given in (Data(), Data(source="x", records=True, rationales="teacher", template="{input}", temperature=0)):
        assert Data.model_validate(given.model_dump(mode="json")) == given
