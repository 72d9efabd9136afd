"""Names of other installed packages are found wherever ours are, and nothing is imported before it is named."""

import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.packages import installed
from support.tiny import tiny, tokens

from rope_patch import describe, load_adapter, patch_model, rope_view
from rope_patch.methods import list_methods, resolve_rescaling, resolve_view
from rope_patch.rescalings import RESCALINGS
from rope_patch.views import VIEWS

CODE = '''
from dataclasses import dataclass
from rope_patch.rescalings import RESCALINGS, Rescaling
from rope_patch.views import VIEWS, View

@VIEWS.register("twice-as-far")
@dataclass(frozen=True)
class TwiceAsFar(View):
    """r(t) = 2 t."""

    def draw(self, length, key):
        return {}

    def rope_index(self, t, parameters):
        return 2 * t

@RESCALINGS.register("half-speed")
@dataclass(frozen=True)
class HalfSpeed(Rescaling):
    """theta' = theta / 2."""

    def target_window(self, native_window):
        return None

    def rope_parameters(self, native):
        return {"rope_type": "linear", "factor": 2.0, "rope_theta": native.rope_parameters["rope_theta"]}
'''
IDS = tokens(1, 40)
DECLARED = {"views": ["twice-as-far"], "rescalings": ["half-speed"]}


@pytest.fixture
def others(tmp_path):
    with installed(tmp_path / "site", "of_others", CODE, **DECLARED):
        yield


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_script_names_them_without_an_import(others):
    """Tokens twice as far apart, at half of the speed, turn as they did."""
    model = patch_model(tiny(), "half-speed")
    assert (logits(model) - logits(tiny())).abs().max() > 1e-3
    with rope_view(model, "twice-as-far"):
        torch.testing.assert_close(logits(model), logits(tiny()))
    with rope_view(model, resolve_view("compose", {"views": [{"view": "twice-as-far"}, {"view": "standard"}]})):
        torch.testing.assert_close(logits(model), logits(tiny()))
    assert describe(model).rescaling == "half-speed ()"


def test_an_adapter_brings_the_rescaling_that_it_was_trained_with(others, tmp_path):
    model = get_peft_model(patch_model(tiny(), "half-speed"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    RESCALINGS.pop("half-speed")
    sys.modules.pop("of_others")
    VIEWS.pop("twice-as-far")
    torch.testing.assert_close(logits(load_adapter(tiny(), tmp_path / "adapter")), logits(model))


def test_nothing_is_imported_before_it_is_named(others):
    assert {"twice-as-far", "half-speed"} < {*list_methods()}
    resolve_view("skip", {"split": 1, "skip": 2})
    patch_model(tiny(), "yarn", factor=2.0)
    with pytest.raises(
        ValueError, match=r"Unknown view 'twice-as-fa'\. Did you mean 'twice-as-far'\? Known: .*twice-as"
    ):
        resolve_view("twice-as-fa")
    with pytest.raises(ValueError, match="Unknown method 'half-sped'. Did you mean 'half-speed'"):
        patch_model(tiny(), "half-sped")
    assert "of_others" not in sys.modules
    with pytest.raises(ValueError, match="'half-speed' is a rescaling; a view is one of .*twice-as-far"):
        resolve_view("half-speed")


@pytest.mark.parametrize(
    ("code", "why"),
    [("import nothing_of_this_name", "cannot be loaded: No module named"), ("x = 1", "registers no rescaling of that")],
)
def test_a_package_that_does_not_keep_its_word_is_named(code, why, tmp_path):
    with installed(tmp_path, "broken", code, rescalings=["never"]):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"broken.*{why}"):
                resolve_rescaling("never")
        assert resolve_rescaling("pi", {"factor": 2.0}).factor == 2
