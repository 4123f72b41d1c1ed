"""What the runtime itself costs: int8 activations and a narrower cache, each against the same checkpoint without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compress.eval.divergence import summarize
from compress.eval.perplexity import perplexity_ratio
from compress.eval.quality import Progress, measure_losses
from compress.eval.subject import Subject
from compress.eval.text import Windows
from compress.kernels.cpu.kernel import CpuKernel
from compress.runtime.load import Execution, load_model
from compress.runtime.native import NativeDecoder

# Enough for a mean over tokens, few enough for the reference kernel.
TOKENS = 1024


def runtime_costs(subject: Subject, windows: Windows, progress: Progress) -> list[dict[str, Any]]:
    """The report's `costs`: a row for each thing that the runtime rounds and the checkpoint's scheme does not ask for.

    Each is measured on the first windows, about TOKENS tokens, against the checkpoint itself, loaded a second time.
    """
    model, few = subject.model, windows.tokens[: max(1, TOKENS // windows.tokens.shape[1])]
    rows = []
    for name, execution in _exact_runs(subject).items():
        exact = load_model(subject.stored.checkpoint, model.device, execution=execution)
        losses = measure_losses(model, exact, replace(windows, tokens=few), progress)
        assert losses.nll_baseline is not None and losses.kl is not None and losses.agreement is not None
        ratio, stderr = perplexity_ratio(losses.nll, losses.nll_baseline)
        told = summarize(losses.kl.flatten(), losses.agreement.flatten())
        figures = {key: told[key] for key in ("kl_mean", "kl_p99", "top1_agreement")}
        rows.append(
            {"name": name, "tokens": few[:, 1:].numel(), **figures, "ppl_ratio": ratio, "ppl_ratio_stderr": stderr}
        )
    return rows


def _exact_runs(subject: Subject) -> dict[str, Execution]:
    """What the runtime rounds, and how to run the checkpoint without that."""
    network, schemes = subject.model.network, subject.stored.schemes
    runs: dict[str, Execution] = {}
    weight_only = [
        linear
        for name, linear in subject.model.linears.items()
        if name in schemes and schemes[name].activation_bits is None and isinstance(linear.kernel, CpuKernel)
    ]
    if weight_only:
        runs["int8 activations"] = Execution("reference", "f32")
    if isinstance(network, NativeDecoder) and network.kv_cache != "f32":
        runs[f"{network.kv_cache} key-value cache"] = Execution(kv_cache="f32", threads=network.engine.threads)
    return runs
