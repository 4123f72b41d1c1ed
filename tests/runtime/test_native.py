"""The native decoder against its twin in plain torch: every scheme, cache type, batch and step width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.formats.scheme import scheme_named
from compress.kernels.cpu import build
from compress.runtime.load import Execution, Model, load_model
from compress.runtime.native import NativeDecoder
from tests.runtime.exact_twin import twin_hidden
from tests.runtime.packing import write_packed
from tests.tiny import write_model

TOKENS = torch.randint(0, 256, (3, 41), generator=torch.Generator().manual_seed(0))
SCHEMES = {
    "W4A16": scheme_named("W4A16", 32),
    "W4A16 channel": scheme_named("W4A16", "channel"),
    "W4A16_ASYM": scheme_named("W4A16_ASYM", 32),
    "W8A16": scheme_named("W8A16", 64),
    "W8A8": scheme_named("W8A8"),
    "LLM_INT8": scheme_named("LLM_INT8"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("native") / "plain", "qwen2")


def logits_of(model: Model, cache: object = None) -> Tensor:
    return model.logits(model.hidden(TOKENS, cache))


def divergence(got: Tensor, want: Tensor) -> float:
    """Mean Kullback-Leibler divergence per token, nats."""
    got, want = got.double().log_softmax(-1), want.double().log_softmax(-1)
    return (want.exp() * (want - got)).sum(-1).mean().item()


@pytest.mark.parametrize("name", SCHEMES)
def test_equals_its_twin(plain: Path, tmp_path: Path, name: str) -> None:
    """A last bit may move an activation to the next integer, one part in 127, which the next layer may amplify.

    W8A8 puts each token's largest magnitude on the tie between two integers, so that there it happens often.
    """
    scheme = SCHEMES[name]
    outliers = {"outliers": 3} if scheme.name == "LLM_INT8" else {}
    folder = write_packed(plain, tmp_path / "packed", scheme, **outliers)
    model = load_model(folder)
    assert isinstance(model.network, NativeDecoder) and model.fallbacks == []
    assert len(model.kernels) == 15 and {name.partition("-")[0] for name in model.kernels.values()} == {"cpu"}
    found = divergence(logits_of(model), logits_of(load_model(folder, execution=Execution("reference-int8"))))
    assert found < (1e-3 if name == "W8A8" else 1e-5)


@pytest.mark.parametrize("variant", build.supported())
def test_variants_agree(plain: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    want = logits_of(load_model(plain))
    monkeypatch.setenv("LMPRESS_CPU_VARIANT", variant)
    model = load_model(plain)
    assert set(model.kernels.values()) == {f"cpu-{variant}"}
    assert torch.allclose(logits_of(model), want, atol=1e-5)


@pytest.mark.parametrize("variant", build.supported())
def test_every_variant_equals_plain_torch_to_the_bit(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    folder = write_packed(tiny_llama, tmp_path / "packed", scheme_named("W4A16", 32))
    monkeypatch.setenv("LMPRESS_CPU_VARIANT", variant)
    model = load_model(folder)
    for count in (1, 7, 33, 150):
        ids = torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(count))
        assert torch.equal(model.hidden(ids), twin_hidden(model, ids))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(plain: Path, threads: int) -> None:
    def logits(count: int) -> Tensor:
        """Of a prompt, and of tokens one by one behind a long one."""
        model = load_model(plain, execution=Execution(threads=count))
        cache = model.new_cache(1, 300)
        model.hidden(torch.arange(290)[None] % 256, cache)
        steps = [model.logits(model.hidden(TOKENS[:1, index : index + 1], cache)) for index in range(3)]
        return torch.cat([logits_of(model).flatten(), *(step.flatten() for step in steps)])

    assert torch.equal(logits(threads), logits(2))


@pytest.mark.parametrize(("kv_cache", "bound"), [("f32", 1e-10), ("bf16", 1e-4), ("int8", 1e-3)])
def test_cache_types(plain: Path, kv_cache: str, bound: float) -> None:
    """Step by step equals all at once to the bit, as all queries read what the cache holds; its type costs little."""
    want = logits_of(load_model(plain, execution=Execution("reference")))
    model = load_model(plain, execution=Execution(kv_cache=kv_cache))
    whole = logits_of(model)
    assert divergence(whole, want) < bound
    cache = model.new_cache(3, 41)
    chunks = [TOKENS[:, :9], TOKENS[:, 9:26], *TOKENS[:, 26:].split(1, dim=1)]
    steps = torch.cat([model.logits(model.hidden(chunk, cache)) for chunk in chunks], dim=1)
    assert torch.allclose(steps, whole, atol=1e-5)
    with pytest.raises(ValueError, match="the cache holds 41 tokens and 42 were given"):
        model.hidden(TOKENS[:, :1], cache)
    with pytest.raises(ValueError, match="made for 3 sequences and 2 were given"):
        model.hidden(TOKENS[:2, :1], model.new_cache(3, 41))


def test_a_sequence_does_not_depend_on_its_batch(plain: Path, tmp_path: Path) -> None:
    """To the bit, though three rows run on other units than one, and many are cut into blocks amid a sequence."""
    folder = write_packed(plain, tmp_path / "packed", scheme_named("W4A16", 32))
    model = load_model(folder, execution=Execution(threads=2))
    for batch, width in ((3, 1), (3, 3), (3, 41), (7, 41)):
        tokens = torch.randint(0, 256, (batch, width), generator=torch.Generator().manual_seed(batch))
        alone = torch.cat([model.hidden(row[None]) for row in tokens])
        assert torch.equal(model.hidden(tokens), alone), (batch, width)


def test_without_native_kernels(plain: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Everything runs on torch operations, and says why in one line."""
    want = logits_of(load_model(plain))
    monkeypatch.setenv("LMPRESS_CPU_VARIANT", "none")
    model = load_model(plain)
    assert [told["name"] for told in model.fallbacks] == ["native kernels"]
    assert "LMPRESS_CPU_VARIANT" in model.fallbacks[0]["reason"] and len(caplog.records) == 1
    assert torch.allclose(logits_of(model), want, atol=1e-5)
    with pytest.raises(InputError, match="kv_cache: 'int8' needs the native decoder"):
        load_model(plain, execution=Execution(kv_cache="int8"))
