"""`python -m rope_patch`: what this package is; the command line is another one's, which this may not import."""

import sys

from .methods import list_methods
from .version import __version__


def main(arguments: list[str]) -> int:
    """Print the version, or what there is; 0, or 2 if something else was asked for."""
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
