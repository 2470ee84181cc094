"""`python -m plots.site`."""

import sys

from plots.site.build import main

sys.exit(main(sys.argv[1:]))
