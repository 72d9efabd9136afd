"""Write docs/command_line.md: the help of every command. Run: make docs"""

import argparse
import os
from pathlib import Path

os.environ["COLUMNS"] = "100"  # of the help, before argparse looks

from trl_ext.cli.console import _parser  # noqa: E402

TARGET = Path(__file__).with_name("command_line.md")
HEAD = """# Command line

Each command prints this text with `--help`."""


def main() -> None:
    """Write the page."""
    parser = _parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = [HEAD]
    for name, command in commands.choices.items():
        if command.complete is not None:  # adds the flags of measures, which are slow to find
            command.complete(command)
        parts.append(f"## rope-patch {name}\n\n```text\n{command.format_help()}```")
    TARGET.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
