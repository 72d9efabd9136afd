"""Rescalings that give frequencies: what is written for them, from what they start, and what makes no sense."""

import math
import sys
from dataclasses import dataclass

import pytest
import torch
from support.families import tiny_family
from support.gathered import gathered
from support.packages import installed
from support.rescalings import NATIVE, PAIR, THETA, D, L, require_refused
from support.tiny import WINDOW, gemma3, tiny, tokens
from transformers import AutoModelForCausalLM, GraniteSWAForCausalLM

from rope_patch import native_rope, patch_model, unpatch_model
from rope_patch.rescalings import PI, RESCALINGS, Rescaling
from rope_patch.testing import check_rescaling

CASES = gathered(RESCALINGS, "CASES")

# a package as somebody else writes it, with CoPE in it
PACKAGE = '''
"""CoPE, arXiv:2602.05258, as a rescaling."""
import math
from dataclasses import dataclass
import torch
from rope_patch.rescalings import RESCALINGS, Rescaling


@RESCALINGS.register("outside-cope")
@dataclass(frozen=True)
class CoPE(Rescaling):
    """theta'_j = theta_j for fast pairs, theta_j * 0.5 (1 + cos(pi i / (n - 1))) for the slowest n, i = 0..n-1.

    Args:
        n: pairs that are clipped, at least 2.

    When: Take it for a window beyond the trained one without a factor.

    Source: arXiv:2602.05258.
    """

    n: int = 12

    def frequencies(self, theta, native):
        theta[-self.n :] *= 0.5 * (1 + torch.cos(torch.linspace(0, math.pi, self.n)))
        return theta
'''
FADE = torch.tensor([1.0, 1.0, 0.5, 0.0], dtype=torch.float64)  # of n = 3 in float64
STILL = 3e38


@pytest.fixture
def cope(tmp_path):
    with installed(tmp_path / "outside", "outside_cope", PACKAGE, rescalings=["outside-cope"]):
        yield "outside-cope"


def require_turns(model, frequencies, scaling=1.0, layer_type=None):
    """That cos and sin of the model's rotary module are those of float64, within the trained window and beyond it."""
    t = torch.tensor([0, 1, 2, 7, WINDOW - 1, WINDOW, 5 * WINDOW])
    angles = (t.double()[:, None] * frequencies).repeat(1, 2)
    kind = () if layer_type is None else (layer_type,)
    cos, sin = model.model.rotary_emb(torch.zeros(1), t[None], *kind)
    torch.testing.assert_close(cos[0].double(), angles.cos() * scaling, rtol=0, atol=5e-5)
    torch.testing.assert_close(sin[0].double(), angles.sin() * scaling, rtol=0, atol=5e-5)


@pytest.fixture
def given(monkeypatch):
    """Registers a rescaling "given" that has these frequencies and, maybe, this attention scaling; the class."""

    def register(frequencies, scaling=None):
        @dataclass(frozen=True)
        class Given(Rescaling):
            def frequencies(self, theta, native):
                return frequencies(theta) if callable(frequencies) else frequencies

            def attention_scaling(self, native):
                return super().attention_scaling(native) if scaling is None else scaling

        monkeypatch.setitem(RESCALINGS, "given", Given)
        Given.name = "given"
        return Given()

    return register


@torch.no_grad()
def test_a_class_of_another_package_keeps_every_promise(cope):
    assert "outside_cope" not in sys.modules
    model = patch_model(tiny(), cope, n=3)
    require_turns(model, NATIVE * FADE)
    assert model.model.rotary_emb.inv_freq[-1] == 0
    assert model.config.max_position_embeddings == WINDOW
    check_rescaling(RESCALINGS[cope](n=3))
    check_rescaling(RESCALINGS[cope](n=2), model=lambda: tiny("qwen3"))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": THETA, "factor": 1.0, "original_max_position_embeddings": WINDOW,
    "attention_factor": 1.0,
}  # fmt: skip
FORMS = {
    "unchanged": (lambda theta: theta, {"rope_type": "default", "rope_theta": THETA}),
    "one ratio": (lambda theta: theta / 3, {"rope_type": "linear", "rope_theta": THETA, "factor": 3.0}),
    "in float32": (
        lambda theta: theta.float() / 3,
        {"rope_type": "linear", "rope_theta": THETA, "factor": pytest.approx(3.0, rel=1e-6)},
    ),
    "another base": (lambda theta: 5e5 ** (-2 * PAIR / D), {"rope_type": "default", "rope_theta": 5e5}),
    "another base, rounded": (
        lambda theta: 5e5 ** (-2 * PAIR / D) * (1 + 1e-7),
        {"rope_type": "default", "rope_theta": pytest.approx(5e5)},
    ),
    "both": (lambda theta: 5e5 ** (-2 * PAIR / D) / 7, {"rope_type": "linear", "rope_theta": 5e5, "factor": 7.0}),
    # Transformers warns of a factor below 1
    "faster": (lambda theta: 2 * theta, {**LONGROPE, "long_factor": [0.5] * 4, "short_factor": [0.5] * 4}),
    "others": (
        lambda theta: theta / torch.tensor([1, 1.5, 1.25, 1]),
        {**LONGROPE, "long_factor": [1, 1.5, 1.25, 1], "short_factor": [1, 1.5, 1.25, 1]},
    ),
    "some 0": (
        lambda theta: theta * torch.tensor([1, 1, 0, 0]),
        {**LONGROPE, "long_factor": [1, 1, STILL, STILL], "short_factor": [1, 1, STILL, STILL]},
    ),
    "all 0": (torch.zeros_like, {**LONGROPE, "long_factor": [STILL] * 4, "short_factor": [STILL] * 4}),
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_plainest_form_is_written(form, given):
    frequencies, written = FORMS[form]
    model = patch_model(tiny(), given(frequencies))
    assert model.config.rope_parameters == written
    require_turns(model, frequencies(NATIVE.clone()).double())


@torch.no_grad()
def test_an_attention_scaling_is_written_and_loads_in_transformers(given, tmp_path):
    model = patch_model(tiny(), given(lambda theta: theta / 2, 1.3))
    assert model.config.rope_parameters == {
        **LONGROPE, "attention_factor": 1.3, "long_factor": [2.0] * 4, "short_factor": [2.0] * 4,
    }  # fmt: skip
    require_turns(model, NATIVE / 2, 1.3)
    model.save_pretrained(tmp_path)
    require_turns(AutoModelForCausalLM.from_pretrained(tmp_path), NATIVE / 2, 1.3)


@pytest.mark.parametrize("method", sorted(set(CASES) - {"dynamic-ntk", "longrope"}))
@torch.no_grad()
def test_a_rescaled_model_that_was_saved_is_where_another_starts(method, cope, tmp_path):
    """The frequencies of every RoPE type that does not follow the length, and its attention factor."""
    patch_model(tiny(), method, **CASES[method].options).save_pretrained(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    before = model.config.to_dict()
    frequencies, scaling = CASES[method].expected(L)
    patch_model(model, cope, n=3)
    require_turns(model, frequencies * FADE, scaling)
    model.save_pretrained(tmp_path / "again")
    require_turns(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), frequencies * FADE, scaling)
    with native_rope(model):
        require_turns(model, frequencies, scaling)
    assert unpatch_model(model).config.to_dict() == before


EQUAL = [1.0, 2.0, 3.0, 4.0]
NATIVES = {
    "longrope": ({"factor": 4.0, "long_factor": EQUAL, "short_factor": EQUAL,
                  "original_max_position_embeddings": WINDOW // 4},
                 NATIVE / torch.tensor(EQUAL), math.sqrt(1 + math.log(4) / math.log(WINDOW / 4))),
    "proportional": ({"partial_rotary_factor": 0.75}, NATIVE * torch.tensor([1, 1, 1, 0]), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("rope_type", NATIVES)
@torch.no_grad()
def test_native_types_that_no_rescaling_of_ours_writes(rope_type, cope):
    options, native, scaling = NATIVES[rope_type]
    model = tiny(rope_parameters={"rope_type": rope_type, "rope_theta": THETA, **options})
    require_turns(model, native, scaling)
    require_turns(patch_model(model, cope, n=4), native * torch.tensor([1, 0.75, 0.25, 0]), scaling)


@torch.no_grad()
def test_a_family_with_pairs_that_stand_still_by_themselves(cope, tmp_path):
    model, ids = tiny_family("lfm3"), tokens(1, 20)
    plain = model(ids).logits
    seen = patch_model(model, cope, n=7)(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(ids).logits, seen)
    assert not torch.equal(seen, plain) and torch.equal(unpatch_model(model)(ids).logits, plain)


def test_a_family_that_has_no_type_for_them_is_refused(cope):
    """Gemma 4's heads differ in size by layer, of which LongRoPE in Transformers knows nothing."""
    model = tiny_family("gemma4_text")
    before = model.config.to_dict()
    with pytest.raises(ValueError, match="Transformers does not accept these RoPE parameters for .* 'gemma4_text'"):
        patch_model(model, cope, n=15)
    assert model.config.to_dict() == before


def test_an_option_of_a_class_is_not_taken_for_one_of_the_native_parameters():
    """An option that is left open keeps its native value, where a rescaling writes RoPE parameters of a type."""

    @dataclass(frozen=True)
    class Sharper(Rescaling):
        name = "sharper"
        attention_factor: float | None = None

        def frequencies(self, theta, native):
            return theta / 2

        def attention_scaling(self, native):
            return self.attention_factor or 1.5

    options, _, _ = NATIVES["longrope"]
    native = {"rope_type": "longrope", "rope_theta": THETA, **options, "attention_factor": 1.2}
    model = patch_model(tiny(rope_parameters=native), Sharper())
    require_turns(model, NATIVE / torch.tensor(EQUAL) / 2, 1.5)


def test_a_second_rescaling_replaces_the_first(cope):
    once, twice = patch_model(tiny(), cope, n=3), patch_model(patch_model(tiny(), "yarn", factor=4.0), cope, n=3)
    assert once.config.to_dict() == twice.config.to_dict()
    yarn = patch_model(tiny(), "yarn", factor=4.0)
    assert patch_model(twice, "yarn", factor=4.0).config.to_dict() == yarn.config.to_dict()


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": EQUAL},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_frequencies_that_follow_the_length_are_no_start(rope_parameters, cope):
    model = tiny(rope_parameters={"rope_theta": THETA, **rope_parameters})
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=f"the same for texts of every length; .*'{rope_parameters['rope_type']}'"):
        patch_model(model, cope, n=3)
    assert model.config.to_dict() == before


@torch.no_grad()
def test_only_layers_that_look_far_are_rescaled(cope):
    model = gemma3()
    native = model.model.rotary_emb.full_attention_inv_freq.double()
    patch_model(model, cope, n=3)
    require_turns(model, native * FADE, layer_type="full_attention")
    assert model.config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_layers_with_bases_of_their_own_take_one_set_of_divisors_or_none(cope, given):
    """Transformers builds the layers of Granite SWA from one dictionary, but for the base."""
    config = tiny_family("granite_swa").config
    config.layer_rope_theta = [1e4, 1e6]
    model = GraniteSWAForCausalLM(config)
    before = [rotary.inv_freq.double() for rotary in model.model.rotary_embs]
    patch_model(model, cope, n=3)
    for rotary, native in zip(model.model.rotary_embs, before, strict=True):
        torch.testing.assert_close(rotary.inv_freq.double(), native * torch.cat([torch.ones(4), FADE]))
    with pytest.raises(ValueError, match="'given': no rope_type says its frequencies for model type 'granite_swa'"):
        patch_model(model, given(lambda theta: theta * (theta > 0.05)))


@pytest.mark.parametrize(
    ("frequencies", "got"),
    [
        (lambda theta: theta * math.nan, "got nan for pair 0"),
        (lambda theta: theta - 0.01, r"got -0.00\d+ for pair 3"),
        (lambda theta: 1e300 * theta, r"got 1e\+300 for pair 0"),
        (lambda theta: theta[1:], r"one for each pair of features, got \(3,\)"),
        ([1.0, 0.1, 0.01, 0.001], "got list"),
    ],
    ids=["nan", "negative", "infinite in float32", "shape", "type"],
)
def test_frequencies_that_make_no_sense_are_refused_with_the_name_of_the_class(frequencies, got, given):
    message = rf"rescaling 'given': Given.frequencies must return a tensor \[4\] of finite numbers of at least 0.*{got}"
    require_refused(given(frequencies), {}, message)


@pytest.mark.parametrize("scaling", [0, math.nan, -1.0, "1.2"])
def test_an_attention_scaling_that_makes_no_sense_is_refused(scaling, given):
    require_refused(given(lambda theta: theta, scaling), {}, "Given.attention_scaling .* must be a number above 0, got")


def test_a_class_without_either_method_says_which_it_needs():
    @dataclass(frozen=True)
    class Empty(Rescaling):
        name = "empty"

    with pytest.raises(NotImplementedError, match="Empty must define frequencies, or rope_parameters"):
        patch_model(tiny(), Empty())


def test_the_frequencies_of_a_class_hold_and_not_the_parameters_of_its_parent(monkeypatch):
    @dataclass(frozen=True)
    class Half(PI):
        name = "half"

        def frequencies(self, theta, native):
            return theta / 2

    require_turns(patch_model(tiny(), Half(factor=4.0)), NATIVE / 2)


def test_a_model_on_meta_has_to_be_loaded_unless_its_base_tells_all(cope):
    with torch.device("meta"):
        plain, llama3 = tiny(), tiny(rope_parameters={
            "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        })  # fmt: skip
    assert patch_model(plain, cope, n=3).config.rope_parameters["long_factor"] == pytest.approx([1, 1, 2, STILL])
    with torch.device("meta"):
        assert patch_model(plain, "yarn", factor=2.0).config.rope_parameters["rope_type"] == "yarn"
        assert patch_model(plain, cope, n=2).config.rope_parameters["long_factor"][2:] == [1.0, STILL]
    with pytest.raises(ValueError, match="on the device meta: load the weights first"):
        patch_model(llama3, cope, n=3)


def test_unchanged_frequencies_keep_their_attention_scaling_in_a_longer_window():
    """Transformers takes LongRoPE's factor from the window in the config where none is named."""

    @dataclass(frozen=True)
    class Same(Rescaling):
        name = "same"

        def frequencies(self, theta, native):
            return theta

        def target_window(self, native_window):
            return 8 * native_window

    options, native, _ = NATIVES["longrope"]
    unnamed = {key: value for key, value in options.items() if key != "factor"}
    model = tiny(rope_parameters={"rope_type": "longrope", "rope_theta": THETA, **unnamed})
    scaling = math.sqrt(1 + math.log(4) / math.log(WINDOW / 4))
    require_turns(model, native, scaling)
    require_turns(patch_model(model, Same()), native, scaling)
    assert model.config.max_position_embeddings == 8 * WINDOW


def test_tokens_are_read_with_the_new_frequencies(cope):
    """Logits, not only the module, move."""
    model, ids = tiny(), tokens(1, L)
    plain = model(ids).logits
    assert not torch.equal(patch_model(model, cope, n=4)(ids).logits, plain)
