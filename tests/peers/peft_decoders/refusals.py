"""Where patched models differ from others on purpose: models that are refused, and the tests that notice."""

from peers.outcomes import Refusal

# mode -> parts of the errors with which models may be refused
REFUSED_MODELS: dict[str, tuple[str, ...]] = {"standard": (), "same-places": ()}

# mode -> tests that fail
REFUSALS: dict[str, tuple[Refusal, ...]] = {"standard": (), "same-places": ()}
