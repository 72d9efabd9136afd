"""Where patched models differ from others on purpose: models that are refused, and the tests that notice."""

from peers.outcomes import Refusal

# mode -> parts of the errors with which models may be refused
REFUSED_MODELS: dict[str, tuple[str, ...]] = {"standard": (), "same-places": ()}

_SHADOW = Refusal(
    error="has a decoder with RoPE of its own",
    reason="PEFT's Shadow adds a second decoder to the model, and a view holds for one: saving refuses it.",
    tests=tuple(
        f"{test}[ShadowConfig-config_kwargs28-trl-internal-testing/tiny-random-LlamaForCausalLM]"
        for test in ("test_save_pretrained", "test_save_pretrained_selected_adapters")
    ),
)

# mode -> tests that fail
REFUSALS: dict[str, tuple[Refusal, ...]] = {"standard": (), "same-places": (_SHADOW,)}
