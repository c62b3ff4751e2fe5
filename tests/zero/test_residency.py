"""What is kept gathered, on paper."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.assemble.uses import uses_of
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import build
from parallel3d.zero.residency import Traffic, plan, traffic

PIECES = "abcdef"
pieces = st.lists(st.sampled_from(PIECES), max_size=3).map(tuple)
uses = st.lists(pieces, max_size=20)
sizes = st.fixed_dictionaries({piece: st.integers(1, 9) for piece in PIECES})
budgets = st.integers(0, 60)


@given(uses, sizes, budgets, uses)
def test_a_use_finds_its_own_and_all_else_fits_the_budget(
    order: list[tuple[str, ...]], sizes: dict[str, int], budget: int, then: list[tuple[str, ...]]
) -> None:
    wanted = plan(order, sizes, budget, then)
    assert len(wanted) == len(order)
    for own, there in zip(order, wanted, strict=True):
        assert set(own) <= set(there) and len(set(there)) == len(there)
        assert there[: len(set(own))] == tuple(dict.fromkeys(own))
        if set(there) != set(own):
            assert sum(sizes[piece] for piece in there) <= budget


@given(uses, sizes, budgets)
def test_what_is_there_besides_is_what_comes_next_without_a_gap(
    order: list[tuple[str, ...]], sizes: dict[str, int], budget: int
) -> None:
    for at, there in enumerate(plan(order, sizes, budget)):
        coming = list(dict.fromkeys(piece for pieces in order[at:] for piece in pieces))
        assert list(there) == coming[: len(there)]
        if len(there) < len(coming):
            assert sum(sizes[piece] for piece in coming[: len(there) + 1]) > budget


@given(uses, sizes)
def test_with_room_for_all_each_is_gathered_once(
    order: list[tuple[str, ...]], sizes: dict[str, int]
) -> None:
    used = {piece for pieces in order for piece in pieces}
    found = traffic(plan(order, sizes, sum(sizes.values())), sizes)
    assert found == Traffic(len(used), sum(sizes[p] for p in used), found.peak)
    assert found.peak <= sum(sizes.values())


@given(uses, sizes, budgets, budgets)
def test_a_larger_budget_sends_no_more(
    order: list[tuple[str, ...]], sizes: dict[str, int], a: int, b: int
) -> None:
    equal = dict.fromkeys(sizes, 3)
    small, large = (traffic(plan(order, equal, budget), equal).bytes for budget in sorted((a, b)))
    assert large <= small


def test_a_step_without_room_gathers_for_each_pass_but_where_one_ends_and_the_next_begins() -> None:
    """2 m passes over n units: a unit stays from one pass's end to the next one's beginning."""
    m, n = 4, 3
    actions = lower(build("gpipe", 1, m))[0]
    order = [(unit,) for unit in uses_of(actions, {0: list(range(n))})]
    assert order == [(0,), (1,), (2,)] * m + [(2,), (1,), (0,)] * m
    found = traffic(plan(order, dict.fromkeys(range(n), 1), 0), dict.fromkeys(range(n), 1))
    assert found == Traffic(2 * m * n - 1, 2 * m * n - 1, 1)


def test_a_split_backward_needs_parameters_once() -> None:
    actions = lower(build("zb-h1", 2, 3))[1]
    order = uses_of(actions, {1: [4, 5]})
    assert len(order) == 2 * 2 * 3 and order[:4] == [4, 5, 5, 4]


def test_what_will_follow_is_kept_as_far_as_it_fits() -> None:
    size = dict.fromkeys("abc", 1)
    assert plan([("a",), ("b",)], size, 2)[-1] == ("b",)
    assert plan([("a",), ("b",)], size, 2, then=[("a",), ("b",)])[-1] == ("b", "a")
