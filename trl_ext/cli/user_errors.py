"""What a user can mend is said in one line, without a traceback. Imports nothing heavy."""

import os
import sys
from collections.abc import Callable

USER_ERRORS = (ValueError, OSError, ImportError)
"""By which this package, Transformers, TRL and datasets refuse; OSError: a model or a file that is not there."""

_TRACEBACK = "ROPE_PATCH_TRACEBACK"


def run_command(command: str, run: Callable[[], int | None]) -> int:
    """Run one command; its status, or 1 after an error that the user can mend, which is printed in one line.

    With ROPE_PATCH_TRACEBACK=1 in the environment the error is raised, which shows where it comes from.
    """
    try:
        return run() or 0
    except USER_ERRORS as error:
        if os.environ.get(_TRACEBACK, "0") not in ("", "0"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"{command}: {message} ({_TRACEBACK}=1 shows where this comes from.)", file=sys.stderr)
        return 1
