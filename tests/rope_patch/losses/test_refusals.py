"""What no loss can be made of, of which options or which model, is said."""

import pytest
from peft import LoraConfig, get_peft_model
from support.tiny import tiny

from rope_patch import patch_model
from rope_patch.losses import (
    Control,
    CopiedTeacher,
    CueWeight,
    HiddenDistiller,
    HiddenTargets,
    LogitKL,
    LongCE,
    NativeTargets,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    SharedTeacher,
    ViewConsistency,
)


def patched(method, **options):
    return patch_model(tiny(), method, **options)


def with_flash():
    model = tiny()
    model.config._attn_implementation = "flash_attention_2"
    return model


def with_trained_norm():
    model = get_peft_model(patched("pi", factor=2.0), LoraConfig(target_modules=["q_proj"]))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelationTargets(q=-1.0), "weight of 'q' must be a number of at least 0, got -1.0"),
        (lambda: RelationTargets(q=0, k=0, v=0), "nothing to distil"),
        (lambda: RelationTargets(rope="none"), r"rope must be one of \('post', 'pre'\), got 'none'"),
        (lambda: RelationTargets(layers=(1, 1)), "different layer indices"),
        (lambda: RelationTargets(layers=3), r"layers must be a list of .*e.g. \[3\], or None, got 3"),
        (lambda: RelationTargets(layers="12"), "layers must be a list of .*got '12'"),
        (lambda: RelationTargets(layers=[True, False]), r"layers must be a list of .*got \[True, False\]"),
        (lambda: RelationTargets(divergence="mse", attention=1.0), "set attention=0"),
        (lambda: LogitKL(weight=float("nan")), "weight must be a number of at least 0, got nan"),
        (lambda: LogitKL(weight=1.0, last=0), "last must be an integer of at least 1, got 0"),
        (lambda: LogitKL(weight=1.0, temperature=0.0), "temperature must be a number above 0"),
        (lambda: HiddenTargets(weight=0), "weight must be a number above 0, got 0"),
        (lambda: HiddenTargets(short_to_long=-1.0), "short_to_long must be a number of at least 0"),
        (lambda: HiddenTargets(layers=2), "layers must be a list of .*got 2"),
        (
            lambda: (
                (m := patched("pi", factor=2.0))
                and HiddenDistiller(m, HiddenTargets(short_to_long=1.0), CopiedTeacher(m))
            ),
            "short_to_long compares a view with true positions",
        ),
        (lambda: RelationDistiller(tiny(), RelationTargets(), CopiedTeacher(tiny())), "have the same RoPE"),
        (
            lambda: (
                (m := patched("pi", factor=2.0))
                and RelationDistiller(m, RelationTargets(layers=(3,)), CopiedTeacher(m))
            ),
            r"layers must be below 3.*got \(3,\)",
        ),
        (lambda: SharedTeacher(patched("pi", factor=2.0)), "this model has none"),
        (lambda: SharedTeacher(with_trained_norm()), "model.norm.weight and 0 more are trained too"),
        (lambda: ViewConsistency(kl_top=1.5), "kl_top must be a number above 0 and below 1"),
        (lambda: ViewConsistency(kl_longce=True), "kl_longce must hold the fields of LongCE"),
        (lambda: ViewConsistency(direction="both"), "direction must be one of"),
        (lambda: ViewConsistency(kl_weight=-1.0), "weight must be a number of at least 0"),
        (lambda: NativeTargets(weight=0, clm_weight=0), "weight, clm_weight and text_weight are all 0"),
        (lambda: NativeTargets(text_weight=-1), "text_weight must be a number of at least 0, got -1"),
        (lambda: NativeTargets(temperature=0.0), "temperature must be a number above 0, got 0.0"),
        (lambda: NativeTargets(direction="both"), "direction must be one of .*'forward'.* got 'both'"),
        (lambda: LongCE(short_context=0), "short_context must be"),
        (lambda: LongCE(stride=1.5), "stride must be"),
        (lambda: LongCE(cap=0.0), "cap must be"),
        (lambda: Control(kind="weights"), "kind must be one of .*'dropout', 'attention_noise'.* got 'weights'"),
        (
            lambda: Control(kind="dropout", strength=1.0),
            "strength of 'dropout' must be a number above 0 and below 1, got 1.0",
        ),
        (
            lambda: SelfDistiller(patched("skip"), ViewConsistency(), control=Control(kind="dropout")),
            "leave view at 'standard'",
        ),
        (
            lambda: SelfDistiller(with_flash(), ViewConsistency(), control=Control(kind="attention_noise")),
            "attention_noise changes scores, which 'flash_attention_2' does not allow",
        ),
        (
            lambda: SelfDistiller(patched("standard"), ViewConsistency()),
            "compares a view with true positions: give view",
        ),
        (
            lambda: SelfDistiller(patched("pi", factor=2.0), ViewConsistency()),
            "give view='skip' or another that perturbs",
        ),
        (lambda: CueWeight(tokens=0, weight=0.5), "cue_tokens must be an integer of at least 1, got 0"),
        (lambda: CueWeight(tokens=[[1], [1]], weight=0.5), "or different cues as lists"),
        (lambda: CueWeight(tokens=2, weight=-0.1), "cue_weight must be a number of at least 0, got -0.1"),
    ],
)
def test_what_cannot_be_a_loss_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
