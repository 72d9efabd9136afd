"""What no view can be made of, or do, is said by name."""

import pytest
import torch
from support.tiny import tiny
from support.views import key

from rope_patch import patch_model
from rope_patch.views import (
    RPE,
    VIEWS,
    ChunkPermute,
    Compose,
    Cream,
    Cycling,
    Dilation,
    EndPrompt,
    Linear,
    LongRecipe,
    Mix,
    NoPE,
    PerLayer,
    PosAug,
    PoSE,
    Skip,
    Standard,
    Step,
    Uniform,
)

SENTENCES = LongRecipe(target=400, sentence_ends=[7])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ChunkPermute(blocks=1),
            "view 'chunk-permute': blocks must be an integer of at least 2 and at most 64, got 1.",
        ),
        (lambda: Compose([Skip(), NoPE()]), "view 'nope' leaves no distances that other views could change"),
        (lambda: Compose([Dilation(), RPE()]), "view 'rpe' takes the index of a token, so it must come first"),
        (lambda: Compose([]), "views must be a list of views, at least 1, got \\[\\]."),
        (lambda: Compose([3]), "view 'compose' takes views such as Skip\\(.* or a name, got 3."),
        (lambda: Compose(["skp"]), "Unknown view 'skp'. Did you mean 'skip'"),
        (lambda: Compose([Mix([Skip(), Standard()])]), "view 'compose': .* cannot be part of another view, got Mix"),
        (
            lambda: Compose([{"view": "skip", "spilt": 3}]),
            "Unknown option 'spilt' of view 'skip'. Did you mean 'split'",
        ),
        (  # each of them alone is within 2**24
            lambda: Compose([Skip(split=5, skip=2**23), PosAug(8.0)]).check_length(30),
            "view 'compose': RoPE indices would reach 67109096",
        ),
        (lambda: EndPrompt(target=9, cue_tokens=True), "cue_tokens must be an integer of at least 0, got True"),
        (
            lambda: EndPrompt(target=1, cue_tokens=1),
            "'endprompt': target must be an integer of at least 2 and .*, got 1",
        ),
        (lambda: EndPrompt(target=9, cue_tokens=[[3], [3]]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens="word"), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=1, placement="start"), "placement must be one of"),
        (lambda: Mix([Skip()]), "views must be a list of views, at least 2, got \\[Skip"),
        (lambda: Mix([Skip(), Mix([Skip(), Standard()])]), "'mix': .* cannot be part of another view, got Mix"),
        (lambda: Mix([Skip(), VIEWS["random-base"]()]), "rescales frequencies.* cannot be part of another view"),
        (lambda: Mix([Skip(), Standard(), Skip()]), "is given twice: give it once, with the sum"),
        (lambda: Mix([Skip(), Standard()], [0.5]), "shares must be a list of 2 numbers, one a view, or None, got"),
        (
            lambda: Mix([Skip(), Standard()], [0.5, True]),
            "each of shares must be a number above 0 and below 1, got True",
        ),
        (lambda: Mix([Skip(), Standard()], [0.5, 0.4]), "shares must add up to 1, got \\(0.5, 0.4\\) with sum 0.9"),
        (lambda: PerLayer(Mix([Skip(), Standard()]), "top"), "view 'per-layer': .* cannot be part of another view"),
        (lambda: PerLayer({"view": "yarn"}), "'yarn' is a rescaling; a view is one of"),
        (lambda: PosAug(granularity="row"), "granularity must be one of"),
        (lambda: PosAug(Cycling([1, 2]), "sample"), "law 'cycling' has one value a step, got granularity='sample'"),
        (
            lambda: PosAug(Step(Cycling([1, 2])), "sample"),
            "law 'cycling' has one value a step, got granularity='sample'",
        ),
        (lambda: PosAug().check_length(2**22), "RoPE indices would reach 33554424; at most 16777216"),
        (lambda: PoSE(target=9, chunks=1), "chunks must be an integer of at least 2 .*, got 1"),
        (lambda: PoSE(target=9, window=10), "window must not exceed target=9, got 10"),
        (
            lambda: PoSE(target=90, window=9).check_length(10),
            "documents of 10 tokens must first be shortened to window=9",
        ),
        (lambda: PoSE(target=9).check_length(10), "documents of 10 tokens reach beyond target=9"),
        (
            lambda: RPE(max_index=16).check_length(17),
            "documents of 17 tokens have no 17 different indices below",
        ),
        (
            lambda: Skip(split=12).check_length(12),
            "split must be below the number of tokens .*, got split=12",
        ),
        (lambda: Skip(split="line"), "split must be one of \\('sentence', 'paragraph', 'document'\\), got 'line'"),
        (lambda: Skip(split=[13]), "split must be one of .*, or lists of the token IDs after which it may fall"),
        (lambda: Skip(split=[[13]]).draw(torch.tensor([[5]]), key(1)), "'skip' with a split at borders reads tokens"),
        (lambda: Skip().check_length(2**24), "RoPE indices would reach 33554431"),
        (lambda: Skip(skip=Linear(Uniform(), start=2**24)).check_length(21), "RoPE indices would reach 16777236"),
        (lambda: Skip(Uniform(2)).affected_share(torch.tensor([1]), torch.tensor([9])), "does not know how often"),
        (lambda: Cream(target=9, sigma="3"), "sigma must be a number above 0, got '3'"),
        (lambda: LongRecipe(target=9, sentence_ends=[]), "sentence_ends must be a list of one or more"),
        (lambda: LongRecipe(target=9, sentence_ends=[1.5]), "sentence_ends must be a list of one or more"),
        (lambda: SENTENCES.draw(torch.tensor([[5]]), key(1)), "view 'longrecipe' reads tokens: use draw_for"),
        (lambda: patch_model(tiny(), "per-layer", view=SENTENCES), "cannot be drawn for each layer"),
    ],
)
def test_what_a_view_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
