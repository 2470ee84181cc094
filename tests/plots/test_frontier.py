"""The frontier: points that are clearly better than all with as few bytes."""

from plots.figures.frontier import front
from plots.run_sets import Estimate, Line, Point


def line(*points: tuple[float, float, float, float], outside: str = "") -> Line:
    return Line("x", "X", 0, [Point(x, Estimate(y, low, high, 9), outside) for x, y, low, high in points], [])


def test_a_point_is_on_the_frontier_where_its_interval_lies_beyond_all_before() -> None:
    rising = [line((0.1, 50, 45, 55), (0.3, 58, 53, 63)), line((0.2, 70, 65, 75), (0.4, 90, 80, 95))]
    assert front(rising, falls=False) == [(0.1, 50), (0.2, 70), (0.4, 90)]
    falling = [line((0.1, 0.5, 0.4, 0.6), (0.2, 0.45, 0.3, 0.6), (0.4, 0.1, 0.05, 0.2))]
    assert front(falling, falls=True) == [(0.1, 0.5), (0.4, 0.1)]


def test_what_broke_its_budget_is_on_no_frontier() -> None:
    assert front([line((0.1, 50, 45, 55), outside="over its budget")], falls=False) == []
