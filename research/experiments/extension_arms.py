"""What is compared by research/experiments/extension.py: methods that train in short windows, their forms and combinations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CUE = "sentence"
CUES = (CUE, "word", "end-of-turn")  # the paper's three


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Args:
        fields: of RopeSFTConfig, None for no training.
        row: tokens of a row as it is cut from the text.
        read: tokens of it that are trained on, a cue included.
        long: share of the tokens that go to next-token training at full length, after the others.
    """

    fields: dict[str, Any] | None
    row: int
    read: int
    long: float = 0.0


def skip_distillation(max_skip: int, law: str = "uniform", **curriculum: Any) -> dict[str, Any]:
    """Fields of RopeSFTConfig: the model's own predictions at true positions teach those under a skip."""
    skip = {"law": law, "high": max_skip, **curriculum}
    return {"objective": "self-distill", "view": "skip", "view_args": {"skip": skip}}


def methods(window: int, target: int, cue: int) -> dict[str, Method]:
    """The methods that papers propose, their controls and skip distillation, by name.

    Args:
        window: native, in tokens.
        target: in positions.
        cue: tokens of EndPrompt's cue.
    """
    end = {"view": "endprompt", "view_args": {"target": target}, "cue": CUE}
    at_random = {"view_args": {"target": target, "placement": "random"}}
    alpha = {"law": "uniform", "low": window / target, "high": target / window}
    return {
        "none": Method(None, window, window),
        "full length": Method({}, target, target),
        "endprompt": Method(end, window - cue, window),
        "et(pose)": Method({**end, **at_random}, window - cue, window),
        "b=0": Method({**end, "cue": "none"}, window, window),
        "pose": Method(
            {"view": "pose", "view_args": {"target": target, "window": window}}, min(4 * window, target), window
        ),
        "posaug": Method({"view": "posaug", "view_args": {"alpha": alpha}}, window, window),
        "skip distil": Method(skip_distillation(target - window), window, window),
        "longrecipe": Method({"view": "longrecipe", "view_args": {"target": target}}, window, window),
    }


def combinations(window: int, target: int) -> dict[str, Method]:
    """Forms of skip distillation, and what none of the papers has; parents are "b=0", "skip distil" and "posaug".

    Args:
        window: native, in tokens.
        target: in positions.
    """
    far, factor = target - window, target / window
    skip = skip_distillation(far)
    alphas = {"low": 1 / factor, "high": factor}
    by_rows = {"alpha": {"law": "uniform", **alphas}, "granularity": "sample"}
    scaled = {"alpha": {"law": "log-uniform", **alphas}, "granularity": "sample"}

    def with_args(**args: Any) -> dict[str, Any]:
        return {**skip, "objective_args": args}

    fields_by_name: dict[str, dict[str, Any]] = {
        # what of the view or of the distillation does it
        "clm on skips": {"view": "skip", "view_args": skip["view_args"]},
        "skip distil near": skip_distillation(far // 4),
        "skip distil log": skip_distillation(far, law="log-uniform"),
        "skip distil late": skip_distillation(far, curriculum="step"),
        "several gaps": {
            "objective": "self-distill",
            "view": "pose",
            "view_args": {"target": target, "chunks": 4},
            "objective_args": {"reduction": "token"},
        },
        # another teacher, other weights of rows
        "native teacher": with_args(teacher="native"),
        "uniform rows": with_args(reduction="uniform"),
        "longce rows": with_args(kl_longce={"short_context": window // 8, "stride": window // 16}),
        "top rows": with_args(kl_top=0.5),
        # other methods with it, and by themselves
        "posaug, rows": {"view": "posaug", "view_args": by_rows},
        "posaug kl": {"objective": "self-distill", "view": "posaug", "view_args": scaled},
        "skip and posaug kl": {
            "objective": "self-distill",
            "view": "compose",
            "view_args": {"views": [{"view": "skip", **skip["view_args"]}, {"view": "posaug", **scaled}]},
        },
        "restore and extend": {**skip, "objective_args": {"restore": {"every": 4}}},
    }
    long = {f"skip distil, {share:.0%} long": Method(skip, window, window, share) for share in (0.25, 0.5)}
    return {**{name: Method(fields, window, window) for name, fields in fields_by_name.items()}, **long}


def endprompt_forms(window: int, target: int, cues: Mapping[str, int]) -> dict[str, Method]:
    """EndPrompt with the paper's other cues, one that counts less, and the last tokens of the body in place of one.

    "b=0", "endprompt", whose cue is the sentence, "et(pose)", which has it whole at random places, as the authors'
    code, and "pose" are in `methods`. "et(pose), parts" has two parts of it there. The authors' code moves the last 20
    tokens, cue or not.

    Args:
        window: native, in tokens.
        target: in positions.
        cues: tokens of each cue.
    """
    end = {"view": "endprompt"}
    forms = {
        f"cue {name}": Method({**end, "view_args": {"target": target}, "cue": name}, window - n, window)
        for name, n in cues.items()
        if name != CUE
    }
    with_sentence = {
        "et(pose), parts": {"view_args": {"target": target, "placement": "parts"}},
        # the paper weighs the cue less than the text, by how much it does not say
        "cue weight 0.1": {"view_args": {"target": target}, "objective_args": {"cue_weight": 0.1}},
    }
    forms |= {
        name: Method({**end, **fields, "cue": CUE}, window - cues[CUE], window)
        for name, fields in with_sentence.items()
    }
    for b in (1, 11, 20, 64, 512):
        forms[f"last {b}"] = Method({**end, "view_args": {"target": target, "cue_tokens": b}}, window, window)
    return forms


def every_method(window: int, target: int, cues: Mapping[str, int]) -> dict[str, Method]:
    """`methods`, `endprompt_forms` and `combinations`."""
    return {
        **methods(window, target, cues[CUE]),
        **endprompt_forms(window, target, cues),
        **combinations(window, target),
    }
