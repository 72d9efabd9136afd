"""What is compared by research/experiments/keeping.py: rescalings, and recipes of the package's own parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trl_ext.rows.row import SKILLS, shares_with

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """One recipe.

    Args:
        rescale: name and options; None for the native model.
        shares: of each kind of rows; None trains nothing.
        rows: further options of `trl_ext.rows.make_rows`.
        row_length: tokens of a row; None for the window.
        times: rows, in so many times as there are of other arms.
        training: fields of RopeSFTConfig beside those that all arms have.
        lora: rank of adapters on all matrices of layers, which are trained in place of all weights and merged.
        gain: share of the texts to train on, those whose tokens a far context helps most
            (`rope_patch.eval.measures.context_gain`); None takes all.
        kept: share of what training changed in each weight that is kept: weights are w_native + kept (w_trained -
            w_native), WiSE-FT's mix (arXiv:2109.01903), under the arm's rescaling.
        evidence: rows that the model answers itself, taught by the native model which reads one sentence
            (keeping_evidence.py), in so many times as there are of other arms; they are its training then. None for
            training on given rows.
        after: arm whose trained weights `evidence` starts from, or are mixed; None for the native ones, and where
            neither is asked for.
    """

    rescale: tuple[str, Options] | None = None
    shares: Mapping[str, float] | None = None
    rows: Options = field(default_factory=dict)
    row_length: int | None = None
    times: int = 1
    training: Options = field(default_factory=dict)
    lora: int | None = None
    gain: float | None = None
    kept: float = 1.0
    evidence: float | None = None
    after: str | None = None

    def rescaling(self) -> dict[str, Any]:
        """Its fields of RopeSFTConfig."""
        return {} if self.rescale is None else {"rescale": self.rescale[0], "rescale_args": self.rescale[1]}


def arms(
    window: int,
    target: int,
    kind_of_own: Literal["chats", "own_texts"],
    row_length: int | None = None,
    searched: tuple[str, Options] | None = None,
) -> dict[str, Arm]:
    """Every arm by name.

    Args:
        window: tokens that the native model was trained on.
        target: positions to be reached.
        kind_of_own: kind of rows that the model wrote itself, "chats" or, of a base model, "own_texts".
        row_length: tokens of the rows that are trained on; None for the window, and for four windows in arm "pose".
        searched: a rescaling that was searched for (factor_search.py): adds two arms, of it untrained and trained.
    """
    times = target / window
    yarn = ("yarn", {"factor": times})
    # YaRN's logits are not multiplied by its temperature, nor, as served, are q and k
    cold, cold_2 = (("yarn", {"factor": factor, "attention_factor": 1.0}) for factor in (times, 2 * times))
    ntk, ntk_2, ntk_4 = (("ntk", {"factor": factor}) for factor in (times, 2 * times, 4 * times))
    gaps = {"view": "mix", "view_args": {"views": ["standard", {"view": "pose", "target": target, "chunks": 4}]}}
    distilled = {**gaps, "objective": "native-distill", "learning_rate": 3e-4}
    weights = {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.3}
    keep = Arm(
        ntk_4,
        {"text": 1.0, kind_of_own: 1.0, "questions": 1.0},
        {"short": 0.25},
        row_length,
        training={**distilled, "objective_args": weights},
    )
    no_kl = replace(keep, training={**distilled, "objective_args": {**weights, "weight": 0.0}})
    keep_2, no_kl_2 = (replace(arm, rescale=ntk_2) for arm in (keep, no_kl))
    # next-token loss of answers alone: that of all tokens doubles the KL from the native model
    answers = replace(keep_2, training={**distilled, "objective_args": {**weights, "text_weight": 0.0}})
    # arXiv:2405.09673: adapters take ten times the rate of all weights
    lora = replace(keep_2, training={**distilled, "objective_args": weights, "learning_rate": 3e-3}, lora=64)
    qkv = replace(keep_2, training={**distilled, "objective_args": weights, "trainable": "qkv"})
    slow, no_kl_slow = (replace(arm, training={**arm.training, "learning_rate": 1e-4}) for arm in (keep_2, no_kl_2))
    # fewer steps than of other arms, at their rate; from trained weights at a third of it, as less is left to learn
    evidence = Arm(
        ntk_2, {"questions": 1.0}, row_length=row_length, training={**gaps, "learning_rate": 3e-4}, evidence=0.375
    )
    pose = {
        "view": "pose",
        "view_args": {"target": target, "window": row_length or window},
        "learning_rate": 5e-4,
    }
    skills = replace(keep_2, shares=shares_with(kind_of_own))
    left_out = {
        f"skills-but-{skill}": replace(
            keep_2, shares=shares_with(kind_of_own, tuple(other for other in SKILLS if other != skill))
        )
        for skill in SKILLS
    }
    of_search = (
        {} if searched is None else {"searched": Arm(searched), "keep-2-searched": replace(keep_2, rescale=searched)}
    )
    return {
        "native": Arm(),
        "yarn": Arm(yarn),
        "ntk": Arm(ntk),
        "ntk-2": Arm(ntk_2),
        "ntk-4": Arm(ntk_4),
        "pose": Arm(yarn, {"text": 1.0}, {"short": 0.0, "label_all": True}, row_length or 4 * window, training=pose),
        "no-kl": no_kl,
        "no-kl-2": no_kl_2,
        "no-kl-cold": replace(no_kl, rescale=cold),
        "no-kl-cold-2": replace(no_kl, rescale=cold_2),
        "keep": keep,
        "keep-2": keep_2,
        "keep-2-long": replace(keep_2, times=2),
        "keep-2-kl-3": replace(keep_2, training={**distilled, "objective_args": {**weights, "weight": 3.0}}),
        "keep-2-quarter": replace(keep_2, kept=0.25, after="keep-2"),
        "keep-2-half": replace(keep_2, kept=0.5, after="keep-2"),
        "keep-2-three-quarters": replace(keep_2, kept=0.75, after="keep-2"),
        "keep-2-lora": lora,
        "keep-2-lora-slow": replace(lora, training={**lora.training, "learning_rate": 1e-3}),
        "keep-2-qkv": qkv,
        "keep-2-slow": slow,
        "skills": skills,
        **left_out,
        "skills-no-kl-slow": replace(skills, training=no_kl_slow.training),
        "skills-lora-slow": replace(skills, training={**lora.training, "learning_rate": 1e-3}, lora=64),
        "keep-2-slow-long": replace(slow, times=2),
        "no-kl-2-slow-long": replace(no_kl_slow, times=2),
        "keep-2-gain": replace(keep_2, gain=1 / 3),
        # DroPE: positions are dropped, and training is to make up for them; without gaps, which would move nothing
        "drop": replace(
            keep_2,
            rescale=("drop-rope", {"max_position_embeddings": target}),
            training={"objective": "native-distill", "objective_args": weights, "learning_rate": 3e-4},
        ),
        "keep-2-answers": answers,
        "keep-2-answers-half": replace(answers, kept=0.5, after="keep-2-answers"),
        "keep-2-answers-short": replace(answers, rows={"short": 0.5}),
        "keep-2-answers-chats": replace(answers, shares={**answers.shares, kind_of_own: 2.0}),
        "evidence": evidence,
        "keep-2-evidence": replace(evidence, training={**gaps, "learning_rate": 1e-4}, after="keep-2"),
        "keep-cold": replace(keep, rescale=cold),
        "keep-cold-2": replace(keep, rescale=cold_2),
        **of_search,
    }
