"""The report of a hang, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..pipeline.actions import Op, parse_action
from ..pipeline.trace import CATEGORIES
from ..topology import Grid
from .blame import Account, members, roots
from .board import Alarm, Report
from .notes import CLOSING
from .word import Word

MANY = 16
WHAT = {
    Op.FORWARD: "the activations",
    Op.RECV_FORWARD: "a description of the activations",
    Op.SEND_FORWARD: "the activations",
    Op.BACKWARD: "the gradients",
    Op.INPUT_GRAD: "the gradients",
    Op.RECV_BACKWARD: "the gradients",
    Op.SEND_BACKWARD: "the gradients",
}


def write(account: Account, alarm: Alarm, timeout: float) -> Report:
    """What every rank does, those that wait first; last, as the cause, who waits for nobody."""
    grid, ends = account.grid, roots(account, alarm.rank)
    others = [rank for rank in range(grid.size) if rank not in ends]
    others.sort(key=lambda rank: not account.edges[rank])
    lines = _grouped(account, others)
    if len(lines) > MANY:
        lines[MANY:] = [f"and {len(lines) - MANY} more lines like these"]
    verdict = _verdict(account, ends)
    opening = {
        "stuck": f"{name(grid, alarm.rank)} has not moved on for train.timeout = {timeout:g} s",
        "lost": f"{name(grid, alarm.rank)} has lost a connection",
    }[alarm.kind]
    advice = (
        "If this was honest work, such as the first step with compile or a long save, raise "
        "train.timeout (the Engine's timeout)."
    )
    text = [f"{opening}, so every rank ends:", *(f"  {line}" for line in lines), f"  {verdict}"]
    text += [f"  {advice}"] if alarm.kind == "stuck" and not account.ended else []
    alive = [rank for rank in sorted(account.answered) if not account.words[rank].left]
    return Report("\n".join(text), verdict, alive[0], len(alive))


def name(grid: Grid, rank: int) -> str:
    """``rank 3 (pp 1, dp 1, tp 0)``."""
    return f"rank {rank} (pp {{}}, dp {{}}, tp {{}})".format(*grid.coordinates(rank))


def _names(grid: Grid, ranks: Sequence[int]) -> str:
    shown = [name(grid, rank) for rank in ranks[:3]]
    more = [f"{len(ranks) - 3} more"] if len(ranks) > 3 else []
    *before, last = [*shown, *more]
    return f"{', '.join(before)} and {last}" if before else last


def _grouped(account: Account, ranks: Iterable[int]) -> list[str]:
    """A line for those of whom the same is to be said, but for the seconds: those of the first."""
    lines: dict[str, tuple[str, str, list[int]]] = {}
    for rank in ranks:
        word = account.words.get(rank)
        step = f"step {word.step}: " if word and word.step else ""
        told = tell(account, rank)
        alike = step + re.sub(r"\d+\.\d s", "", told)
        lines.setdefault(alike, (step, told, []))[2].append(rank)
    return [f"{step}{_names(account.grid, same)} {told}" for step, told, same in lines.values()]


def _verdict(account: Account, ends: Sequence[int]) -> str:
    told = "; ".join(_grouped(account, ends))
    if any(account.edges[rank] for rank in ends):
        return f"cause, these wait for each other: {told}"
    return f"cause: {told}"


def tell(account: Account, rank: int) -> str:
    """What a rank does, as the end of a sentence that begins with its name."""
    word = account.words.get(rank)
    if word is None:
        ended = "is gone: its process has ended" if rank in account.ended else "is silent"
        return f"{ended}; it has not reached the engine"
    if rank in account.answered:
        return _state(account, word) + _place(word)
    ago = max(0.0, account.time - word.time)
    gone = "is gone: its process has ended" if rank in account.ended else "does not answer"
    return f"{gone}; its last word, {ago:.1f} s ago: {_state(account, word)}"


def _state(account: Account, word: Word) -> str:
    if word.left:
        return "has left without an error"
    if word.raised is None:
        return _activity(account, word)
    if word.lost:
        inside = word.action or (word.call and word.call.name) or word.phase
        return f"lost a connection in {inside}"
    return f"failed {word.age:.1f} s ago in {word.phase}: {word.raised}"


def _activity(account: Account, word: Word) -> str:
    grid, age, late = account.grid, f"{word.age:.1f} s", account.edges[word.rank]
    whom = _names(grid, late) if late else ""
    if word.phase == CLOSING:
        return f"waits {age} at {CLOSING}" + (f", for {whom}" if late else "")
    if word.how == "joins" and word.call:
        return f"waits {age} in {_call(account, word)}"
    if word.how == "awaits":
        behind = f", and {whom} has begun less than it has" if late else ""
        return f"waits {age} for its device{behind}"
    if not word.how:
        return f"is in {word.phase} since {age}" + (f", which needs {whom}" if late else "")
    action = parse_action(word.action)
    if word.how == "computes":
        what = f"the {CATEGORIES[action.op]} of microbatch {action.microbatch}"
        return f"computes {action}, {what}, since {age}"
    if word.how == "flushes":
        return f"waits {age} after {action} until what it sent is taken" + (
            f" by {whom}" if late else ""
        )
    what = f"{WHAT.get(action.op, 'its turn')} of microbatch {action.microbatch}"
    if word.how == "hands over":
        return f"waits {age} at {action} to hand {what} to {whom}"
    return f"waits {age} at {action} for {what}" + (f" from {whom}" if late else "")


def _call(account: Account, word: Word) -> str:
    """A collective, and who is missing."""
    assert word.call is not None
    group, number = word.call.group, word.call.number
    late = account.edges[word.rank]
    text = f"{word.call.name} over {group}, number {number} there"
    if late:
        return f"{text}, for {_names(account.grid, late)}"
    calls = [
        account.words[other].call
        for other in members(account.grid, word.rank, group)
        if other in account.words
    ]
    apart = [c for c in calls if c and c.group == group and c != word.call]
    differs = [c for c in apart if c.number == number]
    if differs:
        return f"{text}, where others are in {differs[0].name}"
    begun = f"{text}, which all its ranks have begun"
    if apart:
        return f"{begun}, and others wait in {apart[0].name}, number {apart[0].number}"
    return f"{begun}: the network or a device does not go on"


def _place(word: Word) -> str:
    at = f", at {word.at}" if word.at else ""
    return at + (f", called from {word.user}" if word.user and word.user != word.at else "")
