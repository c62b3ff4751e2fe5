import json
import math

import pytest

from parallel3d.log.meters import Meter

from .records import record

KEYS = """
    step loss grad_norm lr skipped tokens tokens_per_second step_seconds peak_memory_bytes
    memory_parameters memory_gradients memory_optimizer mfu bytes_pp bytes_dp bytes_tp
"""


def test_a_row_has_the_promised_keys_in_their_order() -> None:
    assert list(record(1).row()) == KEYS.split()
    assert list(record(1, val_loss=2.0).row()) == [*KEYS.split(), "val_loss"]
    assert list(record(1, loss_scale=8.0).row()) == [*KEYS.split(), "loss_scale"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null(value: float) -> None:
    row = record(1, loss=value, grad_norm=value, val_loss=value).row()
    assert row["loss"] is row["grad_norm"] is row["val_loss"] is None
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_a_float_survives_the_row_to_the_last_bit() -> None:
    loss = 0.1 + 0.2
    assert json.loads(json.dumps(record(1, loss=loss).row()))["loss"] == loss


def meter_over(ticks: list[float], **arguments: float) -> Meter:
    return Meter(clock=iter(ticks).__next__, **arguments)


def test_tokens_count_on_from_where_the_run_stood() -> None:
    meter = meter_over([0.0, 2.0, 10.0, 11.0], tokens=500)
    with meter.timed(tokens=100):
        pass
    with meter.timed(tokens=100):
        pass
    assert meter.rates() == {
        "tokens": 700,
        "tokens_per_second": 100.0,  # the 8 seconds between the steps are of no step
        "step_seconds": 1.0,
        "mfu": None,
    }


def test_a_step_that_raises_is_not_counted() -> None:
    meter = meter_over([0.0, 1.0])
    with pytest.raises(KeyError), meter.timed(tokens=100):
        raise KeyError
    assert meter.tokens == 0


def test_a_step_without_duration_has_rate_zero() -> None:
    meter = meter_over([1.0, 1.0])
    with meter.timed(tokens=100):
        pass
    assert meter.tokens_per_second == 0.0


def test_mfu_is_model_flops_over_the_peak_of_all_devices() -> None:
    meter = meter_over([0.0, 0.5], flops_per_token=6e9, peak_flops=8 * 989e12)
    with meter.timed(tokens=400_000):
        pass
    assert meter.mfu == pytest.approx(400_000 * 6e9 / 0.5 / (8 * 989e12), rel=1e-12)
