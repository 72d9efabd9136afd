"""Recipes: YAML files whose keys are the fields of a parser's dataclasses."""

import argparse
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from transformers.hf_argparser import string_to_bool
from trl import DatasetMixtureConfig, TrlParser
from trl.scripts.utils import DatasetConfig

from rope_patch.base.registry import unknown
from rope_patch.prompts.text import JSON_LINES, is_json_lines

from ..config import LONG_DOCUMENTS, RopeSFTConfig
from .arguments import normalized, with_home

_ARGPARSE_WORDS = {"int": "an integer", "float": "a number", "string_to_bool": "true or false"}
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a mapping", list: "a list"}


class RecipeParser(TrlParser):
    """[`~trl.TrlParser`] whose errors name the file, the key and a suggestion.

    Flags win over the recipe after `--config`, as in TRL. A recipe may also be the first argument, without a flag. Long
    documents are cut unless recipe or flags set it (`LONG_DOCUMENTS`).

    Args:
        dataclass_types: their fields are the keys of the recipe and the flags of the command line.
        **kwargs: of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        # an abbreviated flag would be taken for another one
        super().__init__(dataclass_types, **{"allow_abbrev": False, **kwargs})
        if RopeSFTConfig in list(self.dataclass_types):
            self.set_defaults(**LONG_DOCUMENTS)
        self.add_argument("--help-all", action="help", dest="help", help="explain every field and exit")

    def error(self, message: str) -> NoReturn:
        """Raise ValueError; argparse would print the flags of all fields, several pages."""
        match = re.match(r"argument --([\w-]+)\S*: (?:invalid (\w+) value: (.*)|(.*))", message, re.DOTALL)
        if match is None:
            raise ValueError(message)
        name, kind, value, rest = match.groups()
        flag = f"--{name.replace('_', '-')}"
        chosen = re.match(r"invalid choice: '(.*)' \(choose from (.*)\)", rest or "")
        if chosen is not None:
            known = re.findall(r"'([^']*)'", chosen[2])
            raise ValueError(f"{unknown(name, chosen[1], known)} --help-all lists them.")
        if kind is None:
            raise ValueError(f"{flag}: {rest}")
        raise ValueError(f"{flag} must be {_ARGPARSE_WORDS.get(kind, f'of type {kind}')}, got {value}.")

    def parse_args_and_config(  # type: ignore[override]  # whose other options are for launchers
        self, args: Iterable[str] | None = None
    ) -> tuple[Any, ...]:
        """The dataclasses, from the recipe after `--config` and the flags; None takes those of the process.

        Raises:
            ValueError: as `parse`.
            OSError: there is no such recipe.
        """
        keys, flags, source = recipe_and_flags(list(sys.argv[1:] if args is None else args))
        return self.parse(keys, flags, source)

    def parse(self, keys: Mapping[Any, Any], flags: Sequence[str], source: str) -> tuple[Any, ...]:
        """The dataclasses, from the keys of a recipe and the flags.

        Args:
            keys: of the recipe.
            flags: of the command line, which win.
            source: of the keys, for messages.

        Raises:
            ValueError: a key, a flag or a value that no field takes, or what the dataclasses refuse.
        """
        known = {action.dest for action in self._actions} - {"help"} | {"env"}  # environment variables, as in TRL
        for name in keys:
            if name not in known:
                raise ValueError(f"{unknown('key', name, known, of=source)} --help-all explains each.")
        if DatasetMixtureConfig in list(self.dataclass_types) and keys.get("datasets") is not None:
            _check_datasets(source, keys["datasets"])
        for kind in self.dataclass_types:
            for name, hint in get_type_hints(kind).items():
                if name != "datasets" and keys.get(name) is not None and not _fits(hint, keys[name]):
                    raise ValueError(f"{name} in {source} must be {_described(hint)}, got {shown(keys[name])}.")
        defaults = with_home(dict(keys))
        os.environ.update({name: str(value) for name, value in (defaults.pop("env", None) or {}).items()})
        self.set_defaults_with_config(**defaults)
        *parsed, rest = self.parse_args_into_dataclasses(list(flags), return_remaining_strings=True)
        if not rest:
            return tuple(parsed)
        if not rest[0].startswith("-"):
            raise ValueError(f"{rest[0]!r} belongs to no flag; a recipe comes first, and flags are --NAME VALUE.")
        flag = rest[0].partition("=")[0].replace("_", "-")
        flags_known = {f"--{action.dest.replace('_', '-')}" for action in self._actions}
        raise ValueError(f"{unknown('flag', flag, flags_known)} --help-all explains them.")


def with_config_flag(arguments: Sequence[str]) -> list[str]:
    """`RECIPE.yaml ...` and `--config=RECIPE.yaml ...` as `--config RECIPE.yaml ...`; both are a ValueError."""
    parts: list[str] = []
    for argument in arguments:
        parts += argument.split("=", 1) if argument.startswith("--config=") else [argument]
    if not parts or parts[0].startswith("-"):
        return parts
    if "--config" in parts:
        raise ValueError(f"the recipe is named twice, as {parts[0]} and by --config: leave one out.")
    return ["--config", *parts]


def recipe_and_flags(arguments: Sequence[str]) -> tuple[dict[Any, Any], list[str], str]:
    """The keys of the recipe after `--config`, the flags, and the path of the recipe; no keys without one.

    `--model` is short for `--model-name-or-path`. `--data FILE ...` takes the place of the recipe's text; a stage that
    names a text of its own keeps it.

    Raises:
        ValueError: a flag lacks its value, the recipe is no YAML mapping, or a file of `--data` is not in JSON lines.
        OSError: the recipe cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--model")
    parser.add_argument("--data", nargs="+")
    given = with_config_flag(normalized(arguments))
    if given and given[-1] == "--config":
        raise ValueError("--config must name a recipe, a YAML file.")
    try:
        own, flags = parser.parse_known_args(given)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}.") from error
    keys = {} if own.config is None else read_recipe(Path(own.config))
    if own.model is not None:
        flags += ["--model-name-or-path", own.model]
    if own.data is not None:
        for file in own.data:
            if not is_json_lines(Path(file)):
                raise ValueError(
                    f'--data takes files of one JSON object a line, such as {{"text": ...}}, whose names end with '
                    f"{', '.join(JSON_LINES)}; got {file}. `datasets` in a recipe reads other forms."
                )
        keys["datasets"] = [{"path": "json", "data_files": own.data, "split": "train"}]
        keys.pop("dataset_name", None)
    return keys, flags, own.config or "the recipe"


def read_recipe(path: Path) -> dict[Any, Any]:
    """The keys and values of a recipe; ValueError if the file is no YAML mapping, OSError if it cannot be read."""
    recipe = read_yaml(path, f"the recipe {path}")
    if not isinstance(recipe, dict):
        raise ValueError(f"the recipe {path} must be a YAML mapping, lines of `name: value`, got {shown(recipe)}.")
    return recipe


class _OnceEach(yaml.SafeLoader):
    """`yaml.safe_load` that refuses a key with two values, of which PyYAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":  # `<<`, which may be repeated
                if key.value in seen:
                    problem = f"{key.value!r} is there twice: leave one out"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def read_yaml(path: Path, called: str) -> Any:
    """The content of a YAML file, which errors name `called`; ValueError if it is no YAML or has a key twice."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceEach)  # noqa: S506
    except OSError as error:
        raise OSError(f"{called} cannot be read: {error.strerror or error}.") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{called} is no YAML: {error.problem}{line}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{called} is no YAML: {error}") from error


def _check_datasets(path: str, entries: object) -> None:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f"datasets in {path} must be a list of mappings, each `- path: json` with `data_files`, or "
            f"`- path: HUB_ID`; got {shown(entries)}."
        )
    known = {f.name for f in fields(DatasetConfig)}
    for name in [name for entry in entries for name in entry]:
        if name not in known:
            raise unknown("key", name, known, of=f"`datasets` in {path}")
    if any("path" not in entry for entry in entries):
        raise ValueError(f"each entry of datasets in {path} needs `path`: `json` for files of yours, or a hub id.")


def _fits(hint: Any, value: Any) -> bool:
    """Whether a YAML value has the type, or is a text that the command line would convert to it."""
    origin = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        return any(_fits(kind, value) for kind in get_args(hint) if kind is not type(None))
    if origin is Literal:
        return value in get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value in [member.value for member in origin]
    if origin is bool and isinstance(value, str):
        return _reads_as(string_to_bool, value)
    if origin in (int, float):
        if isinstance(value, str):  # YAML reads 1e-5, which has no dot, as a text
            return _reads_as(origin, value)
        return not isinstance(value, bool) and isinstance(value, int if origin is int else int | float)
    if origin is list:
        return isinstance(value, list | str)  # TRL's parser makes a text a list of one
    return not isinstance(origin, type) or isinstance(value, origin)


def _reads_as(kind: Any, text: str) -> bool:
    try:
        kind(text)
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return True


def _described(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        kinds = [_described(kind) for kind in get_args(hint) if kind is not type(None)]
        chosen = [kind for kind in kinds if kind.startswith("one of")]  # Transformers' enums are texts, too
        return " or ".join(dict.fromkeys(chosen or kinds))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if isinstance(origin, type) and issubclass(origin, Enum):
        return "one of " + ", ".join(repr(member.value) for member in origin)
    return _WORDS.get(origin, str(hint))


def shown(value: object) -> str:
    """A value of YAML for a message."""
    if isinstance(value, bool):  # from `no` and `off` without quotation marks
        return f"{value}, as YAML reads yes, no, on and off: put the word in quotation marks if it is a text"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
