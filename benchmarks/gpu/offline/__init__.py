"""The GPU's benchmark and tests on a machine without network: `docs/gpus.md` has the lines."""
