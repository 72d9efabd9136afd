"""The parser of the command line, whose errors are one line with the nearest known name. Imports nothing heavy."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

USER_ERROR = 2
"""Exit status after a mistake of the user."""


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, without the list of all flags.

    Args:
        forwards: whether to keep all but `--help` in `arguments`, for a parser that is slow to make.
        complete: adds flags that are slow to find, once the command is typed.
        **kwargs: of `ArgumentParser`.
    """

    def __init__(
        self, *, forwards: bool = False, complete: Callable[["CommandParser"], None] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        self.forwards, self.complete = forwards, complete

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `ArgumentParser`; an unknown flag is reported before a missing one."""
        arguments = list(sys.argv[1:] if args is None else args)
        if self.complete is not None:
            self.complete(self)
            self.complete = None
        if not self.forwards:
            if not self._commands():  # else they are flags of the command
                self._require_known(arguments)
            return super().parse_known_args(arguments, namespace)
        if {"-h", "--help"} & set(arguments):
            self.print_help()
            self.exit()
        namespace = argparse.Namespace() if namespace is None else namespace
        for name, value in self._defaults.items():
            setattr(namespace, name, value)
        namespace.arguments = arguments
        return namespace, []

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `ArgumentParser`; the command reports superfluous arguments."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self._commands()[parsed.command].error(f"{rest[0]!r} belongs to no flag.")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the mistake in one line and exit with 2."""
        message = re.sub(r"^argument (--[\w-]+): ", r"\1: ", message)  # argparse's form of it
        unknown = re.match(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if unknown:
            commands = [*self._commands()]
            message = f"there is no command {unknown[1]}.{hint(unknown[1], commands)} There are {', '.join(commands)}."
        end = "" if message.endswith((".", "?")) else "."
        print(f"{self.prog}: {message}{end} {self.prog} --help explains it.", file=sys.stderr)
        sys.exit(USER_ERROR)

    def _commands(self) -> dict[str, "CommandParser"]:
        choices = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return choices[0] if choices else {}

    def _require_known(self, arguments: list[str]) -> None:
        """Exit with the nearest name if an argument is an unknown flag."""
        for argument in arguments:
            flag, _, _ = argument.partition("=")
            if flag.startswith("--") and flag != "--" and flag not in self._option_string_actions:
                known = [name for name in self._option_string_actions if name.startswith("--")]
                self.error(f"there is no flag {flag}.{hint(flag, known)}")


def hint(name: str, known: Collection[str]) -> str:
    """The nearest known name as a question with a space before it, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
