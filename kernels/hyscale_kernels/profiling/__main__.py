"""``python -m hyscale_kernels.profiling``: the command where the package is only on the path."""

import sys

from .commands import profile

sys.exit(profile(sys.argv[1:]))
