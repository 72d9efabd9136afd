"""`python -m trl_ext.cli`: the same command line as `rope-patch`."""

import sys

from . import main

sys.exit(main())
