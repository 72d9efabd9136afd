"""Recipes: YAML files whose keys are fields of the dataclasses that TRL's parser is made of."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import yaml
from trl import DatasetMixtureConfig, TrlParser
from trl.scripts.utils import DatasetConfig

from rope_patch.registry import unknown


def require_known_keys(parser: TrlParser, arguments: Sequence[str] | None = None) -> None:
    """Raise ValueError if the recipe behind `--config` has a key that `parser` does not know.

    To be called before `parser.parse_args_and_config`, whose own errors name neither the file nor what was meant, or
    say that a field is missing whose key is mistyped.

    Args:
        parser: of the script.
        arguments: of the command line; None takes those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--config" not in arguments[:-1]:
        return
    path = Path(arguments[arguments.index("--config") + 1])
    with path.open(encoding="utf-8") as file:
        recipe = yaml.safe_load(file)
    if not isinstance(recipe, dict):
        return  # TRL says so
    known = {action.dest for action in parser._actions} - {"help"} | {"env"}  # TRL sets what is under `env`
    for name in recipe:
        if name not in known:
            raise ValueError(f"{unknown('key', name, known, of=str(path))} --help explains each.")
    if DatasetMixtureConfig in list(parser.dataclass_types) and isinstance(recipe.get("datasets"), list):
        known = {f.name for f in fields(DatasetConfig)}
        for name in [name for entry in recipe["datasets"] if isinstance(entry, dict) for name in entry]:
            if name not in known:
                raise unknown("key", name, known, of=f"`datasets` in {path}")
