"""Random costs for schedules on paper."""

from hypothesis import strategies as st

from parallel3d.pipeline.costs import UnitCosts

times = st.floats(0.25, 2.0)


@st.composite
def alike_units(draw: st.DrawFn, num_units: int) -> list[UnitCosts]:
    """Units that keep the same bytes, in times of their own."""
    deferred, output = draw(st.integers(0, 80)), draw(st.integers(0, 10))
    return [
        UnitCosts(draw(times), draw(times), draw(times), 100, deferred, output)
        for _ in range(num_units)
    ]


@st.composite
def unlike_units(draw: st.DrawFn, num_units: int) -> list[UnitCosts]:
    """Units of which each has its own times, some of them nothing, and bytes."""
    some = times | st.just(0.0)
    size = st.integers(0, 100)
    return [
        UnitCosts(draw(some), draw(some), draw(some), draw(size), draw(size), draw(size))
        for _ in range(num_units)
    ]
