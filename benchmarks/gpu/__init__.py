"""Everything that a GPU has to show: `python -m kvbench.benchmarks.gpu`."""
