"""The watch's thread: tells what this rank does, and ends the process once there is an alarm.

[Note: time] A rank raises the alarm once its main thread has been at one thing, a wait, a
computation or a phase of the loop, for ``timeout`` seconds; code of the caller may last as long as
it likes, for whoever is waited for by then makes others raise it. Ranks hear the alarm within a
tick (a tenth of the timeout, two seconds at most), have ``grace`` seconds to answer and end within
as many again. Groups give up ``topology.MARGIN`` seconds after the timeout, so later than this.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from threading import Event, Thread

from ..topology import Grid
from .blame import Account
from .board import Alarm, Board, Report
from .ending import end
from .notes import OUTSIDE, Activity, Notes
from .report import name, tell, write
from .word import Word

UNWINDING = 60.0  # seconds that a main thread with an error has to end the process


class Stillness:
    """For how long an activity has been seen to be the same.

    Code of the caller, and an error on its way up, are never still. Time in which the looker did
    not look either, as in a process that was stopped, does not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: tuple[Activity | None, float] = None, 0.0

    def look(self, activity: Activity, now: float, longest: float) -> None:
        """Look again, after ``longest`` seconds at most."""
        seen, before = self._last
        outside = activity.phase == OUTSIDE and activity.doing is None
        same = activity is seen and not outside and activity.failure is None
        self.seconds = self.seconds + min(now - before, longest) if same else 0.0
        self._last = activity, now


class Guard:
    """Watches over one rank.

    Args:
        notes: what the main thread leaves.
        board: the store.
        grid: of all ranks.
        timeout: seconds.
        host: who keeps the store, as the report names it.
    """

    def __init__(self, notes: Notes, board: Board, grid: Grid, timeout: float, host: str) -> None:
        self.notes, self.board, self.grid, self.host = notes, board, grid, host
        self.timeout = timeout
        self._wake, self._news, self._answered = Event(), Event(), Event()
        self._asked = self._stopping = False
        self._answer = ""
        self._still = Stillness()
        self._process = os.getpid()
        self._thread = Thread(target=self._run, name="parallel3d-watch", daemon=True)
        # A thread inside the store's library would abort an interpreter that is taken down.
        atexit.register(self.stop)
        self._thread.start()

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        return min(2.0, self.timeout / 10)

    @property
    def grace(self) -> float:
        """Seconds that a living rank may take to answer."""
        return 2 * self.tick + 1.0

    def stop(self) -> None:
        """End the thread. A second call does nothing."""
        atexit.unregister(self.stop)
        if os.getpid() == self._process and self._thread.is_alive():
            self._stopping = True
            self._wake.set()
            self._thread.join(5.0)

    def tell_now(self) -> None:
        """Have the others know at once what the notes say; for the main thread."""
        self._news = Event()
        self._wake.set()
        self._news.wait(1.0)

    def ask(self) -> str:
        """Who is gone, for an error of the main thread, which waits for it."""
        self._asked = True
        self._wake.set()
        self._answered.wait(4 * self.grace)
        return self._answer

    def _run(self) -> None:
        try:
            if alarm := self._watch():
                self._conclude(alarm)
        except RuntimeError:  # torch's, of a store that does not answer
            self._go_on_alone()

    def _watch(self) -> Alarm | None:
        """Until an alarm, or until this rank leaves."""
        while not self._stopping:
            news = self._news
            self._tell()
            news.set()
            if self._asked or self._is_stuck():
                return self.board.ring(Alarm("lost" if self._asked else "stuck", self.board.rank))
            if alarm := self.board.alarm():
                return alarm
            self._pause()
        error = getattr(sys, "last_value", None)  # of an interpreter that ends with an error
        if error is not None and self.notes.activity.failure is None:
            self.notes.fails(error, lost=False)
        self._tell(left=True)
        return None

    def _tell(self, *, final: bool = False, left: bool = False) -> None:
        self.board.tell(Word.of(self.board.rank, self.notes, final=final, left=left))

    def _pause(self) -> None:
        """A tick, unless there is news."""
        self._wake.wait(self.tick)
        self._wake.clear()

    def _is_stuck(self) -> bool:
        """Whether the main thread has been at one thing for too long."""
        self._still.look(self.notes.activity, time.monotonic(), 2 * self.tick)
        return self._still.seconds > self.timeout

    def _conclude(self, alarm: Alarm) -> None:
        """Answer, hear the report, and end the process."""
        self._tell(final=True)
        report = self._report(alarm)
        self.board.confirm()
        if self.board.rank == 0:  # it may be who keeps the store
            self._until(lambda: self.board.confirmed() >= report.readers)
        if alarm.kind == "lost" and self._main_ends(report.text):
            return
        mine = name(self.grid, self.board.rank)
        first = report.printer == self.board.rank
        end(report.text if first else f"{mine} ends: {report.verdict}", report.text)

    def _report(self, alarm: Alarm) -> Report:
        """That of the rank which raised the alarm; one's own if it does not come."""
        if alarm.rank != self.board.rank:
            self._until(lambda: self.board.report() is not None)
        report = self.board.report()
        if report is None:
            report = write(self._account(), alarm, self.timeout)
            self.board.publish(report)
        return report

    def _account(self) -> Account:
        """Once every rank has answered or is known to have ended, or the grace is over."""
        deadline = time.monotonic() + self.grace
        while True:
            words = self.board.words()
            answered = {rank for rank, word in words.items() if word.final or word.raised}
            silent = set(range(self.grid.size)) - answered
            ended = {rank for rank in silent if rank in words and words[rank].has_ended()}
            if silent == ended or time.monotonic() > deadline:
                return Account(self.grid, words, answered, ended, time.time())
            time.sleep(min(0.1, self.tick))

    def _main_ends(self, text: str) -> bool:
        """Hand the report to the main thread's error; whether it ends the process by itself."""
        self._until(lambda: self._asked)
        self._give(text)
        if self._asked:
            self._until(lambda: False, UNWINDING)
        return self._stopping

    def _give(self, text: str) -> None:
        self._answer = text
        self._answered.set()

    def _until(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until it is so, the process is left, or time is up: the grace if not given."""
        deadline = time.monotonic() + (self.grace if seconds is None else seconds)
        while not (done() or self._stopping) and time.monotonic() < deadline:
            time.sleep(min(0.05, self.tick))

    def _go_on_alone(self) -> None:
        """The store is gone. A rank that computes goes on; one that waits is not let wait long."""
        text = f"{self.host} is gone, and with it the store in which the ranks met"
        while not self._stopping:
            if self._asked:
                self._give(text)
                self._until(lambda: False, UNWINDING)
                break
            self._pause()
            self._news.set()
            doing = self.notes.activity.doing
            waiting = doing is not None and doing.how != "computes"
            if self._is_stuck() or (waiting and self._still.seconds > 2 * self.grace):
                break
        if not self._stopping:
            me, word = self.board.rank, Word.of(self.board.rank, self.notes, final=True)
            alone = Account(self.grid, {me: word}, {me}, set(), word.time)
            text = f"{text}; {name(self.grid, me)} ends: it {tell(alone, me)}"
            end(text, text)
