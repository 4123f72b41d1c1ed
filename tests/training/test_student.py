"""Students: what is trained, what is held, and that loading and storing without a step changes no byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint import open_checkpoint
from compress.errors import USAGE, InputError
from compress.pipeline import RunOptions, run
from compress.runtime.load import Execution, load_model
from compress.training.network import load_network
from compress.training.student import Student, load_student
from compress.training_settings import Training
from tests.test_pipeline import Silent, quantize, recipe
from tests.tiny import write_model
from tests.training.compressed import SCHEMES, write_compressed

CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["plain", *SCHEMES])
def folder(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "plain":
        return tiny_llama
    return write_compressed(tiny_llama, tmp_path_factory.mktemp("student") / "packed", SCHEMES[request.param])


def logits_of(student: Student) -> Tensor:
    hidden, _ = student.network.hidden(IDS)
    return student.network.logits(hidden.flatten(0, 1)).view(*IDS.shape, -1)


def test_load_and_store_change_no_byte(folder: Path) -> None:
    student = load_student(folder, Training(), CPU)
    stored, held = student.stored(), load_file(folder / "model.safetensors")
    assert list(stored) == list(open_checkpoint(folder).tensors)
    for name, tensor in held.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name
    block = student.stored("model.layers.1")
    assert block.keys() == {name for name in held if name.startswith("model.layers.1.")}
    assert student.stored("lm_head.weight").keys() == {"lm_head.weight"}


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_what_a_run_writes_is_kept_too(pattern: str, tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    stages = [{"prune": {"method": "magnitude", "pattern": pattern}}, quantize("rtn")]
    run(recipe(tiny_llama, tmp_path / "out", tiny_text, *stages), RunOptions(), Silent())
    student, held = load_student(tmp_path / "out", Training(), CPU), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, held[name]) for name, tensor in student.stored().items())
    layers = [student.network.model.get_submodule(name) for name in student.schemes]
    assert len(layers) == 14 and all(layer.mask.float().mean() <= 0.5 for layer in layers)


def test_a_fresh_student_is_the_model_that_runs(folder: Path) -> None:
    model = load_model(folder, execution=Execution("reference"))
    expected = model.logits(model.hidden(IDS))
    with torch.no_grad():
        assert torch.allclose(logits_of(load_student(folder, Training(), CPU)), expected, atol=2e-4)


def test_everything_is_the_blocks_and_the_final_norm(folder: Path) -> None:
    student = load_student(folder, Training(), CPU)
    names = set(student.parameters_by_name())
    assert {name for name in names if not name.startswith("model.layers.")} == {"model.norm.weight"}
    layers = {name for name, one in student.network.model.named_parameters() if name.startswith("model.layers.")}
    assert layers <= names
    logits_of(student).logsumexp(-1).mean().backward()
    assert [name for name, one in student.parameters_by_name().items() if one.grad is None] == []


@pytest.mark.parametrize(
    ("patterns", "refit", "count", "example"),
    [
        (("*.mlp.*",), True, 2 * 3 * 2, "model.layers.0.mlp.up_proj.scale"),
        (("*.mlp.*",), False, 2 * 3, "model.layers.0.mlp.up_proj.weight"),
        (("q_proj",), False, 2, "model.layers.0.self_attn.q_proj.weight"),
        (("*.scale",), True, 2 * 7, "model.layers.1.self_attn.o_proj.scale"),
        (("lm_head", "model.norm.weight"), True, 2, "lm_head.weight"),
        (("embed_tokens.weight",), True, 1, "model.embed_tokens.weight"),
        ((r"re:layers\.1\..*norm",), True, 2, "model.layers.1.input_layernorm.weight"),
    ],
    ids=["with scales", "without", "module", "scales alone", "head", "embedding", "expression"],
)
def test_patterns(
    patterns: tuple[str, ...], refit: bool, count: int, example: str, tiny_llama: Path, tmp_path: Path
) -> None:
    packed = write_compressed(tiny_llama, tmp_path / "packed", SCHEMES["W4A16"])
    names = list(load_student(packed, Training(train=patterns, refit=refit), CPU).parameters_by_name())
    assert len(names) == count and example in names


@pytest.mark.parametrize(
    ("pattern", "refit", "message"),
    [
        ("q_prj", True, "'q_prj' matches no parameter; did you mean 'q_proj'?"),
        ("*.scale", False, r"'\*\.scale' matches no parameter"),
        ("re:(", True, r"'re:\(' is not a regular expression"),
    ],
)
def test_patterns_that_name_nothing(pattern: str, refit: bool, message: str, tiny_llama: Path, tmp_path: Path) -> None:
    packed = write_compressed(tiny_llama, tmp_path / "packed", SCHEMES["W4A16"])
    with pytest.raises(InputError, match=rf"training\.train: {message}") as refused:
        load_student(packed, Training(train=(pattern,), refit=refit), CPU)
    assert refused.value.exit_code == USAGE


def test_a_tied_head_is_trained_with_its_embedding(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    student = load_student(folder, Training(train=("lm_head.weight",)), CPU)
    assert list(student.parameters_by_name()) == ["model.embed_tokens.weight"]
    assert student.stored().keys() == open_checkpoint(folder).tensors.keys()
    biased = load_student(folder, Training(), CPU)
    assert "model.layers.0.self_attn.q_proj.bias" in biased.parameters_by_name()


def test_biases_of_compressed_layers_are_trained_and_stored(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "qwen2")
    packed = write_compressed(plain, tmp_path / "packed", SCHEMES["W4A16"])
    student = load_student(packed, Training(), CPU)
    bias = student.parameters_by_name()["model.layers.0.self_attn.q_proj.bias"]
    with torch.no_grad():
        bias.add_(1)
    assert student.stored()["model.layers.0.self_attn.q_proj.bias"].min() > 0.5
    teacher = load_network(plain, CPU)
    assert not torch.allclose(logits_of(student), teacher.logits(teacher.hidden(IDS)[0].flatten(0, 1)).view(2, 24, -1))


def test_damaged_layers_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    packed = write_compressed(tiny_llama, tmp_path / "packed", SCHEMES["W4A16 2:4"])
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"].zero_()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(InputError, match=r"layer 'model\.layers\.0\.mlp\.up_proj': a scale is zero or not finite"):
        load_student(packed, Training(), CPU)
