"""Jobs of several ranks that tests start."""

import subprocess
import warnings
from typing import Any

# In three runs of the suite one rank of one job was ended in its midst. One of them kept its last words: "terminate
# called without an active exception", which is C++'s for a thread that nobody joined. This package starts none.
ABORTED = "Signal 6 (SIGABRT)"


def run_ranks(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` that keeps what is printed. A job whose rank SIGABRT ended runs once more, with a warning."""
    options = {**options, "env": {**options["env"], "PYTHONFAULTHANDLER": "1"}}  # a rank that a signal ends says where
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode and ABORTED in done.stderr:
        warnings.warn(f"SIGABRT ended a rank, and its job runs anew:\n{done.stderr[-4000:]}", stacklevel=2)
        done = subprocess.run(command, capture_output=True, text=True, **options)
    return done
