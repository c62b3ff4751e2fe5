"""Which optimizers are not elementwise and have a rule, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .adafactor import AdafactorRule
from .lamb import Lamb, LambRule
from .make import Make, Options, made_for_trial
from .muon import Muon, MuonRule
from .whole import Rule

RULES: dict[type[torch.optim.Optimizer], type[Rule]] = {
    Lamb: LambRule,
    torch.optim.Adafactor: AdafactorRule,
    Muon: MuonRule,
    torch.optim.Muon: MuonRule,
}


def rule_of(make: Make, groups: Sequence[Options]) -> Rule | None:
    """The rule of the optimizer that ``make`` gives; None for any other, hopefully elementwise."""
    rule = RULES.get(type(made_for_trial(make, groups[0] if groups else {})))
    return None if rule is None else rule()
