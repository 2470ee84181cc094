"""`python -m kvbench …` is `kvbench …`."""

import sys

from kvbench.command import main

sys.exit(main())
