"""`rope-patch methods` lists what is registered, and explains each in full."""

import re
from dataclasses import dataclass, fields

import pytest
from support.packages import installed

from rope_patch.base.not_here import NOT_HERE
from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS, View
from trl_ext import cli
from trl_ext.cli.catalogue import methods
from trl_ext.objectives import OBJECTIVES
from trl_ext.objectives.base import option_classes

KINDS = {"view": VIEWS, "rescaling": RESCALINGS, "objective": OBJECTIVES}
METHODS = {(method.kind, method.name): method for method in methods()}


def printed(capsys, *arguments):
    assert cli.main(["methods", *arguments]) == 0
    return capsys.readouterr().out


def test_everything_registered_is_listed(capsys):
    assert set(METHODS) == {(kind, name) for kind, known in KINDS.items() for name in known}
    out = printed(capsys)
    for method in METHODS.values():
        assert any(line.split()[:1] == [method.name] for line in out.splitlines())
        assert method.when in " ".join(out.split())


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_each_is_explained_in_full(method, capsys):
    """What one of ours does not say in its docstring shows here."""
    assert method.what and method.when and method.source
    assert method.when.endswith(".") and method.when.count(". ") == 0, "one sentence"
    assert all(option.meaning for option in method.options)
    out = " ".join(printed(capsys, method.name).split())
    for option in method.options:
        assert f"{option.name} ({'required' if option.default is None else f'default {option.default}'}):" in out
    assert all(paper in out for paper in method.papers) and f"Source: {method.source}" in out


@pytest.mark.parametrize("name", OBJECTIVES)
def test_options_of_an_objective_are_those_of_objective_args_with_what_they_hold(name):
    options = OBJECTIVES[name].options_class
    found = [option.name for option in METHODS["objective", name].options]
    assert [option for option in found if "." not in option] == [f.name for f in fields(options)]
    assert set(option_classes(options)) == {option.split(".")[0] for option in found if "." in option}


def test_a_package_that_cannot_be_imported_is_told_and_left_out(tmp_path, capsys, caplog):
    with installed(tmp_path / "site", "far_views", "import nothing_of_this_name", views=["far"]):
        assert cli.main(["methods"]) == 0
    assert "  skip " in capsys.readouterr().out
    assert "view 'far' of far_views cannot be loaded: No module named" in caplog.text


def test_a_view_of_others_is_among_them(capsys):
    @VIEWS.register("far-away")
    @dataclass(frozen=True)
    class FarAway(View):
        """r(t) = t + far.

        Args:
            far: how far, in positions.
        """

        far: int = 3

    try:
        assert "far-away" in printed(capsys)
        out = printed(capsys, "far-away")
        assert "r(t) = t + far." in out and "far (default 3): how far, in positions." in out and "Source" not in out
    finally:
        del VIEWS["far-away"]


@pytest.mark.parametrize(("name", "meant"), [("yran", "yarn"), ("rpsd", "self-distill"), ("Linear", "pi")])
def test_an_unknown_name_leads_to_the_nearest(name, meant, capsys):
    assert cli.main(["methods", name]) == 2
    assert f"Unknown method {name!r}. Did you mean {meant!r}?" in capsys.readouterr().err


def test_a_method_that_is_not_here_is_answered_with_the_nearest(capsys):
    assert cli.main(["methods", "opsdl"]) == 2
    err = capsys.readouterr().err
    assert "Unknown method 'opsdl'. Distillation on texts that the student writes" in err and "Did you mean" not in err


def test_what_is_not_here_is_not_here_and_what_it_names_is():
    ours = {name for method in METHODS.values() for name in (method.name, *method.synonyms)}
    assert not {name for names in NOT_HERE for name in names.split()} & ours
    options = {option.name for method in METHODS.values() for option in method.options}
    for answer in NOT_HERE.values():
        for name in re.findall(r"'([a-z0-9-]+)'", answer.replace("loss_type='dft'", "")):
            assert name in ours | options, answer
