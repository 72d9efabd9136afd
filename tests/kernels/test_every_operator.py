"""Every public operator has its twin, test and benchmark: where one lacks, the failing test says what to add."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import rope_kernels

ROOT = Path(__file__).parents[2]
MAKES_AN_ARGUMENT = {"make_visibility"}  # what operators are given: it computes no loss and no attention
OPERATORS = [
    name
    for name in rope_kernels.__all__
    if inspect.isfunction(getattr(rope_kernels, name)) and not name.endswith("_ref") and name not in MAKES_AN_ARGUMENT
]


def imports(file, name):
    """Whether a script imports the operator from `rope_kernels`."""
    return file.is_file() and any(
        isinstance(node, ast.ImportFrom) and node.module == "rope_kernels" and name in {a.name for a in node.names}
        for node in ast.walk(ast.parse(file.read_text()))
    )


def lacking(family, name):
    """What has to be added for an operator of a family, a line for each file."""
    reference = importlib.import_module(f"rope_kernels.{family}.reference")
    lines = []
    if not (ROOT / "kernels" / "rope_kernels" / family / f"{name}.py").is_file():
        lines.append(f"kernels/rope_kernels/{family}/{name}.py: the public operator `{name}`")
    if not hasattr(reference, f"{name}_ref"):
        lines.append(
            f"kernels/rope_kernels/{family}/reference.py: `def {name}_ref(...)`, the formula in plain torch, in "
            "the dtype of its arguments"
        )
    if not imports(ROOT / "tests" / "kernels" / family / f"test_{name}.py", name):
        lines.append(
            f"tests/kernels/{family}/test_{name}.py: `from rope_kernels import {name}`, and tests of values and every "
            f"gradient against `{name}_ref` in float64"
        )
    if not any(imports(script, name) for script in (ROOT / "benchmarks").glob("*.py")):
        lines.append(
            f"benchmarks/: `from rope_kernels import {name}`, timed beside a peer: OPERATORS of relation_kl.py "
            "for row_kl and of linear_ce_kl.py for vocabulary, eval_speed.py for decode, a script of its own for others"
        )
    return lines


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_its_twin_its_test_and_its_benchmark(name):
    package, family, _ = getattr(rope_kernels, name).__module__.split(".")
    assert package == "rope_kernels"
    lines = lacking(family, name)
    assert not lines, f"{name} lacks\n" + "\n".join(f"- {line}" for line in lines)


def test_what_lacks_is_named():
    assert [line.split(":")[0] for line in lacking("decode", "prefill_attention")] == [
        "kernels/rope_kernels/decode/prefill_attention.py",
        "kernels/rope_kernels/decode/reference.py",
        "tests/kernels/decode/test_prefill_attention.py",
        "benchmarks/",
    ]


def test_a_twin_that_is_exported_is_that_of_an_operator():
    assert {name.removesuffix("_ref") for name in rope_kernels.__all__ if name.endswith("_ref")} <= set(OPERATORS)
