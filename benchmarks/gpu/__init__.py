"""Everything that a GPU has to show: `python -m benchmarks.gpu`."""
