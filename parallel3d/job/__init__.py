"""A recipe as a job: its start and its errors, its folder, the signals it gets."""

from .entry import command, start
from .folder import claimed
from .signals import Stop

__all__ = ["Stop", "claimed", "command", "start"]
