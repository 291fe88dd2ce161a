"""Whatever a folder holds, it has a report: points missing, invalid, without requests or samples, of several loads."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaserve_jax.report.build import build
from adaserve_jax.report.document import Document, Figure, Text
from adaserve_jax.report.perfetto import trace
from adaserve_jax.report.points import measured
from tests.report.made import PROVENANCE, folder, point, random_requests, samples_over

MADE = [random_requests(count, seed) for seed, count in enumerate((1, 2, 7))]
points = st.builds(
    lambda policy, rate, repeat, share, scale, records, samples, load, kept, valid: (
        point(
            records, policy=policy, rate=rate, repeat=repeat, samples=samples, urgent_share=share, slo_scale=scale,
            provenance=replace(PROVENANCE, workload_hash=load * 32), valid=valid,
            invalid_reason=None if valid else "late",
        ),
        kept,
    ),
    st.sampled_from(["ar", "adaserve", "spec:4"]), st.sampled_from([0.5, 1.0, 8.0]), st.integers(0, 5),
    st.sampled_from([0.3, 0.6]), st.sampled_from([0.8, 1.2]), st.sampled_from(MADE),
    st.sampled_from([[], samples_over(1), samples_over(3)]), st.sampled_from(["ab", "cd"]),
    st.sampled_from([0, 1, None]), st.sampled_from([True, True, True, False]),
)  # fmt: skip


def check(document: Document) -> None:
    items = [item for section in document.sections for item in section.items if not isinstance(item, Text)]
    assert len({item.key for item in items}) == len(items)
    for figure in (item for item in items if isinstance(item, Figure)):
        assert 1 <= len(figure.panels) <= 6, figure.key
        for series in (series for panel in figure.panels for series in panel.series):
            for value, low, high in zip(series.y, series.low or series.y, series.high or series.y, strict=True):
                known = [each for each in (low, value, high) if each is not None]
                assert all(math.isfinite(each) for each in known)
                assert known == sorted(known) or low is None, (figure.key, series.name, low, value, high)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(points, min_size=1, max_size=9, unique_by=lambda made: made[0][0][0].point), st.lists(points, max_size=3)
)
def test_any_folder_has_a_report(monkeypatch: pytest.MonkeyPatch, made: list, more: list):
    monkeypatch.setattr("adaserve_jax.report.estimates.resamples_for", lambda records: 40)
    folders = [folder(*((rows, records[:kept], samples) for (rows, records, samples), kept in made))]
    other = folder(*{each[0][0].point: each for each, _ in more}.values(), path="other") if more else None
    check(build(measured(folders), against=None if other is None else measured([other])))
    if other is not None:
        check(build(measured([*folders, other])))
    for each in measured(folders).points:
        trace(each)
