"""Views, rescalings and objectives of other installed packages, by their entry points."""

from importlib.metadata import entry_points

from transformers.utils import logging

logger = logging.get_logger(__name__)

GROUPS = ("rope_patch.views", "rope_patch.rescalings", "rope_patch.objectives")
"""Groups of entry points, each of which names a class, or the module whose import registers it."""


def load_plugins() -> None:
    """Import what installed packages declare in `GROUPS`, so that it is registered under its name.

    The commands of `rope-patch` call it; a script imports its own views. A package that cannot be imported is told in a
    warning and left out, so that it breaks no command that does not need it.
    """
    for group in GROUPS:
        for entry in entry_points(group=group):
            try:
                entry.load()
            except Exception as error:  # whatever the other package raises while it is imported
                logger.warning(f"{group} of {entry.value}: {entry.name!r} cannot be loaded: {error}")
