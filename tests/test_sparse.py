"""2:4 from a recipe to every export: masks hold, sizes are true, weights come back bit for bit, logits agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress import sensitivity
from compress.checkpoint import manifest, open_checkpoint
from compress.checkpoint.interop import compressed_tensors, dense
from compress.checkpoint.quantization_config import stored_schemes
from compress.checkpoint.source import dequantized
from compress.errors import InputError
from compress.eval.size import measure_size
from compress.eval.sparsity import sparsity
from compress.formats.pattern import Pattern, keep_largest
from compress.pipeline import RunOptions, prepare, run
from compress.runtime.load import Execution, load_model
from tests.test_pipeline import Silent, quantize, recipe
from tests.tiny import write_model

REFERENCE = Execution("reference")
IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(5))
LINEARS = 14


def prune(method: str = "sparsegpt", **more: Any) -> dict[str, Any]:
    return {"prune": {"method": method, **more}}


STAGES = {
    "floats": [prune()],
    "magnitude": [prune("magnitude")],
    "int4 joint": [prune(), quantize()],
    "int4 in turn": [prune(joint=False), quantize()],
    "int4 rtn behind wanda": [prune("wanda"), quantize("rtn")],
    "int8": [prune(), quantize("gptq", "W8A8")],
    "int8 grouped": [prune("wanda"), quantize("gptq", "W8A16")],
    "mixed": [{**prune(), "targets": ["*.mlp.*"]}, quantize()],
}


@pytest.fixture(scope="module", params=STAGES)
def sparse(request: pytest.FixtureRequest, tiny_llama: Path, tiny_text: Path, tmp_path_factory: Any) -> Path:
    output = tmp_path_factory.mktemp("sparse") / "out"
    outcome = run(recipe(tiny_llama, output, tiny_text, *STAGES[request.param]), RunOptions(), Silent())
    assert outcome.manifest.fallbacks == []
    manifest.check(outcome.manifest, open_checkpoint(output))
    return output


def float_weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    schemes = stored_schemes(checkpoint) if checkpoint.quantization is not None else {}
    floats = dequantized(checkpoint, schemes, torch.float32)
    return {name: floats.read(name).float() for name in floats.tensors}


def test_masks_hold_tensor_by_tensor(sparse: Path) -> None:
    schemes = stored_schemes(open_checkpoint(sparse))
    assert len(schemes) == LINEARS
    found = {row["name"].removesuffix(".weight"): row for row in sparsity(sparse)}
    for module, scheme in schemes.items():
        assert (found[module]["pattern"] == "2:4") == (scheme.format == "sparse24"), module
        assert found[module]["zeros"] >= 0.5 or scheme.format != "sparse24"
    assert found["model.embed_tokens"]["pattern"] is None and found["lm_head"]["pattern"] is None


def test_every_export_holds_the_same_weights(sparse: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sparse)
    schemes, wanted = stored_schemes(checkpoint), float_weights(sparse)
    dense.export(checkpoint, schemes, tmp_path / "dense", "F32")
    compressed_tensors.export(checkpoint, schemes, tmp_path / "codes")
    for folder in (tmp_path / "dense", tmp_path / "codes"):
        found = float_weights(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), folder
    codes = open_checkpoint(tmp_path / "codes")
    assert codes.nbytes > checkpoint.nbytes
    assert (codes.quantization or {"quant_method": "compressed-tensors"})["quant_method"] == "compressed-tensors"


def test_transformers_computes_the_same_logits(sparse: Path, tmp_path: Path) -> None:
    """From the dense export what the float weights give, and from compressed-tensors' words what the runtime gives."""
    checkpoint = open_checkpoint(sparse)
    schemes = stored_schemes(checkpoint)
    dense.export(checkpoint, schemes, tmp_path / "dense", "F32")
    compressed_tensors.export(checkpoint, schemes, tmp_path / "codes")
    rounds = any(scheme.activation_bits is not None for scheme in schemes.values())
    mine = load_model(tmp_path / "dense" if rounds else sparse, execution=REFERENCE)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)(IDS).logits
        assert torch.allclose(mine.logits(mine.hidden(IDS)), theirs, atol=1e-4)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.float32)(IDS).logits
    mine = load_model(sparse, execution=REFERENCE)
    assert float((mine.logits(mine.hidden(IDS)) - theirs).abs().max() / theirs.abs().max()) < 1e-3


def test_plan_says_what_is_written(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    bound = recipe(tiny_llama, tmp_path / "out", tiny_text, prune(), quantize())
    plan = prepare(bound).plan
    run(bound, RunOptions(), Silent())
    written = open_checkpoint(tmp_path / "out")
    assert written.nbytes == plan.bytes_after
    assert plan.bits_per_weight() == 3 + 16 / 32
    assert measure_size(written, stored_schemes(written)).bits_per_weight == 3 + 16 / 32
    row = next(row for row in plan.rows if row.name == "model.layers.0.mlp.down_proj.weight")
    assert (row.method, row.scheme, row.format) == ("sparsegpt+gptq", "W4A16+2:4 g32", "sparse24")


def test_another_pattern_is_stored_as_zeros_and_told(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    bound = recipe(tiny_llama, tmp_path / "out", tiny_text, prune(pattern="4:8"), quantize())
    assert any("pruned to 4:8 are stored and run at full size" in note for note in prepare(bound).plan.assignment.notes)
    run(bound, RunOptions(), Silent())
    linears = [row for row in sparsity(tmp_path / "out") if ".layers." in row["name"]]
    assert len(linears) == LINEARS and {row["pattern"] for row in linears} == {"4:8"}
    assert open_checkpoint(tmp_path / "out").quantization["quant_method"] == "compressed-tensors"  # type: ignore[index]


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([prune(), quantize("gptq", "W4A16_ASYM")], "W4A16_ASYM is asymmetric"),
        ([prune(), quantize("llm_int8", "LLM_INT8")], "LLM_INT8 has outlier columns"),
        ([prune(), prune("wanda")], "stages.0 prunes model.layers.0.self_attn.q_proj already"),
        ([quantize(), prune()], "an earlier stage quantizes .*: put the prune stage first"),
        ([{**prune(), "targets": ["model.embed_tokens"]}], "no scheme stores an embedding"),
        ([prune(pattern="4:8")], "4:8 of floats is stored by no format"),
        ([prune(pattern="2:2")], "'2:2' is no pattern"),
        ([prune("sparsgpt")], "did you mean 'sparsegpt'"),
        ([{**prune(), "targets": ["*.q_proj"]}], "but loaders fuse them"),
        ([{"transform": {"method": "awq"}}, prune()], "none of its layers is quantized by a later stage"),
    ],
    ids=["asymmetric", "outliers", "twice", "late", "embedding", "4:8", "2:2", "misspelt", "fused", "transform"],
)
def test_what_cannot_be_is_refused_by_the_plan(
    stages: list[dict[str, Any]], reason: str, tiny_llama: Path, tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        prepare(recipe(tiny_llama, tmp_path / "out", tiny_text, *stages))


def test_columns_that_no_pattern_fits(tiny_text: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", intermediate_size=102)
    with pytest.raises(InputError, match="down_proj has 102 input columns, not a multiple of 4: ignore it there"):
        prepare(recipe(model, tmp_path / "out", tiny_text, prune()))


def test_a_pruned_source_is_not_pruned_again(sparse: Path, tiny_text: Path, tmp_path: Path) -> None:
    again = recipe(sparse, tmp_path / "again", tiny_text, prune("magnitude"))
    with pytest.raises(InputError, match="is pruned to 2:4 already"):
        prepare(again, dequantize=True)


def test_damaged_indices_are_named(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(recipe(tiny_llama, output, tiny_text, prune("magnitude")), RunOptions(), Silent())
    tensors = load_file(output / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_indices"][3, 2] = 0
    save_file(tensors, output / "model.safetensors")
    with pytest.raises(InputError, match="model.layers.1.mlp.up_proj.weight_indices': .*do not ascend"):
        load_model(output)


def slow_divergences(folder: Path, ids: torch.Tensor) -> dict[str, float]:
    """By the first of each group: mean KL of transformers' model from itself, the group pruned by Wanda's scores."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: dict[str, torch.Tensor] = {}
    names = {module: name for name, module in model.named_modules()}

    def remember(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.setdefault(names[module], arguments[0].flatten(0, 1))

    for module in names:
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(remember)
    with torch.no_grad():
        want = model(ids).logits.double().log_softmax(-1)
        found = {}
        for index in range(2):
            for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
                parent = f"model.layers.{index}.{'mlp' if group[0][0] in 'gd' else 'self_attn'}"
                linears = [model.get_submodule(f"{parent}.{leaf}") for leaf in group]
                before = [linear.weight.clone() for linear in linears]
                for leaf, linear in zip(group, linears, strict=True):
                    scores = linear.weight.abs() * inputs[f"{parent}.{leaf}"].norm(dim=0)
                    linear.weight.mul_(keep_largest(scores, Pattern(2, 4)))
                got = model(ids).logits.double().log_softmax(-1)
                found[f"{parent}.{group[0]}"] = float((want.exp() * (want - got)).sum(-1).mean())
                for linear, weight in zip(linears, before, strict=True):
                    linear.weight.copy_(weight)
    return found


def test_sensitivity_is_what_pruning_one_group_costs(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    job = prepare(recipe(tiny_llama, tmp_path / "out", tiny_text, prune("magnitude", keep_dense=0.3)))
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    found = sensitivity.measure(tiny_llama, job.plan.assignment, ids, torch.device("cpu"), lambda done, total: None)
    oracle = slow_divergences(tiny_llama, ids)
    assert {one.layers[0]: pytest.approx(one.kl, rel=1e-3) for one in found} == oracle
    assert [one.kl for one in found] == sorted((one.kl for one in found), reverse=True)
    dense = sensitivity.most_sensitive(found, job.plan.assignment)
    assert set(dense) == {name for one in found[:3] for name in one.layers}  # three of eight groups


@pytest.mark.parametrize("source", ["text", "self"])
def test_the_most_sensitive_layers_stay_dense(source: str, tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    text = tiny_text if source == "text" else "self"
    bound = recipe(tiny_llama, tmp_path / "out", text, prune("magnitude", keep_dense=0.25))
    planned = prepare(bound).plan
    assert not planned.exact and any("keep_dense" in note for note in planned.assignment.notes)
    seen = Silent()
    outcome = run(bound, RunOptions(), seen)
    assert seen.kinds.count("sensitivity") == 9
    dense = {row["name"] for row in outcome.manifest.skipped if "kept dense: pruned alone, KL" in row["reason"]}
    assert 2 <= len(dense) <= 5
    schemes = stored_schemes(open_checkpoint(tmp_path / "out"))
    assert len(schemes) == LINEARS - len(dense) and schemes.keys().isdisjoint(dense)
    again = Silent()
    run(bound, RunOptions(), again)
    assert again.kinds == ["complete"]


def test_a_share_of_dense_layers_is_below_one(tiny_llama: Path, tiny_text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep_dense"):
        recipe(tiny_llama, tmp_path / "out", tiny_text, prune("magnitude", keep_dense=1.0))


def test_a_checkpoint_that_is_not_pruned_has_no_such_export(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    with pytest.raises(InputError, match="holds no 2:4 weights"):
        compressed_tensors.export(checkpoint, {}, tmp_path / "out")
