"""Where patched models differ from others on purpose: models that are refused, and the tests that notice."""

from peers.outcomes import Refusal

_NOT_PI = (
    "rescaling 'pi' starts from RoPE parameters of type default or linear"  # the test of each rope type builds others
)
_NOT_DYNAMIC = "rope type 'dynamic' chooses its frequencies by the longest sequence so far"

# mode -> parts of the errors with which models may be refused
REFUSED_MODELS = {
    "standard": (),
    "same-places": (_NOT_PI,),
    "tripled": (_NOT_DYNAMIC,),
}

# mode -> tests that fail
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "standard": (),
    "same-places": (),
    "tripled": (
        Refusal(
            error="AssertionError",
            reason="The model with rope type 'dynamic' is refused and keeps its indices, the one that it is compared "
            "with has threefold ones.",
            tests=("test_model_rope_scaling_from_config_1_dynamic",),
        ),
    ),
}
