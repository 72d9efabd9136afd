"""Views, rescalings and objectives of other installed packages, through entry points."""

from importlib.metadata import entry_points

from transformers.utils import logging

logger = logging.get_logger(__name__)

GROUPS = ("rope_patch.views", "rope_patch.rescalings", "rope_patch.objectives")
"""Groups of entry points, each of which names a class, or the module whose import registers it."""


def load_plugins() -> None:
    """Import what installed packages declare in `GROUPS`, which registers it by name.

    The commands of `rope-patch` call this; a script imports its views itself. A package that fails gives a warning, so
    that commands that do not need it run.
    """
    for group in GROUPS:
        for entry in entry_points(group=group):
            try:
                entry.load()
            except Exception as error:  # an import can raise anything
                logger.warning(f"{group} of {entry.value}: {entry.name!r} cannot be loaded: {error}")
