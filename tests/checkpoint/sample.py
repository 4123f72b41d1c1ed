"""A small checkpoint with every awkwardness at once, and the run that writes it: what writer and resume tests share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import Section, Writer

SHARD_BYTES = 4000
FILES: dict[str, str | bytes] = {"config.json": '{"model_type": "llama"}\n', "kernels/a.bin": bytes(range(256)) * 3}


def section_tensors(number: int) -> dict[str, Tensor]:
    """Mixed dtypes and odd sizes, a scalar and an empty tensor; the same number gives the same values."""
    generator = torch.Generator().manual_seed(number)
    prefix = f"model.layers.{number}"
    return {
        f"{prefix}.weight": torch.randint(-128, 128, (13, 31), generator=generator, dtype=torch.int8),
        f"{prefix}.weight_scale": torch.randn(13, 1, generator=generator).bfloat16(),
        f"{prefix}.weight_packed": torch.randint(0, 2**31, (7, 9), generator=generator, dtype=torch.int32),
        f"{prefix}.outlier_columns": torch.empty(0, dtype=torch.int32),
        f"{prefix}.outlier_weight": torch.empty(13, 0, dtype=torch.bfloat16),
        f"{prefix}.weight_shape": torch.tensor([13, 31]),
        f"{prefix}.mask": torch.rand(5, generator=generator) > 0.5,
        f"{prefix}.scalar": torch.rand((), generator=generator, dtype=torch.float64),
    }


def plan(count: int) -> list[Section]:
    """A plan for `count` sections, generous by 100 bytes a tensor, and a section without tensors at its end."""
    sections = [
        Section(f"block {number}", {name: tensor.nbytes + 100 for name, tensor in section_tensors(number).items()})
        for number in range(count)
    ]
    return [*sections, Section("nothing", {})]


def open_writer(output: Path, count: int, fingerprint: str = "recipe", restart: bool = False) -> Writer:
    """The writer of `run`."""
    return Writer(output, plan(count), fingerprint, SHARD_BYTES, restart)


def run(output: Path, count: int, fingerprint: str = "recipe", restart: bool = False) -> Path:
    """What a pipeline does, from wherever the last run of it got to: write what is missing, then finish."""
    writer = open_writer(output, count, fingerprint, restart)
    if writer.complete:
        return output
    for number, section in enumerate(plan(count)):
        if section.name not in writer.done:
            tensors = section_tensors(number) if section.tensors else {}
            writer.write(section.name, tensors, {"number": number, "error_db": 0.1 * number, "shape": (1, number)})
    records = "\n".join(repr(writer.record(name)) for name in writer.done)
    return writer.finish(FILES | {"records.txt": records})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
