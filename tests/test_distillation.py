"""Distill and shrink stages from end to end: what they write, after a kill, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import manifest, open_checkpoint
from compress.checkpoint.quantization_config import stored_schemes
from compress.errors import InputError
from compress.eval.run import report_on_files
from compress.eval.sparsity import sparsity
from compress.eval.tables import report_tables
from compress.formats import format_named
from compress.pipeline import RunOptions, run
from compress.recipe import parse
from tests.tiny import byte_tokenizer, write_model

ROOT = Path(__file__).parent.parent
TRAINING = {"steps": 4, "batch": 2, "every": 2, "learning_rate": 0.003}


class Watch:
    """Remembers events; ends the run, as a kill would, at the `last` event of a kind."""

    def __init__(self, kind: str = "", last: int = 0) -> None:
        self.events: list[str] = []
        self.kind, self.last = kind, last

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append(kind)
        if kind == self.kind and self.events.count(kind) == self.last:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("distillation") / "model", num_hidden_layers=3)


def stages(text: Path, *kinds: str, **distill: Any) -> list[dict[str, Any]]:
    data = {"source": str(text), "sequences": 12, "seqlen": 32, "held_out": 2}
    known = {
        "prune": {"prune": {"method": "sparsegpt"}},
        "quantize": {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}},
        "depth": {"shrink": {"method": "depth", "layers": 2}},
        "distill": {"distill": {"method": "forward_kl", "data": data, "training": TRAINING, **distill}},
        "blocks": {"distill": {"method": "block_output", "data": data, "epochs": 1, "batch": 2}},
    }
    return [known[kind] for kind in kinds]


def document(model: Path, output: Path, text: Path, body: list[dict[str, Any]]) -> dict[str, Any]:
    calibration = {"source": str(text), "samples": 4, "seqlen": 32}
    return {"version": 1, "model": str(model), "output": str(output), "calibration": calibration, "stages": body}


def do(model: Path, output: Path, text: Path, body: list[dict[str, Any]], watch: Watch | None = None) -> Path:
    run(parse(document(model, output, text, body), "r.yaml"), RunOptions(device="cpu"), watch or Watch())
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_recovered_model_keeps_its_mask_and_grid(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    before = do(model, tmp_path / "before", tiny_text, stages(tiny_text, "prune", "quantize"))
    after = do(model, tmp_path / "after", tiny_text, stages(tiny_text, "prune", "quantize", "blocks", "distill"))
    assert all(row["pattern"] == "2:4" for row in sparsity(after) if ".layers." in row["name"])
    earlier, later = open_checkpoint(before), open_checkpoint(after)
    assert {name: (info.dtype, info.shape) for name, info in earlier.tensors.items()} == {
        name: (info.dtype, info.shape) for name, info in later.tensors.items()
    }
    changed = 0
    for module, scheme in stored_schemes(later).items():
        assert torch.equal(earlier.read(f"{module}.weight_indices"), later.read(f"{module}.weight_indices")), (
            "the mask is held"
        )
        parts = {name: later.read(f"{module}.{name}") for name in ("weight_values", "weight_indices", "weight_scale")}
        found = format_named(scheme.format).unpack(parts, scheme.grid)
        assert int(found.q.min()) >= -8 and int(found.q.max()) <= 7 and found.mask is not None
        assert not bool(found.q[~found.mask].any())
        changed += int((parts["weight_values"] != earlier.read(f"{module}.weight_values")).sum())
    assert changed > 0, "training moved integers"
    told = manifest.read(after)
    assert [row["method"] for row in told.phases] == ["block_output", "forward_kl"]
    assert {layer["method"] for layer in told.layers} == {"sparsegpt+gptq+block_output+forward_kl"}
    assert all(layer["error_db"] is None for layer in told.layers)
    manifest.check(told, later)
    shown = [table.title for table in report_tables(report_on_files(after, model))]
    assert "Distillation block by block" in shown and "Distillation by forward_kl" in shown


KILLS = [("importance", 2), ("block", 2), ("recovered", 2), ("training", 3), ("training", 1)]


@pytest.mark.parametrize(("kind", "last"), KILLS)
def test_a_killed_run_ends_in_the_same_bytes(
    kind: str, last: int, model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    shrunk = ["depth", "distill"]
    body = stages(tiny_text, *(shrunk if kind == "importance" else ["prune", "quantize", "blocks", "distill"]))
    whole = do(model, tmp_path / "whole" / "out", tiny_text, body)
    with pytest.raises(KeyboardInterrupt):
        do(model, tmp_path / "killed" / "out", tiny_text, body, Watch(kind, last))
    assert not (tmp_path / "killed" / "out").exists()
    resumed = do(model, tmp_path / "killed" / "out", tiny_text, body)
    assert contents(resumed) == contents(whole)
    assert sorted(path.name for path in resumed.parent.iterdir()) == ["out", "out.log.jsonl"]


def test_a_finished_recipe_does_nothing(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    body = stages(tiny_text, "depth", "distill")
    do(model, tmp_path / "out", tiny_text, body)
    watch = Watch()
    do(model, tmp_path / "out", tiny_text, body, watch)
    assert watch.events == ["complete"]


def test_what_a_kill_at_the_very_end_leaves_is_removed(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    body = stages(tiny_text, "depth", "distill")
    output = do(model, tmp_path / "out", tiny_text, body)
    before = contents(output)
    (output / "work").mkdir()
    (output / "journal.jsonl").write_text("")
    (tmp_path / "out.stages" / "1-shrink").mkdir(parents=True)
    do(model, output, tiny_text, body)
    assert contents(output) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.log.jsonl"]


def test_a_finished_folder_that_was_changed_is_named(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    body = stages(tiny_text, "quantize")
    output = do(model, tmp_path / "out", tiny_text, body)
    told = json.loads((output / "lmpress.json").read_text())
    told["tensors"].pop("lm_head.weight")
    (output / "lmpress.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="tensor 'lm_head.weight' is absent there"):
        do(model, output, tiny_text, body)


def test_a_student_is_a_plain_model(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = do(model, tmp_path / "out", tiny_text, stages(tiny_text, "depth"))
    from transformers import AutoModelForCausalLM

    assert len(AutoModelForCausalLM.from_pretrained(output).model.layers) == 2
    (row,) = manifest.read(output).phases
    cache = row["kv_bytes_per_token"]
    assert (row["kind"], cache["before"], cache["after"]) == ("shrink", 3 * 2 * 2 * 16 * 2, 2 * 2 * 2 * 16 * 2)
    (table,) = (t for t in report_tables(report_on_files(output, model)) if t.title.startswith("Student"))
    assert ("key-value cache per token", "384 B", "256 B") in table.rows


def test_an_offline_teacher_is_asked_once(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    offline = {"teacher": {"signal": "offline", "top_k": 8}}
    body = stages(tiny_text, "depth", "distill", **offline)
    first, second = Watch(), Watch()
    do(model, tmp_path / "out", tiny_text, body, first)
    cache = contents(tmp_path / "out.teacher")
    longer = stages(tiny_text, "depth", "distill", **offline)
    longer[1]["distill"]["training"] = TRAINING | {"steps": 5}
    longer[1]["distill"]["teacher"] = offline["teacher"] | {"cache": str(tmp_path / "out.teacher")}
    do(model, tmp_path / "other", tiny_text, longer, second)
    assert "caching" in first.events and "caching" not in second.events
    assert contents(tmp_path / "out.teacher") == cache
    longer[1]["distill"]["data"]["seed"] = 1
    with pytest.raises(InputError, match="is of another text: give another folder as teacher.cache"):
        do(model, tmp_path / "third", tiny_text, longer)


def test_a_packed_student_learns_from_a_named_teacher(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    packed = do(model, tmp_path / "packed", tiny_text, stages(tiny_text, "quantize"))
    body = stages(tiny_text, "distill", teacher={"model": str(model)})
    trained = do(packed, tmp_path / "out", tiny_text, body)
    assert stored_schemes(open_checkpoint(trained)) == stored_schemes(open_checkpoint(packed))
    with pytest.raises(InputError, match=r"teacher\.model: is missing, and the recipe's own model is the student"):
        do(packed, tmp_path / "alone", tiny_text, stages(tiny_text, "distill"))


def test_the_log_tells_the_training(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    do(model, tmp_path / "out", tiny_text, stages(tiny_text, "depth", "distill"))
    rows = [json.loads(line) for line in (tmp_path / "out.log.jsonl").read_text().splitlines()]
    assert (rows[0]["kind"], rows[-1]["kind"]) == ("tokens", "finished")
    steps = [row for row in rows if row["kind"] == "training"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["tokens_per_second"] > 0 and row["loss"] > 0 for row in steps)


def test_one_log_tells_all_phases(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = do(model, tmp_path / "out", tiny_text, stages(tiny_text, "quantize", "blocks"))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out.log.jsonl").read_text().splitlines()]
    assert (kinds.count("block"), kinds.count("recovered"), kinds.count("finished")) == (3, 3, 1)
    assert all(row["seconds"] is not None for row in report_on_files(output, model)["layers"])


def test_two_processes_write_one_checkpoint(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """What `accelerate launch` starts: one compresses, both train, one writes; the curve is that of one process."""
    body = stages(tiny_text, "quantize", "distill")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(document(model, tmp_path / "two", tiny_text, body)))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "-m", "compress.cli.app", "run", str(recipe), "--device", "cpu"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("finished") == 1, "one process reports"
    body[1]["distill"]["training"] = TRAINING | {"accumulation": 2}
    one = manifest.read(do(model, tmp_path / "one", tiny_text, body)).phases[0]
    two = manifest.read(tmp_path / "two").phases[0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert not (tmp_path / "two.stages").exists()


MISTAKES = [
    ({"mix": [{"method": "hidden_states", "layers": {0: 7}}]}, "teacher layer 7 of a teacher with 3 layers"),
    (
        {"mix": [{"method": "hidden_states"}], "teacher": {"signal": "offline"}},
        "hidden_states needs hidden states, and an offline teacher keeps none: set teacher.signal to online",
    ),
    ({"temperature": 2.0, "teacher": {"signal": "offline"}}, "temperature: 2 with an offline teacher"),
    ({"training": {"train": ["*.nothing.*"]}}, r"training.train: '\*.nothing.\*' matches no parameter"),
    ({"data": {"source": "no-such.txt"}}, "no-such.txt: no such file or folder"),
    ({"mix": [{"method": "block_output"}]}, "distill.mix: has no meaning for block_output"),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES)
def test_mistakes_are_named(wrong: dict[str, Any], message: str, model: Path, tiny_text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        do(model, tmp_path / "out", tiny_text, stages(tiny_text, "depth", "distill", **wrong))
    assert not (tmp_path / "out").exists()


def test_a_teacher_with_another_tokenizer_is_refused_at_once(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["press"])
    tokenizer.save_pretrained(other)
    watch = Watch()
    body = stages(tiny_text, "depth", "distill", teacher={"model": str(other)})
    with pytest.raises(InputError, match="has another tokenizer than the student"):
        do(model, tmp_path / "out", tiny_text, body, watch)
    assert watch.events == []


def test_stages_that_cannot_follow_are_refused(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="put the quantize stage in front of it"):
        do(model, tmp_path / "out", tiny_text, stages(tiny_text, "quantize", "distill", "quantize"))
    with pytest.raises(InputError, match=r"alpha.*less than or equal to 1"):
        parse(document(model, tmp_path, tiny_text, stages(tiny_text, "distill", data={"alpha": 1.5})), "r.yaml")
