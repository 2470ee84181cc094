"""`kvbench calibrate`: the command of `evals/calibrate.py`, under the name that says what it is for.

Not here: the command, which reads a run's configuration and so stands above this room.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("kvbench.evals.calibrate", run_name="__main__", alter_sys=True)
