"""Teachers: one beside the student against transformers, one off the disk against that, and their tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.calibrate import arithmetic
from compress.distill import TopK
from compress.errors import USAGE, InputError
from compress.training import teacher as module
from compress.training import topk_cache
from compress.training.network import Network, load_network
from compress.training.sequences import Sequences, bundle
from compress.training.teacher import ROWS, OfflineTeacher, OnlineTeacher, refuse_other_tokenizer, write_cache
from compress.training.topk_cache import CacheKey, open_cache
from tests.tiny import VOCABULARY, byte_tokenizer, write_model

COUNT, LENGTH = 5, 12


@pytest.fixture
def network(tiny_llama: Path) -> Network:
    return load_network(tiny_llama, torch.device("cpu"))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks multiply in float32, whatever the processor is good at."""
    monkeypatch.setattr(module, "arithmetic", lambda device: torch.float32)


def sequences(length: int = LENGTH) -> Sequences:
    ids = torch.randint(256, (COUNT, length), generator=torch.Generator().manual_seed(4))
    return bundle(ids, torch.ones(ids.shape), {})


def key_of(text: Sequences, k: int, vocabulary: int = VOCABULARY) -> CacheKey:
    return CacheKey("tiny", text.sha256, k, vocabulary)


def quiet(done: int, count: int) -> None:
    pass


def oracle(folder: Path, ids: Tensor) -> Tensor:
    """Log-probabilities [B, T, V] of the whole model, in double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(input_ids=ids).logits.log_softmax(-1)


def test_online_says_what_transformers_says(tiny_llama: Path, network: Network, exact: None) -> None:
    text = sequences()
    rows = torch.tensor([3, 0])
    teaching = OnlineTeacher(network, VOCABULARY).teach(rows, text.ids[rows], every=True)
    positions = torch.tensor([0, 5, 13, 23, 13])
    said = teaching.distribution(positions)
    assert isinstance(said, Tensor) and said.dtype == torch.float32
    wanted = oracle(tiny_llama, text.ids[rows]).flatten(0, 1)[positions]
    torch.testing.assert_close(said.log_softmax(-1).double(), wanted, rtol=0, atol=1e-4)
    assert [state.shape for state in teaching.hidden_states] == [(2, LENGTH, 64)] * 3
    assert OnlineTeacher(network, VOCABULARY).teach(rows, text.ids[rows], every=False).hidden_states == ()


def test_bfloat16_blocks_stay_close(tiny_llama: Path, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "arithmetic", lambda device: torch.bfloat16)
    ids = sequences().ids
    said = OnlineTeacher(network, VOCABULARY).teach(torch.arange(COUNT), ids, False).distribution(torch.arange(60))
    assert isinstance(said, Tensor) and said.dtype == torch.float32
    assert not torch.equal(said, said.bfloat16().float()), "the head is not rounded"
    wanted = oracle(tiny_llama, ids).flatten(0, 1)
    divergence = (wanted.exp() * (wanted - said.log_softmax(-1))).sum(1).mean()
    assert 1e-9 < float(divergence) < 1e-3


def test_it_runs_once_without_gradients_and_its_head_where_it_is_asked(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.requires_grad_(True)
    calls: list[tuple[str, int]] = []
    hidden, logits = network.hidden, network.logits

    def counted_hidden(ids: Tensor, every: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        calls.append(("hidden", len(ids)))
        return hidden(ids, every)

    def counted_logits(states: Tensor) -> Tensor:
        calls.append(("logits", len(states)))
        return logits(states)

    monkeypatch.setattr(network, "hidden", counted_hidden)
    monkeypatch.setattr(network, "logits", counted_logits)
    teaching = OnlineTeacher(network, VOCABULARY).teach(torch.arange(COUNT), sequences().ids, every=True)
    assert calls == [("hidden", COUNT)]
    for count in (2, 3):
        said = teaching.distribution(torch.arange(count))
        assert isinstance(said, Tensor) and not said.requires_grad
    assert calls[1:] == [("logits", 2), ("logits", 3)]
    assert not any(state.requires_grad for state in teaching.hidden_states)


def test_autocast_around_it_does_not_round_its_logits(network: Network, exact: None) -> None:
    teacher = OnlineTeacher(network, VOCABULARY)
    wanted = teacher.teach(torch.arange(COUNT), sequences().ids, False).distribution(torch.arange(9))
    with torch.autocast("cpu", torch.bfloat16):
        said = teacher.teach(torch.arange(COUNT), sequences().ids, False).distribution(torch.arange(9))
    assert isinstance(said, Tensor) and isinstance(wanted, Tensor) and torch.equal(said, wanted)


def test_padding_of_the_vocabulary_is_cut_before_anything_is_normalised(
    tmp_path: Path, network: Network, exact: None
) -> None:
    text = sequences()
    whole = OnlineTeacher(network, VOCABULARY).teach(torch.arange(COUNT), text.ids, False).distribution
    cut = OnlineTeacher(network, 259)
    said = cut.teach(torch.arange(COUNT), text.ids, False).distribution
    positions = torch.arange(text.ids.numel())
    assert torch.equal(torch.as_tensor(said(positions)), torch.as_tensor(whole(positions))[:, :259])
    write_cache(tmp_path / "cache", key_of(text, 259, 259), cut, text, quiet)
    offline = OfflineTeacher(open_cache(tmp_path / "cache", key_of(text, 259, 259)), torch.device("cpu"))
    head = offline.teach(torch.arange(COUNT), text.ids, False).distribution(positions)
    assert isinstance(head, TopK) and int(head.indices.max()) == 258
    torch.testing.assert_close(head.log_probs.exp().sum(1), torch.ones(len(positions)))


def test_offline_agrees_with_online_where_it_keeps_everything(tmp_path: Path, network: Network) -> None:
    text = sequences()
    online = OnlineTeacher(network, VOCABULARY)
    key = key_of(text, VOCABULARY)
    write_cache(tmp_path / "cache", key, online, text, quiet)
    offline = OfflineTeacher(open_cache(tmp_path / "cache", key), torch.device("cpu"))
    rows = torch.tensor([4, 1])
    positions = torch.tensor([0, 3, 11, 12, 23])
    exact = torch.as_tensor(online.teach(rows, text.ids[rows], False).distribution(positions)).log_softmax(-1)
    head = offline.teach(rows, text.ids[rows], False).distribution(positions)
    assert isinstance(head, TopK)
    kept = torch.empty_like(exact).scatter_(1, head.indices, head.log_probs)
    # Batches of another shape multiply in another order, and in bfloat16 that shows.
    torch.testing.assert_close(kept, exact, rtol=2e-3, atol=0.02 if is_fast() else 2e-3)
    assert float((exact.exp() * (exact - kept)).sum(1).abs().max()) < (1e-3 if is_fast() else 1e-5)


def is_fast() -> bool:
    return arithmetic(torch.device("cpu")) == torch.bfloat16


def test_offline_keeps_the_best_and_the_mass_of_the_rest(tmp_path: Path, tiny_llama: Path, exact: None) -> None:
    text = sequences()
    key = key_of(text, 7)
    online = OnlineTeacher(load_network(tiny_llama, torch.device("cpu")), VOCABULARY)
    write_cache(tmp_path / "cache", key, online, text, quiet)
    cache = open_cache(tmp_path / "cache", key)
    # Batches whose padding was cut away are read by the same rows and columns.
    ids = text.ids[torch.tensor([2, 3]), :9]
    head = (
        OfflineTeacher(cache, torch.device("cpu"))
        .teach(torch.tensor([2, 3]), ids, False)
        .distribution(torch.arange(18))
    )
    assert isinstance(head, TopK)
    wanted = oracle(tiny_llama, text.ids)[2:4, :9].flatten(0, 1).exp().sort(dim=1, descending=True)
    torch.testing.assert_close(head.log_probs.exp().double(), wanted.values[:, :7], rtol=3e-3, atol=0)
    torch.testing.assert_close(1 - head.log_probs.exp().double().sum(1), wanted.values[:, 7:].sum(1), rtol=1e-4, atol=0)
    assert torch.equal(head.indices, wanted.indices[:, :7])


def test_offline_has_no_hidden_states(tmp_path: Path, network: Network) -> None:
    text = sequences()
    write_cache(tmp_path / "cache", key_of(text, 2), OnlineTeacher(network, VOCABULARY), text, quiet)
    offline = OfflineTeacher(open_cache(tmp_path / "cache", key_of(text, 2)), torch.device("cpu"))
    with pytest.raises(InputError, match="teacher.signal: is 'offline', .* write 'online'") as found:
        offline.teach(torch.arange(COUNT), text.ids, every=True)
    assert found.value.exit_code == USAGE


def test_a_cache_is_made_of_few_logits_at_a_time_and_goes_on_where_it_stopped(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = sequences(300)
    monkeypatch.setattr(topk_cache, "PASS", 600)
    sizes: list[int] = []
    logits = network.logits

    def counted(states: Tensor) -> Tensor:
        sizes.append(len(states))
        return logits(states)

    def killed(done: int, count: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    teacher = OnlineTeacher(network, VOCABULARY)
    write_cache(tmp_path / "whole", key_of(text, 4), teacher, text, quiet)
    monkeypatch.setattr(network, "logits", counted)
    with pytest.raises(KeyboardInterrupt):
        write_cache(tmp_path / "cache", key_of(text, 4), teacher, text, killed)
    assert sum(sizes) == 600
    write_cache(tmp_path / "cache", key_of(text, 4), teacher, text, quiet)
    assert sum(sizes) == 1500 and max(sizes) == ROWS
    for name in ("cache.json", "model.safetensors"):
        assert (tmp_path / "cache" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_broken_teacher_is_named(tmp_path: Path, network: Network) -> None:
    network.head_parameters()[0].data[3] = torch.nan
    text = sequences()
    with pytest.raises(InputError, match="teacher.model: answers NaN within sequences 0 to 4: give a working teacher"):
        write_cache(tmp_path / "cache", key_of(text, 4), OnlineTeacher(network, VOCABULARY), text, quiet)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def folders(tmp_path: Path, tiny_llama: Path) -> tuple[Path, Path]:
    """Two copies of the tiny model, student and teacher."""
    return shutil.copytree(tiny_llama, tmp_path / "student"), shutil.copytree(tiny_llama, tmp_path / "teacher")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def swap(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def merged(content: dict[str, Any], *merges: str) -> None:
    """Tokens `qu` and `zq` behind the bytes, and of the merges that make them those given."""
    for token in content["added_tokens"]:
        token["id"] += 2
    content["model"]["vocab"] |= {"qu": 256, "zq": 257}
    content["model"]["merges"] = [merge.split() for merge in merges]


def added(content: dict[str, Any]) -> None:
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 259, "content": "<more>"})


def renamed(content: dict[str, Any]) -> None:
    content["added_tokens"][-1]["content"] = "<mask>"


def test_one_tokenizer_may_have_embeddings_of_two_sizes(tmp_path: Path, tiny_llama: Path) -> None:
    refuse_other_tokenizer(tiny_llama, write_model(tmp_path / "padded", vocab_size=320))


DIFFERENT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an id": (swap, r"token 'a' is id \d+ in the teacher's and id \d+ in the student's"),
    "a token more": (added, "token '<more>' is id 259 in the teacher's and missing in the student's"),
    "another special token": (renamed, "token '<mask>' is id 258 in the teacher's and missing in the student's"),
    "normalisation": (
        lambda c: c.update(normalizer={"type": "NFC"}),
        r"the teacher's reads 'caf\u00e9 .*' as \[.*\], not \[.*\], from token \d+ on",
    ),
    "case": (lambda c: c.update(normalizer={"type": "Lowercase"}), "reads 'The quick .*, from token 0 on"),
    "a leading space": (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "reads 'The quick .* token 0 on"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_tokenizers_that_differ(folders: tuple[Path, Path], what: str) -> None:
    change, message = DIFFERENT[what]
    student, teacher = folders
    edit(teacher, change)
    with pytest.raises(InputError, match=message) as found:
        refuse_other_tokenizer(student, teacher)
    assert str(found.value).startswith(f"teacher.model: {teacher} has another tokenizer than the student, {student}: ")
    assert str(found.value).endswith(": give a teacher and a student with one tokenizer")
    assert found.value.exit_code == USAGE and "\n" not in str(found.value)


def test_merges_that_no_probe_asks_for(folders: tuple[Path, Path]) -> None:
    """The vocabularies are equal, and only a text of the tokens themselves shows the merge that one of them lacks."""
    student, teacher = folders
    edit(student, lambda content: merged(content, "q u", "z q"))
    edit(teacher, lambda content: merged(content, "q u"))
    with pytest.raises(InputError, match="the teacher's reads '.*' as "):
        refuse_other_tokenizer(student, teacher)


def test_a_start_token_in_front_of_every_text(folders: tuple[Path, Path]) -> None:
    from tokenizers.processors import TemplateProcessing

    student, teacher = folders
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(InputError, match=r"reads 'The quick .*' as \[256, .*\], not \[.*\], from token 0 on"):
        refuse_other_tokenizer(student, teacher)


def test_a_folder_without_a_tokenizer(folders: tuple[Path, Path]) -> None:
    (folders[1] / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="teacher: holds no tokenizer"):
        refuse_other_tokenizer(*folders)


def test_a_cache_of_a_smaller_vocabulary_is_another_one(tmp_path: Path, network: Network) -> None:
    text = sequences()
    key = key_of(text, 3)
    write_cache(tmp_path / "cache", key, OnlineTeacher(network, VOCABULARY), text, quiet)
    with pytest.raises(InputError, match="is over a vocabulary of 288, not 259"):
        open_cache(tmp_path / "cache", replace(key, vocabulary=259))
