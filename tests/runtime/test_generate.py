"""Generation: greedy as transformers does it, sampled by seed, in batches that do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.errors import InputError
from compress.runtime import generate as generation
from compress.runtime.generate import (
    Sampling,
    choose,
    generate,
    sample_sequences,
    start_token,
    stop_tokens,
    write_sequences,
)
from compress.runtime.load import Model, load_model
from tests.runtime.families import CASES, write_case
from tests.tiny import write_model

PROMPT = list(range(40, 52))


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Model:
    return load_model(tiny_llama)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_greedy_equals_transformers(tmp_path: Path, name: str) -> None:
    folder = write_case(tmp_path / "model", CASES[name])
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = other.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generate(load_model(folder), PROMPT, 24, Sampling())) == want[0, len(PROMPT) :].tolist()


def test_stop_tokens_end_it(model: Model) -> None:
    free = list(generate(model, PROMPT, 24, Sampling()))
    stop = free[7]
    assert list(generate(model, PROMPT, 24, Sampling(), frozenset({stop}))) == free[: free.index(stop)]


def test_seed_decides(model: Model) -> None:
    first, again, other = (list(generate(model, PROMPT, 20, Sampling(1.0, seed=seed))) for seed in (1, 1, 2))
    assert first == again and first != other and len(first) == 20


def test_no_prompt(model: Model) -> None:
    with pytest.raises(InputError, match="prompt: has no tokens"):
        next(generate(model, [], 4, Sampling()))


@pytest.mark.parametrize(("name", "value"), [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)])
def test_sampling_out_of_range(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"sampling: {name} is {value}: give") as error:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert error.value.exit_code == 2


def shares(sampling: Sampling, probabilities: list[float]) -> list[float]:
    """How often each token is drawn, from an even comb of 20 000 points."""
    points = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    logits = torch.tensor([probabilities]).log().expand(len(points), -1)
    drawn = choose(logits, sampling, points)
    return (torch.bincount(drawn, minlength=len(probabilities)) / len(points)).tolist()


def test_what_is_drawn_follows_the_probabilities() -> None:
    given = [0.1, 0.4, 0.2, 0.3]
    assert shares(Sampling(1.0), given) == pytest.approx(given, abs=1e-3)
    assert shares(Sampling(0.5), given) == pytest.approx([0.1**2 / 0.3, 0.4**2 / 0.3, 0.2**2 / 0.3, 0.3], abs=1e-3)
    assert shares(Sampling(1.0, top_k=2), given) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    assert shares(Sampling(1.0, top_k=9), given) == pytest.approx(given, abs=1e-3)
    assert shares(Sampling(1.0, top_p=0.65), given) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    assert shares(Sampling(1.0, top_p=0.75), given) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=1e-3)
    assert shares(Sampling(1.0, top_p=0.01), given) == [0, 1, 0, 0]
    assert shares(Sampling(0.0), given) == [0, 1, 0, 0]
    assert shares(Sampling(1.0, top_k=3, top_p=0.5), given) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)


def test_ends_of_the_scale() -> None:
    """A token without probability is never drawn, whatever the point."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    assert choose(logits, Sampling(1.0), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_sequences(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the start token; neither batch nor cache changes what is drawn; progress reaches its end."""
    told: list[tuple[int, int]] = []
    together = sample_sequences(model, 256, 7, 12, seed=3, progress=lambda done, total: told.append((done, total)))
    assert together.shape == (7, 12) and together.dtype == torch.int64
    assert (together[:, 0] == 256).all() and len({tuple(row) for row in together.tolist()}) == 7
    assert told[0] == (14, 84) and told[-1] == (84, 84) and told == sorted(told)
    monkeypatch.setattr(generation, "MAX_BATCH", 3)
    assert torch.equal(sample_sequences(model, 256, 7, 12, seed=3), together)
    assert not torch.equal(sample_sequences(model, 256, 7, 12, seed=4), together)
    monkeypatch.setattr(generation, "SAMPLING_CACHE_BYTES", 1)
    assert torch.equal(sample_sequences(model, 256, 7, 12, seed=3), together)


def test_sequences_compute_the_last_position_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    inner = Model.logits

    def logits(self: Model, hidden: Tensor) -> Tensor:
        shapes.append(tuple(hidden.shape))
        return inner(self, hidden)

    monkeypatch.setattr(Model, "logits", logits)
    sample_sequences(model, 256, 5, 4, seed=0)
    assert shapes == [(5, 64)] * 3


def test_sequences_follow_the_model(tmp_path: Path) -> None:
    """Frequencies of second tokens are the model's own probabilities, within four standard errors."""
    model = load_model(write_model(tmp_path / "model", vocab_size=8, eos_token_id=1, bos_token_id=0, pad_token_id=2))
    drawn = sample_sequences(model, 0, 4000, 2, seed=0)[:, 1]
    expected = model.logits(model.hidden(torch.tensor([[0]])))[0, 0].softmax(-1)
    observed = torch.bincount(drawn, minlength=8) / 4000
    assert ((observed - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-4).all()


def test_sequences_of_any_temperature(model: Model) -> None:
    """Temperature 1 is sample_sequences; 0 is what greedy generation writes behind the start token."""
    free = write_sequences(model, 256, (5, 9), Sampling(1.0, seed=3))
    assert torch.equal(free, sample_sequences(model, 256, 5, 9, seed=3))
    assert not torch.equal(free, write_sequences(model, 256, (5, 9), Sampling(2.0, seed=3)))
    greedy = write_sequences(model, 256, (2, 9), Sampling())
    assert greedy.tolist() == [[256, *generate(model, [256], 8, Sampling())]] * 2


def test_start_token(tmp_path: Path) -> None:
    for config, start in (({"bos_token_id": 0, "eos_token_id": 2}, 0), ({"eos_token_id": [3, 4]}, 3)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert start_token(tmp_path) == start
    for nothing in ({}, {"eos_token_id": []}):
        (tmp_path / "config.json").write_text(json.dumps(nothing))
        with pytest.raises(InputError, match="neither bos_token_id nor eos_token_id"):
            start_token(tmp_path)


def test_stop_tokens(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    assert stop_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert stop_tokens(tmp_path) == {3, 4}
