"""`python -m kvbench.plots.tables`."""

import sys

from kvbench.plots.tables.command import main

sys.exit(main(sys.argv[1:]))
