"""`python run.py …`, in a checkout, is `kvbench run …` (`kvbench/run.py`)."""

import sys

from kvbench.run import main, stop_at_signals

if __name__ == "__main__":
    stop_at_signals()
    sys.exit(main(sys.argv[1:]))
