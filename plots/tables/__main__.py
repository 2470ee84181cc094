"""`python -m plots.tables`."""

import sys

from plots.tables.command import main

sys.exit(main(sys.argv[1:]))
