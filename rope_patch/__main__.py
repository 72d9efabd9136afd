"""`python -m rope_patch`: prints what this package offers. The command line is in `trl_ext`."""

import sys

from .methods import list_methods
from .version import __version__


def main(arguments: list[str]) -> int:
    """Print the version or a summary, and return the exit status: 2 for unknown arguments, else 0."""
    if arguments == ["--version"]:
        print(f"rope-patch {__version__}")
        return 0
    unknown = [a for a in arguments if a not in ("-h", "--help")]
    print(
        f"rope-patch {__version__}\n"
        "The command line is `rope-patch`, or `python -m trl_ext`: "
        "`rope-patch --help` lists it.\n"
        "In Python: rope_patch.patch_model(model, METHOD, ...), rope_patch.describe(model). "
        f"Methods: {', '.join(list_methods())}.",
        file=sys.stderr if unknown else sys.stdout,
    )
    return 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
