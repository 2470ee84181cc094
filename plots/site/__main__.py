"""`kvbench site`."""

import sys

from kvbench.plots.site.build import main

sys.exit(main(sys.argv[1:]))
