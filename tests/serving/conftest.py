"""Behind the tests with vLLM: what was compared, near ties by name, and figures."""

from typing import Any

from kvbench.tests.serving.reference import COMPARED, FOUND


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [*(COMPARED.lines() if COMPARED.n_answers else []), *FOUND]
    if lines:
        terminalreporter.section("inside vLLM")
        for line in lines:
            terminalreporter.write_line(line)
