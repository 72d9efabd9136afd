"""The base model of a checkpoint, as a card may name it: by its hub ID or folder name, never by a path."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

# in the hub's cache: models--OWNER--NAME/snapshots/COMMIT
_CACHED = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")


@dataclass(frozen=True)
class BaseModel:
    """A model as a card may name it.

    Args:
        name: hub ID, or name of the folder that it was loaded from.
        is_on_hub: whether `name` is a hub ID.
        license: from its model card; "" if that is not on this machine.
        revision: branch, tag or commit on the hub that was loaded; "" for "main".
    """

    name: str
    is_on_hub: bool
    license: str = ""
    revision: str = ""

    @classmethod
    def of(cls, name_or_path: str, revision: str | None = None) -> Self | None:
        """The model that `from_pretrained` loads.

        Args:
            name_or_path: hub ID or folder; "" for a model that was not loaded, which gives None.
            revision: of a model on the hub; None is "main". Ignored for a folder.
        """
        if not name_or_path:
            return None
        folder = Path(name_or_path)
        cached = _CACHED.search(str(folder) + "/")
        if cached:
            return cls("/".join(cached.groups()), True, _license_in(folder / "README.md"))
        if folder.is_dir():
            return cls(folder.resolve().name, False, _license_in(folder / "README.md"))
        if folder.is_absolute() or not _is_repo_id(name_or_path):
            return cls(folder.name, False)
        page = try_to_load_from_cache(name_or_path, "README.md", revision=revision)
        license_ = _license_in(Path(page)) if isinstance(page, str) else ""
        return cls(name_or_path, True, license_, "" if revision in (None, "main") else revision)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The model from values of `to_dict`."""
        is_on_hub = values["is_on_hub"] and _is_repo_id(values["name"])  # the card links to it
        return cls(values["name"], is_on_hub, values.get("license", ""), values.get("revision", ""))


def _is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _license_in(page: Path) -> str:
    import yaml
    from huggingface_hub import ModelCard

    if not page.is_file():
        return ""
    try:
        named = ModelCard.load(page).data.license
    except (ValueError, yaml.YAMLError, RecursionError):  # damaged metadata
        return ""
    return named if isinstance(named, str) else ""
