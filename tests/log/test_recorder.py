from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import Engine
from parallel3d.log.clock import DeviceClock, HostClock, host_offset, offset
from parallel3d.log.recorder import MESSAGES, Recorder, Recording, Window
from parallel3d.pipeline.actions import COMPUTE, Action, Op, parse_action
from parallel3d.topology import Grid, Topology
from tests.world import run_on


def engine_of(topology: Topology, schedule: str) -> Engine:
    torch.manual_seed(0)
    return Engine(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]),
        topology,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        schedule=schedule,
        num_microbatches=4,
    )


def recorded(topology: Topology, schedule: str) -> tuple[list[Action], list[Recording], Window]:
    """This rank's program, and three steps of it as they were seen, with an evaluation between."""
    engine = engine_of(topology, schedule)
    recorder = Recorder(HostClock(), host_offset(topology.world))
    x, steps = torch.ones(8, 8), []
    for _ in range(3):
        with recorder.listening(engine.parts.interpreter):
            engine.train_step(x, x)
        engine.eval_step(x, x)
        steps.append(recorder.read())
    assert recorder not in engine.parts.interpreter.observers
    return engine.parts.programs.mine(4), steps, recorder.window()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_is_recorded_in_the_order_of_the_program_and_nothing_overlaps(schedule: str) -> None:
    ranks = run_on(Grid(pp=2), recorded, schedule=schedule)
    for program, steps, window in ranks:
        for computes, waits, messages in steps:
            assert [span.action for span in computes] == [a for a in program if a.op in COMPUTE]
            sent = [span.action for span in messages]
            assert sorted(map(str, sent)) == sorted(str(a) for a in program if a.op in MESSAGES)
            every = sorted([*computes, *waits, *messages], key=lambda span: span.start)
            assert all(span.start <= span.end for span in every)
            assert all(one.end <= other.start for one, other in pairwise(every))
            assert {span.action for span in waits} <= {span.action for span in computes}
        assert 0 < window.busy <= window.end - window.start
        assert window.start == round(1e9 * steps[-1].computes[0].start)
    (_, first, _), (_, second, _) = ranks
    for one, other in zip(first, second, strict=True):
        ends = {span.action: span.end for span in one.computes}
        for span in other.computes:  # what it needs was done before, on one clock for both ranks
            need = span.action._replace(stage=span.action.stage - 1)
            if span.action.op is Op.FORWARD and need in ends:
                assert ends[need] <= span.start


class Counting:
    """A clock of which a mark is one more than the mark before, in ``unit`` seconds."""

    def __init__(self, sees_messages: bool, unit: float = 1.0) -> None:
        self.sees_messages, self.unit = sees_messages, unit
        self.now = 0

    def start(self) -> None:
        self.now = 10

    def mark(self) -> int:
        self.now += 1
        return self.now

    def read(self, marks: Any) -> list[float]:
        return [self.unit * mark for mark in marks]


class Told:
    """In place of the interpreter: its observers."""

    def __init__(self) -> None:
        self.observers: list[Any] = []

    def run(self, words: str) -> None:
        for observer in self.observers:
            for action in map(parse_action, words.split()):
                observer.waits(action)
                if action.op in COMPUTE:
                    observer.begins(action)
                observer.ends(action)


def spans(recording: Recording) -> list[list[tuple[str, float, float]]]:
    return [[(str(action), start, end) for action, start, end in kind] for kind in recording]


def test_a_wait_goes_from_what_came_before_to_the_start_of_a_computation() -> None:
    recorder, told = Recorder(Counting(sees_messages=True), offset=0.5), Told()
    with recorder.listening(told):  # type: ignore[arg-type]
        told.run("1RECV_F0 1F0 1REDUCE0 1B0 1SEND_B0")
    computes, waits, messages = spans(recorder.read())
    assert messages == [("1RECV_F0", 11.5, 12.5), ("1SEND_B0", 16.5, 17.5)]
    assert waits == [("1F0", 12.5, 13.5), ("1B0", 14.5, 15.5)]
    assert computes == [("1F0", 13.5, 14.5), ("1B0", 15.5, 16.5)]
    assert recorder.window() == (2 * 10**9, 13.5e9, 16.5e9)


def test_what_the_interpreter_itself_takes_is_no_wait() -> None:
    recorder, told = Recorder(Counting(sees_messages=True, unit=1e-6)), Told()
    with recorder.listening(told):  # type: ignore[arg-type]
        told.run("1F0 1B0")
    assert recorder.read().waits == [] != recorder.read().computes


def test_on_a_device_a_message_is_part_of_the_wait() -> None:
    recorder, told = Recorder(Counting(sees_messages=False)), Told()
    with recorder.listening(told):  # type: ignore[arg-type]
        told.run("1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0")
    computes, waits, messages = spans(recorder.read())
    assert (waits, messages) == ([("1F0", 11, 12), ("1B0", 13, 14)], [])
    assert computes == [("1F0", 12, 13), ("1B0", 14, 15)]


def test_a_step_forgets_the_one_before_and_an_error_leaves_no_observer() -> None:
    recorder, told = Recorder(Counting(sees_messages=True)), Told()
    assert recorder.window() == Window()
    for words in ("0F0", "0F1"):
        with pytest.raises(KeyError), recorder.listening(told):  # type: ignore[arg-type]
            told.run(words)
            raise KeyError
    assert not told.observers
    assert spans(recorder.read())[0] == [("0F1", 12, 13)]


class Event:
    """A CUDA event of a device that is always three milliseconds behind its host."""

    made: int = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.at, self.passed = 0.0, False

    def record(self, stream: Any = None) -> None:
        Device.now += 1.0
        self.at = Device.now if stream else Device.now + 3.0

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Device:
    now: float = 0.0  # milliseconds


def test_a_device_is_timed_by_events_that_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"aside on {device}")
    monkeypatch.setattr("time.perf_counter", lambda: Device.now / 1e3)
    clock = DeviceClock(torch.device("cuda:1"))
    for _ in range(2):
        clock.start()
        began = Device.now
        marks = [clock.mark() for _ in range(3)]
        assert not any(mark.passed for mark in marks), "nothing is waited for in a step"
        expected = [(began + k + 3.0) / 1e3 for k in (1, 2, 3)]
        assert clock.read(marks) == pytest.approx(expected)
        for mark in marks:
            mark.passed = False
    assert Event.made == 4
    assert clock.read([]) == []


def test_hosts_are_aligned_to_that_of_rank_0_by_the_median_and_each_as_one() -> None:
    left = [[10.0, 20.0, 30.0], [10.0, 20.5, 30.0], [4.0, 14.0, 0.0], [0.0, 0.0, 0.0]]
    hosts = ["a", "a", "b", "b"]
    assert [offset(left, hosts, rank) for rank in range(4)] == [0.0, 0.0, 6.0, 6.0]


def offsets(topology: Topology, hosts: list[str]) -> float:
    return host_offset(topology.world, hosts[topology.rank])


def test_ranks_of_one_machine_share_a_clock_and_those_of_two_are_compared() -> None:
    assert run_on(2, offsets, hosts=["a", "a"]) == [0.0, 0.0]
    first, second = run_on(2, offsets, hosts=["a", "b"])
    assert first == 0.0 != second
