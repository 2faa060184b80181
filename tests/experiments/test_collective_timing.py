"""Collectives are timed by kind, group and size, and curves are fitted to them."""

from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from experiments.measurements.collective_timing import measure_collectives
from simulator.calibration import fit_collective_profile
from simulator.calibration.shipped_profiles import write_profile
from simulator.hardware.collective_profile import CollectiveProfile, SizeCurve
from simulator.hardware.description import read, validate
from simulator.work import CollectiveKind

KINDS = get_args(CollectiveKind)


def test_every_kind_is_measured_on_every_group_and_size() -> None:
    table = measure_collectives("some CPU", [2, 4], [64, 1024], repeat=1, number=1)
    assert [
        tuple(row) for row in table[["gpu", "kind", "size", "bytes"]].itertuples(index=False)
    ] == [
        ("some CPU", kind, size, num_bytes)
        for kind in KINDS
        for size in (2, 4)
        for num_bytes in (64, 1024)
    ]
    assert (table["us"] > 0).all()


def test_a_size_that_the_group_can_not_share_is_refused() -> None:
    with pytest.raises(
        ValueError, match="36 bytes can't be split into float32 shards for 2 devices"
    ):
        measure_collectives("some CPU", [2], [36], repeat=1, number=1)


def test_curves_are_found_again_and_the_profile_can_be_read(tmp_path: Path) -> None:
    curve = SizeCurve(
        launch_us=5, hop_us=1, half_size_mb=2, bandwidth_gb_per_s=100, small_group_loss=0.2
    )
    rows = [
        ("GPU", kind, size, 2**power, 1e6 * curve.seconds(kind, 2**power, size))
        for kind in KINDS
        for size in (2, 4, 8)
        for power in range(10, 28)
    ]
    table = pd.DataFrame(rows, columns=["gpu", "kind", "size", "bytes", "us"])
    profile, errors = fit_collective_profile(table, source="a test")
    assert list(errors["kind"]) == list(KINDS)
    assert (errors["fitted_rows"] + errors["held_out_rows"] == 54).all()
    assert (errors["held_out_rows"] > 0).all()
    assert (errors[["fitted_error", "held_out_error", "largest_held_out_error"]] < 0.02).all(
        axis=None
    )
    for kind in KINDS:
        assert profile.curve(kind).seconds(kind, 1e6, 8) == pytest.approx(
            curve.seconds(kind, 1e6, 8), rel=0.02
        )
    write_profile(tmp_path / "gpu.yaml", profile)
    again = validate(CollectiveProfile, read(tmp_path / "gpu.yaml"), "gpu.yaml")
    np.testing.assert_allclose(
        again.curve("collective_permute").launch_us,
        profile.curve("collective_permute").launch_us,
        rtol=1e-3,
    )
