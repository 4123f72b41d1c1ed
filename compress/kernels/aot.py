"""Ahead-of-time compilation of the GPU kernels, on any Linux machine: no GPU and no driver are needed.

Each variant is one function with its constants fixed; each artifact one variant's binary for one target. Most are
written in Triton; those for 2:4 weights are CUDA C++ (nvrtc.py), as Triton has no sparse tensor cores. Binaries do not
depend on where the package lies, so that two machines with the same compiler get the same bytes. Triton keeps what it
compiled in its own cache (TRITON_CACHE_DIR, else ~/.triton/cache).

NVIDIA binaries from sm_90 on use features of exactly that architecture (wgmma, tcgen05) and run on no other.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from compress.errors import InputError, did_you_mean
from compress.formats import int8_outlier, int_quantized, pack_quantized, sparse24
from compress.kernels import nvrtc
from compress.kernels.sparse import launch as sparse
from compress.kernels.triton.launch import DTYPES, HEAD_WIDTHS, MULTIPLES_OF_16, SPANS, TILES, block_columns

SOURCES = Path(__file__).parent / "triton"
ATTENTION = "kv-cache"
WARP_SIZES = {"sm_80": 32, "sm_90": 32, "sm_100": 32, "gfx942": 64}
TARGETS: tuple[str, ...] = tuple(WARP_SIZES)
# Columns of Blackwell's tensor memory. A program that wants more becomes one that only traps, without an error.
TENSOR_MEMORY = 512
# What Triton's own launcher passes after the arguments of the source. No kernel here needs either, so both may be null.
SCRATCH = (("global_scratch", "*i8"), ("profile_scratch", "*i8"))

Compiler = Literal["triton", "nvrtc"]


@dataclass(frozen=True)
class Variant:
    """One compiled function: a source function with its constants fixed.

    format: the format it serves, or "kv-cache". module: file under compress/kernels/triton or sparse/source.
    signature: argument -> Triton's name of its type, in the order of the source, constants left out. constants: tile
    sizes and the like.
    """

    name: str
    format: str
    module: str
    function: str
    signature: dict[str, str]
    constants: dict[str, int]
    warps: int
    stages: int

    @property
    def compiler(self) -> Compiler:
        """Who compiles it."""
        return "nvrtc" if self.format == sparse24.NAME else "triton"

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """(name, type) of what a launch passes, in order, Triton's two scratch pointers at the end included."""
        return (*self.signature.items(), *(SCRATCH if self.compiler == "triton" else ()))


@dataclass(frozen=True)
class Artifact:
    """A variant's binary for `target`: a cubin or an hsaco whose entry is `symbol`.

    arguments: those of the variant. threads: of one program. shared_bytes: that a launch asks for, beside what the
    binary holds itself.
    """

    variant: Variant
    target: str
    symbol: str
    binary: bytes
    shared_bytes: int
    threads: int
    arguments: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Compilation:
    """An artifact, and the readable code on the way to it: assembly is PTX, or AMD's. log: what NVRTC says of it."""

    artifact: Artifact
    assembly: str
    log: str = ""


@cache
def variants() -> tuple[Variant, ...]:
    """Every variant that launch.py's plans can name."""
    kinds = (_packed, _int8, _sparse, _attention)
    return tuple(variant for dtype in DTYPES for kind in kinds for variant in kind(dtype))


def unavailable(compiler: Compiler = "triton") -> str | None:
    """Why `compiler` can compile nothing here, in one line, or None."""
    if compiler == "nvrtc":
        return nvrtc.unavailable()
    if platform.system() != "Linux":
        return f"Triton compiles on Linux only, and this is {platform.system()}"
    if triton_version() is None:
        return "Triton is not installed: pip install 'lmpress[kernels]'"
    return None


def triton_version() -> str | None:
    """The installed version of Triton, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def compiler_version(compiler: Compiler) -> str:
    """The version of a compiler that is available."""
    return nvrtc.version() if compiler == "nvrtc" else version("triton")


def compile_variant(variant: Variant, target: str) -> Artifact:
    """`variant` compiled for `target`. Raises InputError if the target is unknown or nothing can be compiled here."""
    return compilation(variant, target).artifact


def compilation(variant: Variant, target: str) -> Compilation:
    """As `compile_variant`, with the assembly beside it."""
    if target not in WARP_SIZES:
        raise InputError(f"target: {target!r} is not known{did_you_mean(target, TARGETS)} Known: {', '.join(TARGETS)}")
    reason = unavailable(variant.compiler)
    if reason is not None:
        raise InputError(f"kernels: {reason}")
    return _triton(variant, target) if variant.compiler == "triton" else _cuda(variant, target)


def _triton(variant: Variant, target: str) -> Compilation:
    built = _compile(variant, target)
    metadata = built.metadata
    # Triton's metadata for AMD names the first of them only from 3.8 on.
    if getattr(metadata, "global_scratch_size", 0) or metadata.profile_scratch_size:
        raise InputError(f"kernels: {variant.name} wants scratch memory on {target}, which its launch does not give it")
    if (getattr(metadata, "tmem_size", 0) or 0) > TENSOR_MEMORY:
        raise InputError(
            f"kernels: {variant.name} wants {metadata.tmem_size} columns of tensor memory on {target}, which has "
            f"{TENSOR_MEMORY}: Triton {triton_version()} cannot build it"
        )
    artifact = Artifact(
        variant=variant,
        target=target,
        symbol=metadata.name,
        binary=built.kernel,
        shared_bytes=metadata.shared,
        threads=metadata.num_warps * WARP_SIZES[target],
        arguments=variant.arguments,
    )
    return Compilation(artifact, built.asm["amdgcn" if target.startswith("gfx") else "ptx"])


def _cuda(variant: Variant, target: str) -> Compilation:
    if not target.startswith("sm_"):
        raise InputError(f"kernels: {variant.name} needs NVIDIA's sparse tensor cores, which {target} has not")
    made = nvrtc.compile_source(f"{variant.module}.cu", variant.constants | {"WARPS": variant.warps}, target)
    artifact = Artifact(
        variant=variant,
        target=target,
        symbol=variant.function,
        binary=made.cubin,
        shared_bytes=0,  # it is of fixed size, and the binary knows it
        threads=variant.warps * WARP_SIZES[target],
        arguments=variant.arguments,
    )
    return Compilation(artifact, made.ptx, made.log)


def source_sha256(variant: Variant) -> str:
    """Hash of all that this package decides about a binary: the source and the variant, not the compiler."""
    if variant.compiler == "nvrtc":
        digest = hashlib.sha256(nvrtc.sources_sha256().encode())
    else:
        digest = hashlib.sha256((SOURCES / f"{variant.module}.py").read_bytes())
    digest.update(json.dumps(asdict(variant), sort_keys=True).encode())
    return digest.hexdigest()


def constants_for(variant: Variant, target: str) -> dict[str, int]:
    """The constants of `variant` as its source takes them: JOINED, a compute capability, becomes yes or no."""
    constants = dict(variant.constants)
    if "JOINED" in constants:
        constants["JOINED"] = int(target.startswith("sm_") and int(target[3:]) >= constants["JOINED"])
    return constants


def function(variant: Variant) -> Any:
    """The function of `variant` in its file: Triton's, to be compiled, or interpreted where TRITON_INTERPRET is set."""
    return getattr(importlib.import_module(f"compress.kernels.triton.{variant.module}"), variant.function)


def _compile(variant: Variant, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = function(variant)
    if not isinstance(source, triton.JITFunction):
        raise InputError("kernels: TRITON_INTERPRET is set, and Triton interprets instead of compiling: unset it")
    names = source.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in MULTIPLES_OF_16]
    given = ASTSource(
        source,
        signature,
        constexprs=constants_for(variant, target),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    family, architecture = ("hip", target) if target.startswith("gfx") else ("cuda", int(target.removeprefix("sm_")))
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    with triton.knobs.compilation.scope():
        # Line numbers would put this machine's paths into the binary.
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(given, target=GPUTarget(family, architecture, WARP_SIZES[target]), options=options)


def _packed(dtype: str) -> list[Variant]:
    """W4A16 and W8A16."""
    pointers = {"x": f"*{dtype}", "words": "*i32", "scales": f"*{dtype}", "zeros": "*i8"}
    pointers |= {"out": f"*{dtype}", "partial": "*fp32"}
    scalars = dict.fromkeys(("rows", "columns", "blocks", "groups", "shift", "asymmetric", "split"), "i32")
    found = []
    for bits, spans in SPANS.items():
        for span in spans:
            for kind in ("vector", "narrow", "wide"):
                tokens = {} if kind == "vector" else {"tokens": "i32"}
                constants = {"BITS": bits, "SLOTS": block_columns(bits) // span} | TILES[f"w4a16_{kind}"]
                name = f"w{bits}a16_{kind}_g{span}_{dtype}"
                found.append(_variant(name, pack_quantized.NAME, pointers | tokens | scalars, constants))
    arguments = {"partial": "*fp32", "out": f"*{dtype}", "count": "i32", "split": "i32"}
    found.append(_variant(f"w4a16_combine_{dtype}", pack_quantized.NAME, arguments, TILES["w4a16_combine"]))
    return found


def _int8(dtype: str) -> list[Variant]:
    """W8A8, and the same with outlier columns."""
    reading = {"x": f"*{dtype}", "ordinary": "*i8", "outlier_columns": "*i32", "integers": "*i8", "steps": "*fp32"}
    reading |= {"gathered": f"*{dtype}", "counts": "*i64"} | dict.fromkeys(("columns", "outliers", "padded"), "i32")
    reading |= {"levels": "fp32", "threshold": "fp32"}
    product = {"steps": "*fp32", "weight": "*i8", "scale": f"*{dtype}", "gathered": f"*{dtype}"}
    product |= {"outlier_weight": f"*{dtype}", "out": f"*{dtype}"}
    sizes = dict.fromkeys(("tokens", "rows", "columns", "padded", "split"), "i32")
    multiplying = {"integers": "*i8"} | product | {"partial": "*i32"} | sizes
    combining = {"partial": "*i32"} | product | sizes
    del combining["weight"], combining["columns"]
    arguments = {"quantize": reading, "narrow": multiplying, "wide": multiplying, "combine": combining}
    return [
        _variant(f"{prefix}_{kind}_{dtype}", served, taken, {"OUTLIERS": outliers} | TILES[f"w8a8_{kind}"])
        for outliers, prefix, served in ((0, "w8a8", int_quantized.NAME), (1, "llm_int8", int8_outlier.NAME))
        for kind, taken in arguments.items()
    ]


def _sparse(dtype: str) -> list[Variant]:
    """2:4 weights of 16-bit floats, of int8 with int8 activations, and of int4."""
    found = []
    for bits, spans in sparse.SPANS.items():
        whole = sparse.Kept(bits)
        kinds = [(kind, sparse.Kept(bits, span)) for kind in sparse.TOKENS for span in spans] + [("combine", whole)]
        for kind, kept in kinds + ([("quantize", whole)] if bits == 8 else []):
            module = "product" if kind in sparse.TOKENS else kind
            found.append(
                Variant(
                    sparse.name(kind, kept, dtype),
                    sparse24.NAME,
                    module,
                    module,
                    sparse.signature(kind, bits, dtype),
                    sparse.constants(kind, kept, dtype),
                    sparse.WARPS[kind],
                    sparse.TILES[kind].get("STAGES", 1),
                )
            )
    return found


def _attention(dtype: str) -> list[Variant]:
    found = []
    for width in HEAD_WIDTHS:
        head = {"HEAD": width, "BLOCK_D": 1 << (width - 1).bit_length()}
        for int8, stored in ((0, "plain"), (1, "int8")):
            kept = "*i8" if int8 else f"*{dtype}"
            arguments = {"query": f"*{dtype}", "keys": kept, "values": kept, "key_scales": "*fp32"}
            arguments |= {"value_scales": "*fp32", "table": "*i32", "lengths": "*i32", "out": f"*{dtype}"}
            arguments |= {"partial": "*fp32", "logarithms": "*fp32", "heads": "i32", "key_heads": "i32", "limit": "i32"}
            arguments |= {"scale": "fp32", "cap": "fp32", "window": "i32", "split": "i32"}
            constants = {"INT8": int8} | head | TILES["attention_attend"]
            found.append(_variant(f"attention_attend_{stored}_d{width}_{dtype}", ATTENTION, arguments, constants))
        arguments = {"partial": "*fp32", "logarithms": "*fp32", "out": f"*{dtype}", "split": "i32"}
        found.append(_variant(f"attention_combine_d{width}_{dtype}", ATTENTION, arguments, head))
    return found


# The beginning of a variant's name -> its file; the kind in it -> its function, warps and pipeline stages.
MODULES = {"w4a16": "w4a16", "w8a16": "w4a16", "w8a8": "w8a8", "llm_int8": "w8a8", "attention": "paged_attention"}
KINDS = {
    "vector": ("vector", 1, 2),
    "narrow": ("matrix", 4, 4),
    "wide": ("matrix", 4, 3),
    "quantize": ("quantize", 4, 2),
    "attend": ("attend", 4, 3),
    "combine": ("combine", 4, 2),
}


def _variant(name: str, served: str, signature: dict[str, str], constants: Mapping[str, int]) -> Variant:
    module = next(module for prefix, module in MODULES.items() if name.startswith(f"{prefix}_"))
    function, warps, stages = next(kind for word, kind in KINDS.items() if f"_{word}_" in name)
    return Variant(name, served, module, function, signature, dict(constants), warps, stages)
