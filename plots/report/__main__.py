"""`python -m plots.report`."""

import sys

from plots.report.page import main

sys.exit(main(sys.argv[1:]))
