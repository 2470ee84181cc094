"""`python -m kvbench.plots.figures`."""

import sys

from kvbench.plots.figures.command import main

sys.exit(main(sys.argv[1:]))
