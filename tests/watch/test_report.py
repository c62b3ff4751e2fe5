"""From what the ranks said to who is the cause."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import pytest

from parallel3d.topology import AXES, Grid
from parallel3d.watch.blame import Account, members, roots
from parallel3d.watch.board import Alarm
from parallel3d.watch.notes import CLOSING, MAKING, OUTSIDE, Call
from parallel3d.watch.report import write
from parallel3d.watch.word import Word

STUCK = Alarm("stuck", 0)


def account(
    grid: Grid, *words: Word | None, silent: Set[int] = frozenset(), ended: Set[int] = frozenset()
) -> Account:
    said = {word.rank: word for word in words if word is not None}
    return Account(grid, said, set(said) - silent - ended, ended, 100.0)


def at(rank: int, how: str, action: str = "", *peers: int, **more: Any) -> Word:
    given = {"phase": "a training step", "step": 12, "age": 12.0, "time": 99.5, **more}
    return Word(rank, how=how, action=action, peers=peers, **given)


def joins(rank: int, group: str, number: int, kind: str = "all_reduce", tag: str = "norm") -> Word:
    return at(rank, "joins", call=Call(group, kind, tag, number), joined={group: number})


def loads(rank: int, **more: Any) -> Word:
    return at(rank, "", phase="data loading", age=14.2, at="mine.py:41 in __getitem__", **more)


def lines(account: Account, alarm: Alarm = STUCK) -> list[str]:
    return write(account, alarm, timeout=12.0).text.splitlines()


def test_a_chain_of_waiting_ends_at_the_rank_that_loads_data() -> None:
    grid = Grid(4, 1, 1)
    told = lines(
        account(
            grid,
            at(0, "waits", "0B2", 1),
            at(1, "waits", "1B2", 2),
            at(2, "waits", "2F4", 3),
            loads(3),
        )
    )
    assert told == [
        "rank 0 (pp 0, dp 0, tp 0) has not moved on for train.timeout = 12 s, so every rank ends:",
        "  step 12: rank 0 (pp 0, dp 0, tp 0) waits 12.0 s at 0B2 for the gradients of "
        "microbatch 2 from rank 1 (pp 1, dp 0, tp 0)",
        "  step 12: rank 1 (pp 1, dp 0, tp 0) waits 12.0 s at 1B2 for the gradients of "
        "microbatch 2 from rank 2 (pp 2, dp 0, tp 0)",
        "  step 12: rank 2 (pp 2, dp 0, tp 0) waits 12.0 s at 2F4 for the activations of "
        "microbatch 4 from rank 3 (pp 3, dp 0, tp 0)",
        "  cause: step 12: rank 3 (pp 3, dp 0, tp 0) is in data loading since 14.2 s, at "
        "mine.py:41 in __getitem__",
        "  If this was honest work, such as the first step with compile or a long save, raise "
        "train.timeout (the Engine's timeout).",
    ]


@pytest.mark.report("NVIDIA/nccl#1260")
@pytest.mark.report("NVIDIA/nccl#1324")
@pytest.mark.report("NVIDIA/Megatron-LM#735")
def test_of_a_collective_the_ranks_are_named_that_have_not_joined_it() -> None:
    grid = Grid(1, 4, 1)
    behind = at(2, "computes", "0B1", joined={"dp": 6})
    told = account(grid, joins(0, "dp", 7), joins(1, "dp", 7), behind, joins(3, "dp", 7))
    assert told.edges[0] == told.edges[3] == [2]
    text = lines(told)
    assert text[1].endswith(
        "rank 0 (pp 0, dp 0, tp 0), rank 1 (pp 0, dp 1, tp 0) and rank 3 (pp 0, dp 3, tp 0) "
        "waits 12.0 s in all_reduce 'norm' over dp, number 7 there, for rank 2 (pp 0, dp 2, tp 0)"
    )
    assert text[2].endswith(
        "rank 2 (pp 0, dp 2, tp 0) computes 0B1, the backward of microbatch 1, since 12.0 s"
    )


def test_a_group_is_that_of_the_rank_which_waits_in_it() -> None:
    grid = Grid(2, 3, 2)
    for axis in AXES:
        for group in grid.groups(axis):
            assert all(list(members(grid, rank, axis)) == group for rank in group)
    assert list(members(grid, 5, "world")) == list(range(12))
    assert members(grid, 5, "pp 1,5") == [1, 5]


def test_ranks_that_call_different_collectives_are_told_so() -> None:
    told = lines(account(Grid(1, 2, 1), joins(0, "dp", 3), joins(1, "dp", 3, "broadcast", "x")))
    assert any("number 3 there, where others are in broadcast 'x'" in line for line in told)


def test_a_collective_that_all_have_begun_and_none_ends_is_the_networks_fault() -> None:
    told = lines(account(Grid(1, 2, 1), joins(0, "dp", 3), joins(1, "dp", 3)))
    assert "which all its ranks have begun: the network or a device does not go on" in told[-2]


def test_ranks_that_wait_in_several_collectives_which_all_have_begun_are_told_apart() -> None:
    behind = replace(joins(1, "dp", 3, "all_gather", "unit 0"), joined={"dp": 9})
    told = lines(account(Grid(1, 2, 1), joins(0, "dp", 9, "reduce_scatter", "unit 2"), behind))
    assert "number 9 there, which all its ranks have begun, and others wait in" in told[-2]
    assert "all_gather 'unit 0', number 3" in told[-2] and "network" not in told[-2]


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    told = account(
        Grid(3, 1, 1),
        at(0, "waits", "0B0", 1),
        at(1, "waits", "1F1", 2),
        at(2, "hands over", "2SEND_B0", 1),
    )
    assert roots(told, 0) == [1, 2]
    assert "cause, these wait for each other: step 12: rank 1 " in lines(told)[-2]
    assert "to hand the gradients of microbatch 0 to rank 1 (pp 1, dp 0, tp 0)" in lines(told)[-2]


def test_a_process_that_has_ended_is_the_cause_whoever_lost_a_connection_to_whom() -> None:
    told = account(
        Grid(3, 1, 1),
        at(0, "waits", "0B0", 1),
        at(1, "waits", "1F1", 2, raised="RuntimeError: Connection closed by peer", lost=True),
        at(2, "computes", "2F0", age=0.1),
        ended={2},
    )
    text = lines(told, Alarm("lost", 1))
    assert text[0] == "rank 1 (pp 1, dp 0, tp 0) has lost a connection, so every rank ends:"
    assert text[-1] == (
        "  cause: step 12: rank 2 (pp 2, dp 0, tp 0) is gone: its process has ended; its last "
        "word, 0.5 s ago: computes 2F0, the forward of microbatch 0, since 0.1 s"
    )


def test_the_first_error_is_the_cause_and_not_those_that_follow_from_it() -> None:
    told = account(
        Grid(1, 3, 1),
        at(0, "joins", raised="RuntimeError: Connection closed by peer", lost=True),
        at(1, "computes", "0F0", raised="ValueError: a bad sample", age=0.3),
        joins(2, "dp", 3),
    )
    assert roots(told, 0) == [1]
    assert "failed 0.3 s ago in a training step: ValueError: a bad sample" in lines(told)[-2]


def test_one_that_does_not_answer_is_told_by_its_last_word() -> None:
    told = account(Grid(2, 1, 1), at(0, "waits", "0B0", 1), loads(1), silent={1})
    assert (
        "rank 1 (pp 1, dp 0, tp 0) does not answer; its last word, 0.5 s ago: is in data "
        in (lines(told)[-2])
    )


def test_one_that_has_not_reached_the_engine_is_the_cause() -> None:
    told = account(Grid(2, 1, 1), at(0, "", phase=MAKING), None)
    assert lines(told)[-2] == (
        "  cause: rank 1 (pp 1, dp 0, tp 0) is silent; it has not reached the engine"
    )
    told = account(Grid(2, 1, 1), at(0, "", phase=MAKING), at(1, "", phase=OUTSIDE))
    assert roots(told, 0) == [1]


def test_who_left_early_is_the_cause_and_does_not_print_the_report() -> None:
    told = account(Grid(1, 2, 1), Word(0, left=True), joins(1, "dp", 3))
    report = write(told, Alarm("stuck", 1), 2.0)
    assert "cause: rank 0 (pp 0, dp 0, tp 0) has left without an error" in report.text
    assert (report.printer, report.readers) == (1, 1)


def test_at_the_end_those_are_waited_for_that_do_not_close() -> None:
    told = account(Grid(1, 3, 1), at(0, "", phase=CLOSING), loads(1), at(2, "", phase=CLOSING))
    assert told.edges[0] == [1]
    assert roots(told, 0) == [1]


def test_a_host_that_waits_for_its_device_waits_for_who_has_begun_less() -> None:
    told = account(
        Grid(1, 2, 2),
        at(0, "awaits", joined={"dp": 5, "tp": 9}),
        at(1, "awaits", joined={"dp": 5, "tp": 9}),
        loads(2, joined={"dp": 4, "tp": 9}),
        at(3, "awaits", joined={"dp": 5, "tp": 9}),
    )
    assert told.edges[0] == [2]
    assert told.edges[1] == []
    assert roots(told, 0) == [2]


def test_a_thousand_ranks_fit_on_a_screen() -> None:
    grid = Grid(1, 1024, 1)
    words = [joins(rank, "dp", 3) for rank in range(1023)]
    for rank, word in enumerate(words):
        words[rank] = replace(word, age=rank / 10, step=rank % 40)
    text = lines(account(grid, *words, loads(1023)))
    assert len(text) < 25
    assert "rank 40 (pp 0, dp 40, tp 0), rank 80 (pp 0, dp 80, tp 0) and 23 more" in text[1]
    assert "rank 1023 (pp 0, dp 1023, tp 0) is in data loading" in text[-2]
