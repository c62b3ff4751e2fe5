from __future__ import annotations

import pytest
import torch

from parallel3d.comm.host import host_axis, start_copy
from parallel3d.comm.ledger import Ledger


def test_a_copy_is_counted_when_it_is_decided_and_made_when_it_is_called() -> None:
    ledger, host = Ledger(), host_axis(3)
    ledger.attach(host)
    ledger.tracing = True
    source, target = torch.ones(5, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16)
    copy = start_copy(source, target, host, tag="unit 2")
    assert ledger.bytes() == {"host": 10} and not target.any()
    copy()
    assert torch.equal(source, target) and ledger.bytes() == {"host": 10}
    (event,) = ledger.trace
    assert (event.kind, event.tag, event.phase, event.ranks) == ("offload", "unit 2", "issue", (3,))


def test_a_copy_converts_nothing() -> None:
    with pytest.raises(ValueError, match="a copy of torch.float32 .* into torch.bfloat16"):
        start_copy(torch.ones(2), torch.ones(2, dtype=torch.bfloat16), host_axis(0))
    with pytest.raises(ValueError, match="both must be the same"):
        start_copy(torch.ones(2), torch.ones(3), host_axis(0))
