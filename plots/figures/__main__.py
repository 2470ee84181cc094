"""`python -m plots.figures`."""

import sys

from plots.figures.command import main

sys.exit(main(sys.argv[1:]))
