from __future__ import annotations

import os
import signal

import pytest
from torch import Tensor

from parallel3d.job import Stop, signals
from parallel3d.topology import Axis, Topology
from tests.world import run_on


def test_signals_are_remembered_and_the_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert not stop.agreed(Axis.single())
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(Axis.single())
        assert not stop.requeue
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_comes_while_the_ranks_agree_counts_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(x: Tensor, axis: Axis, **options: str) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return x

    with Stop() as stop:
        with monkeypatch.context() as patch:
            patch.setattr(signals, "all_reduce", interrupted)
            assert not stop.agreed(Axis.single())
            assert not stop.requested
        assert stop.agreed(Axis.single())
        assert stop.requested


def signalled_on_one_rank(topology: Topology) -> tuple[int, bool]:
    """The step at which the rank stops: rank 1 is signalled in step 2."""
    with Stop() as stop:
        for step in range(5):
            if topology.rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop.agreed(topology.world):
                return step, stop.requeue
    return -1, False


def test_all_ranks_stop_at_the_same_step_and_know_why() -> None:
    assert run_on(3, signalled_on_one_rank) == [(2, True)] * 3


def test_somebody_who_presses_again_is_not_made_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.5])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(times))
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed(Axis.single()), "what a launcher passes on is no second wish"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
