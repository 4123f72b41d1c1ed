"""Layer-wise recovery: what it reports against full networks, its training against a loop by hand, and its promises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call

from compress.checkpoint import Writer, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.distill.block_output import Config
from compress.errors import USAGE, InputError
from compress.formats import format_named
from compress.formats.grid import Quantized, dequantize
from compress.training import blocks
from compress.training.blocks import BETAS, BlockRow, open_pair, recover_blocks
from compress.training.network import load_network
from compress.training.save import copied_files
from compress.training.student import load_student
from compress.training_settings import Training
from tests.tiny import write_model
from tests.training.compressed import SCHEMES, write_compressed

CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (10, 16), generator=torch.Generator().manual_seed(0))
# Enough of them to learn from.
MANY = torch.randint(0, 256, (40, 64), generator=torch.Generator().manual_seed(0))
SETTINGS = Config(epochs=4, batch=2, learning_rate=3e-3, held_out=0.2)
HELD = slice(8, 10)


class Watcher:
    """Keeps what it is told; stops the run after so many blocks."""

    def __init__(self, stop_after: int = -1) -> None:
        self.told: list[dict[str, Any]] = []
        self.stop_after = stop_after

    def event(self, kind: str, /, **fields: Any) -> None:
        assert kind == "recovered"
        self.told.append(fields)
        if len(self.told) == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in float32, so that other code that does so can be compared with."""
    monkeypatch.setattr(blocks, "arithmetic", lambda device: torch.float32)


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compressed models by the name of their scheme, and the float one they were made of."""
    root = tmp_path_factory.mktemp("blocks")
    made = {name: write_compressed(tiny_llama, root / str(n), SCHEMES[name]) for n, name in enumerate(SCHEMES)}
    return made | {"plain": tiny_llama}


def recovered(
    student: Path, teacher: Path, output: Path, settings: Config = SETTINGS, ids: Tensor = IDS
) -> tuple[Path, list[BlockRow]]:
    """A recovered copy of `student` in `output`, and its rows."""
    pair = open_pair(student, teacher)
    writer = Writer(output, list(pair.sections.values()), settings.model_dump_json())
    rows = recover_blocks(pair, ids, settings, writer, CPU, Watcher())
    return writer.finish(copied_files(pair.student), pair.student.nbytes), rows


def weights_of(folder: Path) -> dict[str, Quantized]:
    checkpoint = open_checkpoint(folder)
    found = {}
    for module, scheme in stored_schemes(checkpoint).items():
        prefix = f"{module}."
        parts = {n.removeprefix(prefix): checkpoint.read(n) for n in checkpoint.tensors if n.startswith(prefix)}
        found[module] = format_named(scheme.format).unpack(parts, scheme.grid)
    return found


def decibels(folder: Path, teacher: Path) -> list[float]:
    """Signal over error behind each block on the held-out sequences, from whole networks and position by position."""
    with torch.no_grad():
        _, ours = load_student(folder, Training(), CPU).network.hidden(IDS[HELD], every=True)
        _, theirs = load_network(teacher, CPU).hidden(IDS[HELD], every=True)
    found = []
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        one, other = one.flatten(0, 1), other.flatten(0, 1)
        errors = [float((a - b).square().mean()) for a, b in zip(one, other, strict=True)]
        variances = [float(b.var(correction=0)) for b in other]
        ratios = [error / variance for error, variance in zip(errors, variances, strict=True)]
        found.append(-10 * math.log10((sum(ratios) / len(ratios) + sum(errors) / sum(variances)) / 2))
    return found


@pytest.mark.parametrize("name", list(SCHEMES))
def test_what_is_stored_has_the_error_that_is_reported_and_keeps_its_form(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    output, rows = recovered(folders[name], folders["plain"], tmp_path / "out")
    after = decibels(output, folders["plain"])
    assert [row.error_db_after for row in rows] == pytest.approx(after, abs=0.02)
    assert rows[0].error_db_before == pytest.approx(decibels(folders[name], folders["plain"])[0], abs=0.02)
    assert [row.steps for row in rows] == [16, 16]
    assert all(row.error_db_after >= row.error_db_before for row in rows)
    source, result = load_file(folders[name] / "model.safetensors"), load_file(output / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in source.items()} == {n: (t.dtype, t.shape) for n, t in result.items()}
    assert all(torch.equal(source[n], result[n]) for n in source if not n.startswith("model.layers."))
    scheme = SCHEMES[name]
    before, now = weights_of(folders[name]), weights_of(output)
    for module, found in now.items():
        earlier = before[module]
        if scheme.pattern is not None:
            pruned = dequantize(earlier) == 0 if earlier.mask is None else ~earlier.mask
            assert bool((dequantize(found)[pruned] == 0).all()), module
        for part in ("mask", "zero", "outlier_columns"):
            ours, theirs = getattr(found, part), getattr(earlier, part)
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs)), (module, part)


def test_recovery_gains(folders: dict[str, Path], tmp_path: Path) -> None:
    """A floor: 1.4 and 0.6 dB where this was written, the second block's from what the first one leaves it."""
    settings = Config(epochs=6, batch=4, learning_rate=3e-3, scale_rate=0.1, held_out=0.2)
    output, rows = recovered(folders["W4A16 2:4"], folders["plain"], tmp_path / "out", settings, MANY)
    gains = [row.error_db_after - row.error_db_before for row in rows]
    assert gains[0] > 1.0 and gains[1] > 0.4, gains
    # What the whole model loses is told on sequences that no block has seen.
    before, after = (decibels(folder, folders["plain"])[-1] for folder in (folders["W4A16 2:4"], output))
    assert after > before + 1.0


def by_hand(folder: Path, teacher: Path, steps: int, settings: Config) -> dict[str, Tensor]:
    """Dequantized weights of block 0 after so many steps: AdamW and the straight-through pass written out."""
    plain, ours = load_network(teacher, CPU), load_network(folder, CPU)
    block = ours.blocks[0]
    arguments: dict[str, Any] = {}
    block.register_forward_pre_hook(lambda _, given, named: arguments.update(named, first=given), with_kwargs=True)
    packed = {n.removeprefix("model.layers.0."): q for n, q in weights_of(folder).items() if ".0." in n}
    latent = {f"{name}.weight": dequantize(one) for name, one in packed.items()}
    latent |= {n: p.detach().clone() for n, p in block.named_parameters() if n not in latent}
    far = {name: one.scale.float().abs() * 128 for name, one in packed.items()}
    signs = {name: one.scale.float().sign() / 128 for name, one in packed.items()}
    leaves = {**latent, **{f"{name}.scale": one for name, one in far.items()}}
    moments = {name: (torch.zeros_like(one), torch.zeros_like(one)) for name, one in leaves.items()}
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(4, generator=generator).tolist()

    def effective() -> dict[str, Tensor]:
        made = {}
        for name, one in leaves.items():
            module = name.removesuffix(".weight")
            if name.endswith(".scale"):
                continue
            if module not in packed:
                made[name] = one + (one.bfloat16().float() - one).detach()
                continue
            step = leaves[f"{module}.scale"] * signs[module]
            step = step + (step.bfloat16().float() - step).detach()
            ratio = one.view(*step.shape, -1) / step.unsqueeze(-1)
            reached = ratio.detach().round().clamp(-128, 127)
            followed = torch.where(reached == ratio.detach().round(), ratio, reached)
            rounded = followed + (reached - followed).detach()
            mask = packed[module].mask
            assert mask is not None
            made[name] = (rounded * step.unsqueeze(-1)).view_as(one) * mask
        return made

    for step, batch in enumerate(order[:steps]):
        ids = MANY[8 * batch : 8 * batch + 8]
        with torch.no_grad():
            target = plain.hidden(ids, every=True)[1][1]
            ours.hidden(ids)
        for one in leaves.values():
            one.requires_grad_(True).grad = None
        given = {key: value for key, value in arguments.items() if key != "first"}
        output = functional_call(block, effective(), arguments["first"], given)
        output = output[0] if isinstance(output, tuple) else output
        error, variance = (output - target).square().mean(-1), target.var(-1, correction=0)
        ((error / variance).mean() / 2 + error.mean() / variance.mean() / 2).backward()
        rate = settings.learning_rate * (1 + math.cos(math.pi * step / 4)) / 2
        with torch.no_grad():
            for name, one in leaves.items():
                first, second = moments[name]
                scale = name.endswith(".scale")
                count = step if scale else step + 1
                assert one.grad is not None
                if count == 0:  # on the grid, where a scale has no gradient but rounding
                    assert one.grad.abs().max() < 1e-5
                    continue
                first.lerp_(one.grad, 1 - BETAS[0])
                second.lerp_(one.grad.square(), 1 - BETAS[1])
                corrected = first / (1 - BETAS[0] ** count)
                size = (second / (1 - BETAS[1] ** count)).sqrt() + 1e-8
                one -= rate * (settings.scale_rate if scale else 1) * corrected / size
    return {name: value.detach() for name, value in effective().items()}


def test_training_is_adam_through_the_grid(folders: dict[str, Path], tmp_path: Path) -> None:
    """On a grid so fine that four steps move most weights."""
    settings = Config(epochs=1, batch=8, learning_rate=3e-3, held_out=0.2)
    folder = folders["W8A16 2:4"]
    output, rows = recovered(folder, folders["plain"], tmp_path / "out", settings, MANY)
    assert rows[0].kept == rows[0].steps == 4
    expected = by_hand(folder, folders["plain"], 4, settings)
    found = {n.removeprefix("model.layers.0."): dequantize(q) for n, q in weights_of(output).items() if ".0." in n}
    start = {n.removeprefix("model.layers.0."): dequantize(q) for n, q in weights_of(folder).items() if ".0." in n}
    for name, weight in found.items():
        moved = (weight - start[name]).norm()
        assert moved > 0 and (weight - expected[f"{name}.weight"]).norm() < 0.02 * moved, name
    norm = load_file(output / "model.safetensors")["model.layers.0.input_layernorm.weight"].float()
    assert F.mse_loss(norm, expected["input_layernorm.weight"]) < 1e-5 and bool((norm != 1).any())


def test_a_block_is_never_worse_than_before(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"learning_rate": 10.0, "epochs": 1})
    output, rows = recovered(folders["W4A16"], folders["plain"], tmp_path / "out", settings)
    assert [row.kept for row in rows] == [0, 0]
    assert [row.error_db_after for row in rows] == [row.error_db_before for row in rows]
    before, after = (load_file(folder / "model.safetensors") for folder in (folders["W4A16"], output))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("inputs", ["compressed", "float", "mix"])
def test_an_interrupted_run_ends_in_the_same_bytes(inputs: str, folders: dict[str, Path], tmp_path: Path) -> None:
    settings = Config(epochs=1, batch=2, learning_rate=3e-3, inputs=inputs)  # type: ignore[arg-type]
    student, teacher = folders["W4A16 2:4"], folders["plain"]
    whole, rows = recovered(student, teacher, tmp_path / "whole", settings)
    pair = open_pair(student, teacher)
    sections = list(pair.sections.values())
    with pytest.raises(KeyboardInterrupt):
        writer = Writer(tmp_path / "parts", sections, settings.model_dump_json())
        recover_blocks(pair, IDS, settings, writer, CPU, Watcher(stop_after=1))
    writer = Writer(tmp_path / "parts", sections, settings.model_dump_json())
    assert "model.layers.0" in writer.done and "model.layers.1" not in writer.done
    watcher = Watcher()
    resumed = recover_blocks(pair, IDS, settings, writer, CPU, watcher)
    assert resumed == rows
    assert [row.seconds is None for row in resumed] == [True, False]
    assert [BlockRow(**told) for told in watcher.told] == resumed
    again = recover_blocks(pair, IDS, settings, writer, CPU, Watcher())
    assert again == rows and [row.seconds for row in again] == [None, None]
    parts = writer.finish(copied_files(pair.student))
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_inputs_are_those_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    """In front of the first block all streams are alike, behind it they differ."""
    modes: tuple[Literal["compressed", "float", "mix"], ...] = ("compressed", "float", "mix")
    found = {}
    for inputs in modes:
        settings = Config(epochs=1, batch=4, learning_rate=3e-3, inputs=inputs)
        output, rows = recovered(folders["W4A16 2:4"], folders["plain"], tmp_path / inputs, settings, MANY)
        assert all(row.kept for row in rows)
        found[inputs] = load_file(output / "model.safetensors")
    for name, tensor in found["compressed"].items():
        if not name.startswith("model.layers.1."):
            assert torch.equal(tensor, found["float"][name]), name
    last = "model.layers.1.mlp.down_proj.weight_values"
    assert not torch.equal(found["compressed"][last], found["float"][last])
    assert not torch.equal(found["mix"][last], found["float"][last])
    assert not torch.equal(found["mix"][last], found["compressed"][last])


def test_spilled_hidden_states_change_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Config(epochs=1, batch=2, learning_rate=3e-3, inputs="mix")
    kept, _ = recovered(folders["W4A16"], folders["plain"], tmp_path / "kept", settings)
    monkeypatch.setattr(blocks, "ACTIVATION_BUDGET", 0)
    spilled, _ = recovered(folders["W4A16"], folders["plain"], tmp_path / "spilled", settings)
    assert (spilled / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()
    assert not list(spilled.glob("**/*.spill"))


def test_a_float_student_recovers_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """Fewer key and value heads than the teacher's: what is compared are outputs."""
    student = write_model(tmp_path / "mqa", seed=1, num_key_value_heads=1)
    output, rows = recovered(student, folders["plain"], tmp_path / "out", SETTINGS, MANY)
    assert all(row.error_db_after > row.error_db_before + 1 for row in rows), rows
    assert {tensor.dtype for tensor in load_file(output / "model.safetensors").values()} == {torch.bfloat16}


def test_blocks_that_are_not_one_to_one(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="2 blocks of width 64 and the teacher 3 blocks of width 64.*forward_kl"
    ) as told:
        open_pair(folders["W4A16"], write_model(tmp_path / "deep", num_hidden_layers=3))
    assert told.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        (IDS[:2], SETTINGS, "2 sequences in batches of 2 leave none to train on.*smaller batch"),
        (IDS[:4], SETTINGS.model_copy(update={"held_out": 0.9}), "4 sequences in batches of 2"),
        (IDS + 100, SETTINGS, r"token \d+ is beyond the 288 rows of model.embed_tokens.weight.*tokenizer"),
    ],
    ids=["one batch", "all held out", "vocabulary"],
)
def test_sequences_that_do_not_serve(
    ids: Tensor, settings: Config, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pair = open_pair(folders["W4A16"], folders["plain"])
    writer = Writer(tmp_path / "out", list(pair.sections.values()), "x")
    with pytest.raises(InputError, match=message):
        recover_blocks(pair, ids, settings, writer, CPU, Watcher())
    assert writer.done == []


def test_a_loss_that_is_not_finite(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"learning_rate": 1e38})
    pair = open_pair(write_model(tmp_path / "plain", seed=1), folders["plain"])
    writer = Writer(tmp_path / "out", list(pair.sections.values()), "x")
    with pytest.raises(
        InputError, match=r"model\.layers\.0: step \d of 16, on batch \d, has a loss of nan.*learning_rate"
    ):
        recover_blocks(pair, IDS, settings, writer, CPU, Watcher())
    assert not any(name.startswith("model.layers") for name in writer.done)
