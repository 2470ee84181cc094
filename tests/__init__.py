"""Tests, each where what it tests lies, and what a method of the user's own must hold (`conformance.py`)."""

from kvbench.engine.terminal import refuse_without_packages

refuse_without_packages()
