"""`python -m trl_ext`: the same command line as `rope-patch`."""

import sys

from .cli import main

sys.exit(main())
