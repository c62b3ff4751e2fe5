import pytest

from parallel3d.pipeline.costs import Costs, UnitCosts, stage_costs

UNITS = [
    UnitCosts(1, 2, 3, 10, 20, 30),
    UnitCosts(2, 3, 4, 40, 50, 60),
    UnitCosts(5, 0, 1, 7, 8, 9),
]


def test_a_stage_costs_what_its_units_do_and_hands_on_what_the_last_one_does() -> None:
    assert stage_costs(UNITS, [(0, 2), (2, 3)], comm=0.5) == Costs(
        forward=(3, 5),
        input_grad=(5, 0),
        weight_grad=(7, 1),
        saved=(50, 7),
        deferred=(70, 8),
        output=(60, 9),
        comm=0.5,
    )


@pytest.mark.parametrize("cuts", [[(0, 2)], [(0, 1), (2, 3)], [(1, 3)], [(0, 4)], []])
def test_cuts_that_lose_a_unit_are_refused(cuts: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="are not all of 3 units, in order"):
        stage_costs(UNITS, cuts)
