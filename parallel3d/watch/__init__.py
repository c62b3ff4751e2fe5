"""Hangs explained: what each rank does, told through the store, and the report when none moves on.

The collective library cannot tell who is missing: it is what waits. So every rank has a thread of
its own with a connection of its own to the store in which the ranks met. The main thread only
leaves a note of what it does.
"""

from .follow import Follower
from .notes import MAKING
from .watch import Watch, watch_over, watched

__all__ = ["MAKING", "Follower", "Watch", "watch_over", "watched"]
