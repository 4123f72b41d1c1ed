"""The chunked mean against the same mean over all logits at once: values, gradients, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.distill import Target, cross_entropy, forward_kl
from compress.distill.chunks import chunked_mean
from compress.distill.mixture import Term, token_loss
from compress.errors import InputError
from tests.distill.oracle import close

POSITIONS, WIDTH, TOKENS = 23, 5, 31
ROOT = Path(__file__).parent.parent.parent
MIXTURE = token_loss(
    [Term(forward_kl, forward_kl.Config(temperature=2.0), 0.7), Term(cross_entropy, cross_entropy.Config(), 0.3)]
)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights() -> Tensor:
    found = torch.rand(POSITIONS, generator=torch.Generator().manual_seed(5))
    found[[0, 3, 4, 5, 6, 22]] = 0
    return found


def score(logits: Tensor, index: Tensor) -> Tensor:
    """Of teacher and labels that every position has of its own."""
    teacher, labels = random(POSITIONS, TOKENS, seed=9), torch.arange(POSITIONS) % TOKENS
    return MIXTURE(logits, Target(labels[index], teacher.to(logits.dtype)[index]))


def whole(hidden: Tensor, head: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    return (score(head(hidden), torch.arange(POSITIONS)) * weights).sum() / weights.sum()


def gradients(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 18, 256])
def test_it_equals_the_mean_of_all_at_once(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """17 positions have a weight, so that chunks end in the middle, at the end, and beyond. The loss goes on from the
    mean, and the head is tied to what the hidden states are made of."""
    embedding = random(TOKENS, WIDTH, seed=1, dtype=dtype).requires_grad_()
    bias = random(TOKENS, seed=2, dtype=dtype).requires_grad_()
    held = random(WIDTH, seed=3, dtype=dtype)

    def head(x: Tensor) -> Tensor:
        return (x * held) @ embedding.T + bias

    def results(mean: Callable[[Tensor], Tensor]) -> list[Tensor]:
        hidden = torch.tanh(embedding[:POSITIONS]) * 2
        value = mean(hidden)
        loss = 3 * value**2 + embedding.square().sum() / 100
        return [value, *gradients(loss, embedding, bias, hidden)]

    found = results(lambda hidden: chunked_mean(hidden, head, [embedding, held, bias], score, weights(), rows))
    expected = results(lambda hidden: whole(hidden, head, weights().to(dtype)))
    assert found[0].dtype == dtype and found[0].shape == ()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and close(ours, theirs, tolerance)
    assert bool((found[3][weights() == 0] == 0).all()) and bool((found[3][weights() != 0] != 0).any(-1).all())


def test_gradients_by_finite_differences() -> None:
    def function(hidden: Tensor, head: Tensor) -> Tensor:
        return 2 * chunked_mean(hidden, lambda x: x @ head.T, [head], score, weights(), 4)

    inputs = random(POSITIONS, WIDTH, seed=1).requires_grad_(), random(TOKENS, WIDTH, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    (first,) = torch.autograd.grad(function(*inputs) ** 2, inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_logits_exist_for_a_chunk_and_only_where_there_is_a_weight() -> None:
    hidden, head = random(POSITIONS, WIDTH, seed=1).requires_grad_(), random(TOKENS, WIDTH, seed=2)
    hidden.data[weights() == 0] = torch.nan
    seen: list[Tensor] = []

    def watched(logits: Tensor, index: Tensor) -> Tensor:
        assert logits.shape == (len(index), TOKENS) and len(index) <= 6
        seen.append(index)
        return score(logits, index)

    chunked_mean(hidden, lambda x: x @ head.T, [], watched, weights(), 6).backward()
    assert torch.equal(torch.cat(seen), weights().nonzero().squeeze(1))
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


def test_what_is_held_gets_no_gradient() -> None:
    hidden, head = random(POSITIONS, WIDTH, seed=1), random(TOKENS, WIDTH, seed=2).requires_grad_()

    def mean(parameters: list[Tensor]) -> Tensor:
        return chunked_mean(hidden, lambda x: x @ head.T, parameters, score, weights(), 6)

    expected = gradients(whole(hidden, lambda x: x @ head.T, weights().double()), head)[0]
    assert close(gradients(mean([head]), head)[0], expected, 1e-12)
    assert close(gradients(mean([head, head]), head)[0], expected, 1e-12)  # named twice, it counts once
    assert head.grad is None  # nothing is left behind
    with torch.no_grad():
        assert not mean([head]).requires_grad
        assert close(mean([head]), whole(hidden, lambda x: x @ head.T, weights().double()), 1e-12)
    head.requires_grad_(False)
    assert not mean([head]).requires_grad
    # A parameter that the head does not use is a mistake, and none of them may lose its gradient unseen.
    with pytest.raises(RuntimeError, match="does not require grad|not have been used"):
        mean([random(3, seed=1).requires_grad_()])


@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision(parameter: torch.dtype) -> None:
    """Under autocast, or with weights in bfloat16: logits in bfloat16, the loss and its sums in float32."""
    embedding = random(TOKENS, WIDTH, seed=1, dtype=parameter).requires_grad_()

    def results(chunked: bool) -> list[Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.nn.functional.linear(embedding[:POSITIONS], torch.eye(WIDTH))
            assert hidden.dtype == torch.bfloat16
            if chunked:
                mean = chunked_mean(hidden, head, [embedding], score, weights(), 6)
            else:
                mean = whole(hidden, head, weights())
        return [mean, *gradients(mean, embedding, hidden)]

    def head(x: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, embedding)
        assert logits.dtype == torch.bfloat16
        return logits

    found, expected = results(True), results(False)
    assert found[0].dtype == torch.float32 and close(found[0], expected[0], 1e-6)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == theirs.dtype
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) < 0.01  # 8 bits of mantissa


def test_bad_input() -> None:
    hidden, head = random(POSITIONS, WIDTH, seed=1), random(TOKENS, WIDTH, seed=2)
    with pytest.raises(InputError, match="weights: no position of this batch has one: leave such sequences out"):
        chunked_mean(hidden, lambda x: x @ head.T, [], score, torch.zeros(POSITIONS))
    with pytest.raises(ValueError, match=r"17 positions got scores of shape \(17, 1\)"):
        chunked_mean(hidden, lambda x: x @ head.T, [], lambda *at: score(*at)[:, None], weights())


def test_peak_memory() -> None:
    """49,152 tokens, 512 positions: at most a quarter of the memory, and the same numbers.

    With 4 x 512 positions and the usual 256 rows it is 459 MB against 3221 MB.
    """

    def run(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.distill.peak_of_loss", *arguments]
        found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        return found

    at_once, chunked = run("512"), run("512", "32")
    assert at_once["bytes"] > 6 * 512 * 49_152 * 4  # the comparison is with what such a loss takes
    assert chunked["bytes"] <= at_once["bytes"] / 4
    assert chunked["loss"] == pytest.approx(at_once["loss"], rel=1e-5)
    assert chunked["norms"] == pytest.approx(at_once["norms"], rel=1e-5)
