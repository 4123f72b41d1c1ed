"""Trained checkpoints and states: on the grid, in the mask, whole or not there at all, and the same after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW

from compress.checkpoint import TensorInfo, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.errors import InputError
from compress.formats import format_named
from compress.runtime.load import Execution, load_model
from compress.training import save
from compress.training.save import copied_files, load_state, save_state, sections_of, write_trained
from compress.training.student import Student, load_student
from compress.training_settings import Training
from tests.training.compressed import SCHEMES, write_compressed

CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
WEIGHT_ONLY = [name for name, scheme in SCHEMES.items() if scheme.activation_bits is None]


def step(student: Student, optimizer: AdamW, seed: int) -> float:
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(seed))
    hidden, _ = student.network.hidden(ids)
    loss = torch.nn.functional.cross_entropy(student.network.logits(hidden[:, :-1].flatten(0, 1)), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def started(folder: Path) -> tuple[Student, AdamW]:
    student = load_student(folder, Training(), CPU)
    return student, AdamW(student.parameters_by_name().values(), lr=2e-3, weight_decay=0.01)


def closing(student: Student) -> Any:
    def files(tensors: Mapping[str, TensorInfo], sha256: Mapping[str, str]) -> save.Files:
        assert tensors.keys() == sha256.keys() == student.source.tensors.keys()
        return copied_files(student.source)

    return files


def logits_of(student: Student) -> Tensor:
    with torch.no_grad():
        hidden, _ = student.network.hidden(IDS)
        return student.network.logits(hidden.flatten(0, 1)).view(*IDS.shape, -1)


def masks(folder: Path) -> dict[str, Tensor]:
    found = {}
    checkpoint = open_checkpoint(folder)
    for module, scheme in stored_schemes(checkpoint).items():
        parts = {
            name.removeprefix(f"{module}."): checkpoint.read(name)
            for name in checkpoint.tensors
            if name.startswith(f"{module}.")
        }
        mask = format_named(scheme.format).unpack(parts, scheme.grid).mask
        if mask is not None:
            found[module] = mask
    return found


@pytest.mark.parametrize("name", ["plain", *SCHEMES])
def test_a_trained_student_is_stored_as_its_source_was(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tiny_llama if name == "plain" else write_compressed(tiny_llama, tmp_path / "packed", SCHEMES[name])
    student, optimizer = started(folder)
    for seed in range(3):
        step(student, optimizer, seed)
    output = write_trained(student, tmp_path / "out", "key", closing(student))
    before, after = open_checkpoint(folder), open_checkpoint(output)
    assert after.tensors.keys() == before.tensors.keys() and after.config == before.config
    for tensor, info in before.tensors.items():
        assert (after.tensors[tensor].dtype, after.tensors[tensor].shape) == (info.dtype, info.shape), tensor
    order = [tensor.partition(".layers.")[2][:1] for tensor in after.tensors]
    assert order == sorted(order), "outside the blocks first, then block by block"
    written, source = load_file(output / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = [tensor for tensor in written if not torch.equal(written[tensor], source[tensor])]
    assert "model.norm.weight" in moved and "model.embed_tokens.weight" not in moved
    held = ("weight_shape", "weight_indices", "weight_zero_point", "outlier_columns")
    assert len(moved) > 14 and not any(tensor.endswith(held) for tensor in moved)
    kept, wanted = masks(output), masks(folder)
    assert kept.keys() == wanted.keys() and (len(kept) == 14) == ("2:4" in name)
    assert all(torch.equal(kept[module], wanted[module]) for module in kept)
    again = load_student(output, Training(), CPU)
    assert all(torch.equal(again.stored()[tensor], written[tensor]) for tensor in written)
    if name == "plain":
        return
    for module in student.schemes:
        mine, theirs = (one.network.model.get_submodule(module).effective_weight() for one in (student, again))
        assert torch.equal(mine, theirs), module
        if "4:8" in name:
            assert bool((theirs.view(len(theirs), -1, 8).ne(0).sum(-1) <= 4).all())
    if name in WEIGHT_ONLY:
        model = load_model(output, execution=Execution("reference"))
        # Norms are rounded as they are stored, so the student read back, not the one in memory, is the measure.
        assert torch.allclose(model.logits(model.hidden(IDS)), logits_of(again), atol=1e-4)


def test_what_lies_outside_the_blocks_comes_first(tiny_llama: Path) -> None:
    student = load_student(tiny_llama, Training(), CPU)
    found = sections_of(student.source, student.network.block_names)
    outside = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert sorted(list(found)[:3]) == outside and list(found)[3:] == ["model.layers.0", "model.layers.1"]
    assert all(list(found[name].tensors) == [name] for name in outside)


def test_an_output_that_was_begun_is_finished_or_refused(tiny_llama: Path, tmp_path: Path) -> None:
    student, optimizer = started(tiny_llama)

    def failing(tensors: Mapping[str, TensorInfo], sha256: Mapping[str, str]) -> save.Files:
        raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        write_trained(student, tmp_path / "out", "key", failing)
    assert not (tmp_path / "out").exists()
    step(student, optimizer, 0)
    with pytest.raises(InputError, match="begun with other weights: give --restart"):
        write_trained(student, tmp_path / "out", "key", closing(student))
    output = write_trained(student, tmp_path / "out", "key", closing(student), restart=True)
    assert write_trained(student, tmp_path / "out", "key", closing(student)) == output
    with pytest.raises(InputError, match="result of another recipe"):
        write_trained(student, tmp_path / "out", "other", closing(student))


@pytest.mark.parametrize("name", ["plain", "W4A16 2:4", "LLM_INT8"])
def test_a_state_goes_on_bit_for_bit(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tiny_llama if name == "plain" else write_compressed(tiny_llama, tmp_path / "packed", SCHEMES[name])
    student, optimizer = started(folder)
    losses = [step(student, optimizer, seed) for seed in range(2)]
    save_state(tmp_path / "state", student, optimizer, {"losses": losses}, "run")
    losses += [step(student, optimizer, seed) for seed in range(2, 5)]
    resumed, other = started(folder)
    history = load_state(tmp_path / "state", resumed, other, "run")
    assert history == {"losses": losses[:2]}
    assert [step(resumed, other, seed) for seed in range(2, 5)] == losses[2:]
    wanted = student.parameters_by_name()
    for parameter, value in resumed.parameters_by_name().items():
        assert torch.equal(value, wanted[parameter]), parameter
    fresh, third = started(folder)
    load_state(tmp_path / "state", fresh, None, "run")
    assert [step(fresh, third, seed) for seed in range(2, 5)] != losses[2:], "moments make no difference"


def test_a_state_replaces_the_last_only_when_whole(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, optimizer = started(tiny_llama)
    assert load_state(tmp_path / "state", student, optimizer, "run") is None
    step(student, optimizer, 0)
    save_state(tmp_path / "state", student, optimizer, {"step": 1}, "run")
    with monkeypatch.context() as patch:
        patch.setattr(save.Writer, "finish", lambda *_: (_ for _ in ()).throw(InputError("disk full")))
        with pytest.raises(InputError, match="disk full"):
            save_state(tmp_path / "state", student, optimizer, {"step": 2}, "run")
    assert load_state(tmp_path / "state", student, optimizer, "run") == {"step": 1}
    with monkeypatch.context() as patch:  # a kill between the new one's name and the last one's end
        patch.setattr(save.shutil, "rmtree", lambda *_: None)
        save_state(tmp_path / "state", student, optimizer, {"step": 3}, "run")
    assert load_state(tmp_path / "state", student, optimizer, "run") == {"step": 3}
    save_state(tmp_path / "state", student, optimizer, {"step": 4}, "run")
    assert load_state(tmp_path / "state", student, optimizer, "run") == {"step": 4}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["000002"]


def test_states_that_do_not_fit_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    student, optimizer = started(tiny_llama)
    step(student, optimizer, 0)
    save_state(tmp_path / "state", student, None, {"step": 1}, "run")
    with pytest.raises(InputError, match="is the state of another run: give another output folder, or remove"):
        load_state(tmp_path / "state", student, None, "other")
    with pytest.raises(InputError, match="without the optimizer's moments"):
        load_state(tmp_path / "state", student, optimizer, "run")
    narrow = load_student(tiny_llama, Training(train=("*.mlp.*",)), CPU)
    with pytest.raises(InputError, match="holds other parameters than are trained"):
        load_state(tmp_path / "state", narrow, None, "run")
    before = {name: one.clone() for name, one in student.parameters_by_name().items()}
    file = next((tmp_path / "state").glob("*/model.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(InputError, match=r"model\.safetensors: is damaged"):
        load_state(tmp_path / "state", student, None, "run")
    told = file.parent / "state.json"
    told.write_text(told.read_text()[:-9])
    with pytest.raises(InputError, match=r"state\.json: is not valid JSON"):
        load_state(tmp_path / "state", student, None, "run")
    assert all(torch.equal(one, before[name]) for name, one in student.parameters_by_name().items())
