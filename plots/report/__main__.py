"""`kvbench report`."""

import sys

from kvbench.plots.report.page import main

sys.exit(main(sys.argv[1:]))
