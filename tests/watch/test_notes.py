from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel3d.comm.ledger import Event
from parallel3d.pipeline.actions import parse_action
from parallel3d.topology import Axis, Grid, Topology
from parallel3d.watch.follow import Follower
from parallel3d.watch.frames import is_users, place_of, place_of_error
from parallel3d.watch.guard import Stillness
from parallel3d.watch.notes import OUTSIDE, Activity, Call, Doing, Notes
from parallel3d.watch.word import Word


def hear(notes: Notes, phase: str, tag: str, ranks: tuple[int, ...] = (0, 1)) -> Activity:
    notes.hears(Event("dp", "all_reduce", tag, phase, 0, 0.0, ranks))
    return notes.activity


def test_a_collective_is_known_by_its_number_in_its_group_also_when_waited_for_late() -> None:
    notes = Notes({("dp", (0, 1)): "dp"})
    notes.enters("a training step")
    compute = Doing("computes", parse_action("0F1"))
    hear(notes, "issue", "items")
    notes.does(compute)
    assert hear(notes, "issue", "x").doing == compute, "what is only begun does not hold it up"
    assert hear(notes, "block", "items").doing == Doing(
        "joins", call=Call("dp", "all_reduce", "items", 1)
    )
    assert hear(notes, "wait", "items").doing == compute
    assert hear(notes, "block", "x").doing == Doing("joins", call=Call("dp", "all_reduce", "x", 2))
    hear(notes, "wait", "x")
    hear(notes, "issue", "x")
    assert hear(notes, "block", "x").doing == Doing("joins", call=Call("dp", "all_reduce", "x", 3))
    hear(notes, "wait", "x")
    assert hear(notes, "issue", "y", ranks=(0, 1, 5)).doing == compute
    assert notes.joined == {"dp": 3, "dp 0,1,5": 1}


def test_messages_are_the_pipelines_to_tell() -> None:
    notes = Notes({})
    before = notes.activity
    notes.hears(Event("pp", "receive", "activations", "issue", 0, 0.0, (0, 1)))
    assert notes.activity is before


def topology(pp: int) -> Topology:
    """Rank 1 of a pipeline, on paper."""
    axes = {"pp": Axis("pp", pp, 1, tuple(range(pp))), "world": Axis("world", pp, 1, ())}
    axes |= {"dp": Axis.single("dp"), "tp": Axis.single("tp")}
    return Topology(Grid(pp=pp), axes, torch.device("cpu"), owner=False)


@pytest.mark.parametrize(
    ("action", "peers"),
    {
        "1F2": [0],
        "1B2": [2],
        "1I2": [2],
        "1W2": [],
        "1SEND_F2": [2],
        "1SEND_B2": [0],
        "1RECV_B2": [2],
        "4F0": [2],
        "4SEND_B0": [2],
    }.items(),
)
def test_an_action_deals_with_the_rank_of_the_stage_before_or_after(
    action: str, peers: list[int]
) -> None:
    follower = Follower(Notes({}), topology(3), [0, 1, 2, 2, 1, 0])
    assert list(follower.peer_of(parse_action(action))) == peers
    assert list(follower.neighbours(parse_action(action))) == [0, 2]


def test_a_border_inside_a_rank_is_waited_for_by_nobody() -> None:
    follower = Follower(Notes({}), topology(2), [0, 1, 1, 0])
    assert list(follower.peer_of(parse_action("2F0"))) == []


def test_a_word_is_small_and_comes_back_as_it_was() -> None:
    notes = Notes({("world", (0, 1)): "world", ("dp", (0, 1)): "dp"})
    notes.enters("a phase with a name of some length")
    for number in range(5000):
        hear(notes, "issue", f"unit {number}")
    hear(notes, "block", "unit 4999")
    notes.fails(ValueError("long " * 1000), lost=False)
    word = Word.of(3, notes, final=True)
    assert Word.load(word.dump()) == word
    assert len(word.dump()) < 1024
    assert word.call == Call("dp", "all_reduce", "unit 4999", 5000)
    assert not word.has_ended()


def test_a_process_has_ended_also_while_nobody_has_taken_notice() -> None:
    here = Word.of(0, Notes({}))
    assert not here.has_ended()
    assert not replace(here, home="elsewhere", pid=-1).has_ended(), "that is not known"
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert replace(here, pid=process.pid).has_ended()
    assert replace(here, pid=process.pid).has_ended()


def test_the_users_own_frame_is_found_under_those_of_libraries() -> None:
    folder = Path(sys.modules["torch"].__file__ or "")
    assert is_users(__file__)
    assert not is_users(str(folder))
    assert not is_users(threading.__file__)
    assert not is_users(sys.modules[Notes.__module__].__file__ or "")
    assert not is_users("<frozen runpy>")
    event, inside = threading.Event(), threading.Event()

    def users() -> None:
        inside.set()
        event.wait()

    thread = threading.Thread(target=users)
    thread.start()
    inside.wait()
    place = place_of(thread.ident or 0)
    event.set()
    thread.join()
    assert "threading.py" in place.at or place.at == place.user
    assert "tests/watch/test_notes.py" in place.user
    assert place.user.endswith("in users")


def test_an_errors_place_is_where_it_was_raised() -> None:
    try:
        Grid.parse("wrong")
    except ValueError as error:
        place = place_of_error(error)
    assert "topology.py" in place.at
    assert place.at.endswith("in parse")
    assert "test_notes.py" in place.user


def test_only_one_thing_that_lasts_is_still() -> None:
    still, one, other = Stillness(), Activity(0, "a save"), Activity(1, "a save")
    for now in range(10):
        still.look(one, now, longest=2)
    assert still.seconds == 9
    still.look(other, 10, longest=2)
    assert still.seconds == 0
    still.look(other, 1000, longest=2)
    assert still.seconds == 2, "a process that was stopped was not still"


@pytest.mark.parametrize(
    "activity",
    [Activity(0, OUTSIDE), Activity(0, "a save")._replace(failure=object())],  # type: ignore[arg-type]
)
def test_code_of_the_caller_and_an_error_may_last(activity: Activity) -> None:
    still = Stillness()
    for now in range(10):
        still.look(activity, now, longest=2)
    assert still.seconds == 0
