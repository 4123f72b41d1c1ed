"""Students cut out of a model compute what the model would with those parts taken out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress import methods
from compress.checkpoint.output import partial_folder
from compress.checkpoint.writer import Writer
from compress.errors import InputError
from compress.model import FAMILIES
from compress.runtime.load import load_model
from compress.stage import Stage
from compress.training import cut as cutting
from compress.training import importance
from compress.training.cut import CutOptions, cut, describe
from tests.tiny import write_model

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
CPU = CutOptions(torch.device("cpu"))
CHANGES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "num_attention_heads": 4,
}


class Watch:
    """Remembers events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


def stage(method: str, **settings: Any) -> Stage:
    return Stage("shrink", method, methods.find("shrink", method).Config(**settings), where="r.yaml: stages.0")


def run(folder: Path, output: Path, *stages: Stage, options: CutOptions = CPU) -> dict[str, Any]:
    return cut(folder, stages, output, IDS, options, Watch()).told


def whole(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS, use_cache=False).logits
    return found


def run_here(folder: Path) -> Tensor:
    """Logits of the bundled runtime."""
    model = load_model(folder, torch.device("cpu"))
    return model.logits(model.hidden(IDS)).float()


def tensors(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def edited(folder: Path, change: Callable[[Any], None]) -> Path:
    """The model in `folder`, in float32, after `change` was done to it in place."""
    model = whole(folder)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def reconfigured(folder: Path, change: dict[str, Any]) -> Path:
    """config.json with fields replaced; those that are None are taken out."""
    config = {name: value for name, value in (config_of(folder) | change).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_shallower_model_is_the_model_without_those_layers(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, torch.float32, **CHANGES)
    told = run(folder, tmp_path / "out", stage("depth", keep=(0, 3)))
    by_hand = whole(folder)
    by_hand.model.layers = nn.ModuleList([by_hand.model.layers[0], by_hand.model.layers[3]])
    by_hand.config.num_hidden_layers = 2
    if getattr(by_hand.config, "layer_types", None):
        by_hand.config.layer_types = [by_hand.config.layer_types[0], by_hand.config.layer_types[3]]
    student = whole(tmp_path / "out")
    assert len(student.model.layers) == 2
    assert torch.allclose(logits(student), logits(by_hand), atol=1e-6)
    assert torch.allclose(run_here(tmp_path / "out"), logits(by_hand), atol=1e-4)
    assert told["layers_kept"] == [0, 3] and told["measured_on"] is None
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "qwen3"])
def test_layers_keep_their_kind_of_attention(model_type: str, tmp_path: Path) -> None:
    """config.json does not say which layers slide: they are those that transformers takes, at their old numbers."""
    sliding = {"use_sliding_window": True, "max_window_layers": 2} if model_type == "qwen3" else {}
    changes = CHANGES | sliding | {"sliding_window": 4}
    folder = write_model(tmp_path / "model", model_type, torch.float32, **changes)
    pattern = {"sliding_window_pattern": 2} if model_type == "gemma3_text" else {}
    reconfigured(folder, {"layer_types": None, "_sliding_window_pattern": None, **pattern})
    kinds = whole(folder).config.layer_types
    assert kinds[1] == "full_attention" != kinds[2]
    run(folder, tmp_path / "out", stage("depth", keep=(1, 2)))
    assert config_of(tmp_path / "out")["layer_types"] == ["full_attention", "sliding_attention"]
    if model_type == "qwen3":
        assert config_of(tmp_path / "out")["max_window_layers"] == 1
    by_hand = whole(folder)
    by_hand.model.layers = nn.ModuleList(by_hand.model.layers[1:3])
    by_hand.config.num_hidden_layers, by_hand.config.layer_types = 2, kinds[1:3]
    expected = logits(by_hand)
    assert torch.allclose(logits(whole(tmp_path / "out")), expected, atol=1e-6)
    assert torch.allclose(run_here(tmp_path / "out"), expected, atol=1e-4)


def test_layers_are_chosen_by_their_influence(tmp_path: Path) -> None:
    """Layer 2 adds nothing to the hidden states, so that its influence is none."""

    def silence(model: Any) -> None:
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()

    folder = edited(write_model(tmp_path / "model", **CHANGES), silence)
    told = run(folder, tmp_path / "out", stage("depth", layers=3))
    assert told["layers_kept"] == [0, 1, 3]
    influence = told["importance"]["block_influence"]
    assert len(influence) == 4 and influence[2] == pytest.approx(0, abs=1e-9) and min(influence[:2]) > 1e-3
    assert torch.allclose(logits(whole(tmp_path / "out")), logits(whole(folder)), atol=1e-5)
    assert told["measured_on"] == {"samples": 2, "seqlen": 24}


def test_channels_that_are_zero_go_first(family: str, tmp_path: Path) -> None:
    live = [
        torch.randperm(128, generator=torch.Generator().manual_seed(layer))[:64].sort().values for layer in range(4)
    ]

    def silence(model: Any) -> None:
        for layer, kept in zip(model.model.layers, live, strict=True):
            dead = torch.ones(128, dtype=torch.bool)
            dead[kept] = False
            layer.mlp.up_proj.weight[dead] = 0

    folder = edited(write_model(tmp_path / "model", family, torch.float32, **CHANGES), silence)
    told = run(folder, tmp_path / "out", stage("width", intermediate_size=64))
    found = tensors(tmp_path / "out")
    for layer, kept in enumerate(live):
        prefix = f"model.layers.{layer}.mlp"
        for name in ("gate_proj", "up_proj"):
            assert torch.equal(found[f"{prefix}.{name}.weight"], tensors(folder)[f"{prefix}.{name}.weight"][kept])
    assert torch.allclose(logits(whole(tmp_path / "out")), logits(whole(folder)), atol=1e-5)
    assert torch.allclose(run_here(tmp_path / "out"), logits(whole(folder)), atol=1e-4)
    assert told["importance_kept"] == {"channel_l2": pytest.approx([1.0] * 4)}
    assert config_of(tmp_path / "out")["intermediate_size"] == 64


def test_heads_that_say_nothing_go_first(family: str, tmp_path: Path) -> None:
    """The values of one key-value head are zero in each layer, another one each: its query heads can go with it."""

    def silence(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            rows = slice(16 * (number % 2), 16 * (number % 2 + 1))
            layer.self_attn.v_proj.weight[rows] = 0
            if layer.self_attn.v_proj.bias is not None:
                layer.self_attn.v_proj.bias[rows] = 0

    folder = edited(write_model(tmp_path / "model", family, torch.float32, **CHANGES), silence)
    reconfigured(folder, {"head_dim": None} if family in ("llama", "mistral", "qwen2") else {})
    told = run(folder, tmp_path / "out", stage("width", heads=2))
    assert torch.allclose(logits(whole(tmp_path / "out")), logits(whole(folder)), atol=1e-5)
    assert torch.allclose(run_here(tmp_path / "out"), logits(whole(folder)), atol=1e-4)
    assert told["heads_kept"]["query"] == [[[2], [3]], [[0], [1]]] * 2
    found = config_of(tmp_path / "out")
    assert [found[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [2, 1, 16]
    assert told["kv_bytes_per_token"] == {"before": 2 * 4 * 2 * 16 * 4, "after": 2 * 4 * 1 * 16 * 4}


def test_equal_heads_are_pooled_without_a_loss(family: str, tmp_path: Path) -> None:
    """Multi-head attention whose key and value heads are equal in pairs becomes grouped-query attention."""

    def repeat(model: Any) -> None:
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                for parameter in projection.parameters():
                    heads = parameter.unflatten(0, (2, 2, 16))
                    heads[:, 1] = heads[:, 0]

    changes = CHANGES | {"num_key_value_heads": 4}
    folder = edited(write_model(tmp_path / "model", family, torch.float32, **changes), repeat)
    before = tensors(folder)
    if family == "llama":
        reconfigured(folder, {"num_key_value_heads": None})
    told = run(folder, tmp_path / "out", stage("grouped_query", kv_heads=2))
    assert torch.allclose(logits(whole(tmp_path / "out")), logits(whole(folder)), atol=1e-5)
    assert torch.allclose(run_here(tmp_path / "out"), logits(whole(folder)), atol=1e-4)
    assert told["kv_bytes_per_token"] == {"before": 2 * 4 * 4 * 16 * 4, "after": 2 * 4 * 2 * 16 * 4}
    saved = sum(weight.numel() // 2 for name, weight in before.items() if ".k_proj." in name or ".v_proj." in name)
    assert told["parameters"]["before"] - told["parameters"]["after"] == saved
    assert tensors(tmp_path / "out").keys() == before.keys()


def test_stages_follow_one_another(tmp_path: Path) -> None:
    """All at once is what three cuts in a row are, importances measured on the first model."""
    folder = write_model(tmp_path / "model", "qwen2", torch.bfloat16, **CHANGES)
    stages = (stage("depth", keep=(0, 2)), stage("width", intermediate_size=64, heads=2), stage("depth", keep=(1,)))
    told = run(folder, tmp_path / "out", *stages)
    assert told["layers_kept"] == [2]
    run(folder, tmp_path / "narrow", stages[1])
    run(tmp_path / "narrow", tmp_path / "last", stage("depth", keep=(2,)))
    one, other = tensors(tmp_path / "out"), tensors(tmp_path / "last")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert all(tensor.dtype == torch.bfloat16 for tensor in one.values())
    assert one["model.layers.0.self_attn.k_proj.bias"].shape == (16,)


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_embeddings_are_stored_once(stored_twice: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=True, **CHANGES)
    if stored_twice:
        double_head(folder, 1.0)
    told = run(folder, tmp_path / "out", stage("depth", every=2))
    assert "lm_head.weight" not in tensors(tmp_path / "out")
    student = whole(tmp_path / "out")
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert told["parameters"]["after"] == sum(parameter.numel() for parameter in student.parameters())
    assert told["parameters"]["before"] == sum(parameter.numel() for parameter in whole(folder).parameters())


def double_head(folder: Path, factor: float) -> None:
    """Store the tied embedding, times `factor`, as the output weight too."""
    from safetensors.torch import save_file

    found = tensors(folder)
    found["lm_head.weight"] = found["model.embed_tokens.weight"] * factor
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def test_the_plan_is_told_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", **CHANGES)
    stages = (stage("depth", layers=2), stage("width", intermediate_size=100), stage("grouped_query"))
    told = run(folder, tmp_path / "out", *stages)
    assert json.loads((tmp_path / "out" / "shrink.json").read_text()) == told
    monkeypatch.setattr(cutting.Checkpoint, "read", None)
    planned = describe(folder, stages)
    assert planned.items() <= told.items()
    after = sum(tensor.numel() for tensor in tensors(tmp_path / "out").values())
    assert planned["parameters"] == {"before": sum(t.numel() for t in tensors(folder).values()), "after": after}
    assert planned["kv_bytes_per_token"] == {"before": 2 * 4 * 2 * 16 * 2, "after": 2 * 2 * 1 * 16 * 2}
    assert planned["notes"] == ["intermediate_size 100 is no multiple of 64, which kernels like best"]
    assert planned["sizes"]["num_hidden_layers"] == {"before": 4, "after": 2}


class Killed(Exception):
    """The end of a run at a chosen moment."""


@pytest.mark.parametrize("sections", [0, 2, 4])
def test_a_killed_cut_goes_on_to_the_same_bytes(sections: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", **CHANGES)
    stages = (stage("depth", layers=3), stage("width", intermediate_size=64))
    run(folder, tmp_path / "whole", *stages)
    plain = Writer.write
    left = [sections]

    def write(self: Writer, section: str, *rest: Any) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        plain(self, section, *rest)

    monkeypatch.setattr(Writer, "write", write)
    with pytest.raises(Killed):
        run(folder, tmp_path / "out", *stages)
    assert partial_folder(tmp_path / "out").exists() and not (tmp_path / "out").exists()
    monkeypatch.setattr(Writer, "write", plain)
    told = run(folder, tmp_path / "out", *stages)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    monkeypatch.setattr(Writer, "write", None)
    assert run(folder, tmp_path / "out", *stages) == told, "a finished one is only read"


def test_other_importances_than_an_unfinished_run_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", **CHANGES)
    plain, asked = Writer.write, stage("depth", layers=2)

    def stop(self: Writer, section: str, *rest: Any) -> None:
        plain(self, section, *rest)
        raise Killed

    monkeypatch.setattr(Writer, "write", stop)
    with pytest.raises(Killed):
        run(folder, tmp_path / "out", asked)
    monkeypatch.setattr(Writer, "write", plain)
    exact = cutting.measure
    flipped = lambda *given: {name: -values for name, values in exact(*given).items()}  # noqa: E731
    monkeypatch.setattr(cutting, "measure", flipped)
    with pytest.raises(InputError, match="choose other layers, heads or channels than the unfinished run did"):
        run(folder, tmp_path / "out", asked)
    told = run(folder, tmp_path / "out", asked, options=CutOptions(torch.device("cpu"), restart=True))
    assert len(told["layers_kept"]) == 2


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "arithmetic", lambda device: torch.float32)
    watch = Watch()
    cut(write_model(tmp_path / "model"), (stage("depth", layers=1),), tmp_path / "out", IDS, CPU, watch)
    assert watch.events == [("importance", {"done": done, "total": 2}) for done in range(3)]


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({}, stage("depth", keep=(4,)), "r.yaml: stages.0.shrink.keep: layer 4 is beyond the model's 4, which count"),
        ({}, stage("width", heads=3), "r.yaml: stages.0.shrink.heads: 3 would split a group"),
        ({}, stage("grouped_query", kv_heads=2), "r.yaml: stages.0.shrink.kv_heads: 2 is what the model has already"),
        (
            {"num_key_value_heads": 4},
            stage("width", heads=3),
            "r.yaml: stages.0.shrink: transformers refuses the smaller model: .* hidden size .64. is not a multiple",
        ),
    ],
)
def test_what_cannot_be_cut_is_said_before_a_weight_is_read(
    changes: dict[str, Any], asked: Stage, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", **CHANGES | changes)
    monkeypatch.setattr(cutting.Checkpoint, "read", None)
    with pytest.raises(InputError, match=message) as caught:
        run(folder, tmp_path / "out", asked)
    assert caught.value.exit_code == 2
    assert not partial_folder(tmp_path / "out").exists()


def test_a_text_is_asked_for_where_something_is_measured(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with pytest.raises(InputError, match="stages.0.shrink: measures block_influence on a text: give calibration"):
        cut(folder, (stage("depth", layers=1),), tmp_path / "out", None, CPU, Watch())
    cut(folder, (stage("depth", keep=(1,)),), tmp_path / "out", None, CPU, Watch())
    assert cutting.needs([stage("depth"), stage("grouped_query")]) == frozenset()
    assert cutting.needs([stage("depth", layers=1), stage("width", heads=2)]) == {"block_influence", "head_l2"}


def test_sources_that_are_no_float_model_of_a_known_family(tmp_path: Path) -> None:
    asked = stage("depth")
    with pytest.raises(InputError, match="model_type 'gpt_neox' cannot be shrunk: known are llama, mistral, qwen2"):
        describe(write_model(tmp_path / "neox", "gpt_neox"), [asked])
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(InputError, match="overlaps the model folder"):
        run(folder, folder / "out", asked)
    double_head(folder, 2.0)
    with pytest.raises(InputError, match="'tie_word_embeddings' is true, but tensor 'lm_head.weight' differs"):
        describe(folder, [asked])
    reconfigured(folder, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(
        InputError, match="the model is quantized .GPTQ, 4 bits., and a student is cut from float weights"
    ):
        describe(folder, [asked])


def test_shards_that_are_another_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **CHANGES)
    with pytest.raises(InputError, match="tensor 'model.layers.3.* belongs to no layer"):
        describe(reconfigured(folder, {"num_hidden_layers": 3}), [stage("depth")])
    with pytest.raises(InputError, match="tensor 'model.layers.4.* is missing"):
        describe(reconfigured(folder, {"num_hidden_layers": 5}), [stage("depth")])
