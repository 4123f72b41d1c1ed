"""The streaming writer: what it publishes is read by the safetensors package and transformers, and nothing else is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from compress.checkpoint import Section, TensorInfo, Writer, open_checkpoint, refuse_overlap
from compress.checkpoint.header import encode_header
from compress.checkpoint.layout import SHAPE_BYTES, lay_out
from compress.errors import InputError
from tests.checkpoint.sample import FILES, contents, open_writer, run, section_tensors
from tests.tiny import write_model

COUNT = 8


def written() -> dict[str, Tensor]:
    return {name: tensor for number in range(COUNT) for name, tensor in section_tensors(number).items()}


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


def test_shards_are_read_back_by_the_safetensors_package(tmp_path: Path) -> None:
    output = run(tmp_path / "out", COUNT)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    wanted = written()
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in wanted.values())}
    assert index["weight_map"].keys() == wanted.keys()
    shards = sorted(file.name for file in output.glob("*.safetensors"))
    assert shards == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    for shard in shards:
        with safe_open(output / shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert set(file.keys()) == {name for name, home in index["weight_map"].items() if home == shard}
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert same(file.get_tensor(name), wanted[name])


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out", [Section("all", {"a": 24})], "recipe")
    writer.write("all", {"a": torch.arange(6.0)}, {})
    output = writer.finish({}, total_bytes=24)
    assert list(contents(output)) == ["model.safetensors"]
    with safe_open(output / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("a"), torch.arange(6.0))


def test_our_reader_and_the_files_beside(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(os.urandom(100_000))
    writer = open_writer(tmp_path / "out", 1)
    writer.write("block 0", section_tensors(0), {})
    writer.write("nothing", {}, {})
    output = writer.finish(FILES | {"tokenizer.json": source})
    checkpoint = open_checkpoint(output)
    assert all(same(checkpoint.read(name), tensor) for name, tensor in section_tensors(0).items())
    assert contents(output)["tokenizer.json"] == source.read_bytes()
    assert contents(output)["kernels/a.bin"] == FILES["kernels/a.bin"]
    assert not (tmp_path / "out.partial").exists()


def test_tensors_are_written_as_they_are_seen(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"turned": base.T, "slice": base[:, 1:3], "parameter": torch.nn.Parameter(torch.ones(2))}
    tensors |= {"lone": base[1:2, 2:3], "column": base[:, 3:4], "lone of a column": base.T[1:2, 2:3]}
    writer = Writer(tmp_path / "out", [Section("s", dict.fromkeys(tensors, 100))], "recipe")
    writer.write("s", tensors, {})
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in writer.read("s").items())


def test_tensors_are_aligned_behind_sections_of_whole_words(tmp_path: Path) -> None:
    tensors = {"bytes": torch.ones(3, dtype=torch.uint8), "half": torch.ones(5).half(), "long": torch.ones(2).long()}
    sections = [Section(str(i), {f"{i}.{name}": 100 for name in tensors} | {f"{i}.pad": 3}) for i in range(3)]
    writer = Writer(tmp_path / "out", sections, "recipe")
    for section in sections:
        pad = {f"{section.name}.pad": torch.ones(3, dtype=torch.uint8)}
        writer.write(section.name, {f"{section.name}.{name}": t.clone() for name, t in tensors.items()} | pad, {})
    assert all(info.offset % info.dtype.itemsize == 0 for info in writer.tensors.values())


def test_records_are_what_a_later_run_reads(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "out", 2)
    writer.write("block 0", section_tensors(0), {"shape": (1, 2), "error_db": 0.1})
    assert writer.record("block 0") == {"shape": [1, 2], "error_db": 0.1}
    again = open_writer(tmp_path / "out", 2)
    assert again.done == writer.done == ["block 0"]
    assert again.record("block 0") == writer.record("block 0")
    assert all(same(tensor, section_tensors(0)[name]) for name, tensor in again.read("block 0").items())
    assert again.tensors == writer.tensors


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    shared = torch.ones(4, 2)
    writer = Writer(tmp_path / "out", [Section("s", {"embed": 32, "head": 32})], "recipe")
    with pytest.raises(ValueError, match="'head' shares its memory with 'embed'"):
        writer.write("s", {"embed": shared, "head": shared}, {})


def test_a_tied_model_stays_tied_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = open_checkpoint(write_model(tmp_path / "source", tie_word_embeddings=True))
    assert "lm_head.weight" not in source.tensors
    sections = [Section("all", {name: info.nbytes for name, info in source.tensors.items()})]
    writer = Writer(tmp_path / "out", sections, "recipe")
    writer.write("all", {name: source.read(name) for name in source.tensors}, {})
    files = {name: source.folder / name for name in ("config.json", "generation_config.json")}
    output = writer.finish(files, total_bytes=source.nbytes)
    found, wanted = (AutoModelForCausalLM.from_pretrained(folder) for folder in (output, source.folder))
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert found.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.state_dict().items())


def test_a_section_differs_from_its_plan(tmp_path: Path) -> None:
    def writer(name: str) -> Writer:
        return Writer(tmp_path / name, [Section("s", {"a": 8, "b": 8})], "recipe")

    a, b = torch.zeros(2), torch.ones(2)
    with pytest.raises(ValueError, match="section 't' is not the next one, which is 's'"):
        writer("1").write("t", {"a": a, "b": b}, {})
    with pytest.raises(ValueError, match="differs from its plan in b"):
        writer("2").write("s", {"a": a}, {})
    with pytest.raises(ValueError, match="'b' has 16 bytes, more than the 8 planned"):
        writer("3").write("s", {"a": a, "b": b.double()}, {})
    with pytest.raises(ValueError, match="cannot say"):
        writer("4").write("s", {"a": a, "b": torch.zeros([1] * 40, dtype=torch.uint8)}, {})
    with pytest.raises(ValueError, match="JSON compliant"):
        writer("5").write("s", {"a": a, "b": b}, {"error_db": float("inf")})
    with pytest.raises(ValueError, match="'s' has not been written"):
        writer("6").finish({})
    done = writer("7")
    done.write("s", {"a": a, "b": b}, {})
    with pytest.raises(ValueError, match="comes after the last one"):
        done.write("s", {"a": a, "b": b}, {})
    with pytest.raises(InputError, match="come to 16 bytes, the plan says 17"):
        done.finish({}, total_bytes=17)
    for name in ("/etc/x", "../x", "model.safetensors", "journal.jsonl", "work/x", ""):
        with pytest.raises(ValueError, match="is not a name for a file"):
            done.finish({name: ""})
    assert not (tmp_path / "7").exists()


def test_impossible_plans() -> None:
    for sections, phrase in (
        ([], "no tensors"),
        ([Section("s", {"a": 1}), Section("s", {"b": 1})], "section 's' twice"),
        ([Section("s", {"a": 1}), Section("t", {"a": 1})], "tensor 'a' twice"),
    ):
        with pytest.raises(ValueError, match=phrase):
            Writer(Path("/nowhere"), sections, "recipe")


def test_the_longest_header_fits_its_reserve(tmp_path: Path) -> None:
    names = [f'"ü\n{number}' for number in range(50)]
    (shard,) = lay_out([Section("s", dict.fromkeys(names, 1))], 1)
    shape = (10**20, 10**21, 10**21)
    assert len(json.dumps(shape)) == SHAPE_BYTES - 1
    start, nbytes = shard.data_start + 10**14, 8 * 10**14
    infos = [TensorInfo(name, tmp_path, torch.float8_e4m3fnuz, shape, start, nbytes) for name in names]
    encoded = encode_header(infos, {"format": "pt", "lmpress_fingerprint": "f" * 64}, shard.data_start)
    assert len(encoded) == shard.data_start < len(encoded.rstrip()) + 256


def test_a_finished_output_is_complete_and_left_alone(tmp_path: Path) -> None:
    output = run(tmp_path / "out", COUNT)
    (output / "report.json").write_text("{}")
    before = contents(output)
    assert open_writer(output, COUNT).complete
    assert contents(output) == before and not (tmp_path / "out.partial").exists()
    with pytest.raises(InputError, match="another recipe or model: give another output folder, or --restart"):
        open_writer(output, COUNT, "other recipe")
    (output / "model-00003-of-00004.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="model-00003-of-00004.safetensors: holds 0 bytes"):
        open_writer(output, COUNT)


def test_restart_replaces_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    old = contents(run(tmp_path / "out", COUNT))
    writer = open_writer(tmp_path / "out", COUNT, "other recipe", restart=True)
    writer.write("block 0", section_tensors(0), {})
    assert contents(tmp_path / "out") == old
    run(tmp_path / "out", COUNT, "other recipe", restart=True)
    new = contents(tmp_path / "out")
    assert new.keys() == old.keys() and new != old
    assert os.listdir(tmp_path) == ["out"]


def test_folders_that_are_not_ours_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run(tmp_path / "out", 1)  # an empty folder is free
    for restart in (False, True):
        for name, content in (("notes.txt", b"mine"), ("model.safetensors", b"mine")):
            folder = tmp_path / f"full {name}"
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
            with pytest.raises(InputError, match="is not empty and was not written by lmpress"):
                open_writer(folder, 1, restart=restart)
            assert contents(folder) == {name: content}
        partial = tmp_path / "fresh.partial"
        partial.mkdir(exist_ok=True)
        (partial / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="fresh.partial: was not written by lmpress"):
            open_writer(tmp_path / "fresh", 1, restart=restart)
        assert contents(partial) == {"notes.txt": b"mine"}
    with pytest.raises(InputError, match="notes.txt: is a file"):
        open_writer(partial / "notes.txt", 1)
    with pytest.raises(InputError, match="cannot be used"):
        open_writer(partial / "notes.txt" / "out", 1)


def test_a_name_taken_during_the_run_is_not_overwritten(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "out", 1)
    writer.write("block 0", section_tensors(0), {})
    writer.write("nothing", {}, {})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        writer.finish({})
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}


def test_what_only_the_run_needs_goes_with_it(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "deep" / "out", 1)
    writer.work.mkdir()
    (writer.work / "spill").write_bytes(b"activations")
    again = open_writer(tmp_path / "deep" / "out", 1)
    assert (again.work / "spill").read_bytes() == b"activations"
    again.write("block 0", section_tensors(0), {})
    again.write("nothing", {}, {})
    assert not (again.finish({}) / "work").exists()


def test_a_second_process_keeps_out(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "out", 1)
    child = os.fork()
    if child == 0:
        try:
            open_writer(tmp_path / "out", 1, restart=True)
        except InputError as error:
            os._exit(7 if "another run is writing here" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    writer.write("block 0", section_tensors(0), {})


def test_a_disk_that_returns_other_bytes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    flips = iter([1])

    def flipping(descriptor: int, data: memoryview, offset: int) -> int:
        raw = bytearray(data)
        raw[-1] ^= next(flips, 0)
        return real(descriptor, raw, offset)

    writer = open_writer(tmp_path / "out", 1)
    monkeypatch.setattr(os, "pwrite", flipping)
    with pytest.raises(InputError, match="was read back changed"):
        writer.write("block 0", section_tensors(0), {})
    writer.write("block 0", section_tensors(0), {})  # the same call again is good
    assert writer.done == ["block 0"]


def test_output_and_model_folders_are_apart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "x.partial").mkdir()
    for output in (model, model / "out", tmp_path, tmp_path / "link" / "deep" / "out", model / ".." / "model"):
        with pytest.raises(InputError, match="overlaps the model folder"):
            refuse_overlap(output, model)
    with pytest.raises(InputError, match="overlaps"):
        refuse_overlap(tmp_path / "x", tmp_path / "x.partial")
    for output in (tmp_path / "out", tmp_path / "model2"):
        refuse_overlap(output, model)


def test_sections_are_laid_out_in_order() -> None:
    def shards(sizes: list[int], shard_bytes: int) -> list[list[int]]:
        sections = [Section(str(number), {f"{number}": size}) for number, size in enumerate(sizes)]
        return [[section.nbytes for section in shard.sections] for shard in lay_out(sections, shard_bytes)]

    assert shards([4, 4, 4], 8) == [[4, 4], [4]]
    assert shards([4, 9, 4, 4], 8) == [[4], [9], [4, 4]]
    assert shards([0, 9, 0], 8) == [[0, 9, 0]]
    assert shards([8, 1], 8) == [[8], [1]]
