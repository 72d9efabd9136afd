"""Which model a checkpoint was made of, as a page may name it: by its id on the hub, and never by a path."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

_CACHED = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")


@dataclass(frozen=True)
class BaseModel:
    """A model as a page may name it.

    Args:
        name: its id on the hub, or the name of the folder that it was loaded from.
        is_on_hub: which of the two.
        license: as its own card says, "" where there is none on this machine.
        revision: branch, tag or commit on the hub that was loaded; "" for "main".
    """

    name: str
    is_on_hub: bool
    license: str = ""
    revision: str = ""

    @classmethod
    def of(cls, name_or_path: str, revision: str | None = None) -> Self | None:
        """What `from_pretrained` was given; None for a model that was loaded from nowhere.

        Args:
            name_or_path: hub id or folder.
            revision: of a model on the hub; None is "main". Of a folder it says nothing and is left out.
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
        """As JSON values, which `from_dict` takes back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` wrote."""
        is_on_hub = values["is_on_hub"] and _is_repo_id(values["name"])  # which a link leads to
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
    except (ValueError, yaml.YAMLError, RecursionError):  # metadata that are none
        return ""
    return named if isinstance(named, str) else ""
