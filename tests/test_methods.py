"""Methods are found by file name."""

from __future__ import annotations

import pytest

from compress import methods
from compress.distill import DISTRIBUTION, HIDDEN_STATES
from compress.errors import InputError
from compress.shrink import MEASURED


def test_names_are_files_with_a_config() -> None:
    assert methods.names("quantize") == ["gptq", "llm_int8", "rtn"]
    assert methods.names("transform") == ["awq", "permute", "smoothquant"]


INPUTS = {"absmax", "mean_abs", "mean_square", "hessian", "outliers"}
KNOWN_NEEDS = {"shrink": set(MEASURED), "distill": {DISTRIBUTION, HIDDEN_STATES}}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in methods.KINDS for name in methods.names(kind)])
def test_every_method_keeps_the_contract(kind: str, name: str) -> None:
    method = methods.find(kind, name)
    assert method.__name__ == f"compress.{kind}.{name}"
    assert method.Config.model_config["frozen"] and method.Config.model_config["extra"] == "forbid"
    assert method.Config() == method.Config()  # every setting has a default
    assert KNOWN_NEEDS.get(kind, INPUTS) >= method.NEEDS
    assert methods.summary(method)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("quantize", "gtpq", "method: 'gtpq' is not known; did you mean 'gptq'? Known: gptq, llm_int8, rtn"),
        ("quantize", "scales", "method: 'scales' is not known. Known: gptq, llm_int8, rtn"),
        ("quantize", "../rtn", "method: '../rtn' is not known; did you mean 'rtn'? Known: gptq, llm_int8, rtn"),
        (
            "quantise",
            "rtn",
            "kind: 'quantise' is not known; did you mean 'quantize'? "
            "Known: shrink, transform, prune, quantize, distill",
        ),
    ],
)
def test_unknown_names_get_the_nearest(kind: str, name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        methods.find(kind, name)
    assert str(caught.value) == message
