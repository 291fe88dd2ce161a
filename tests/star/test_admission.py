"""Who may come: by hand, at the number where one more would be slower than without."""

from __future__ import annotations

import pytest

from adaserve_jax.star.messages import Refused, Welcome
from adaserve_jax.star.service.admission import MIN_SAMPLES, TargetAdmission, max_targets
from tests.star.toys import ToyService, draft, hello, opened


def measured(service_s: float = 0.010, tokens: int = 3, max_rows: int = 1) -> TargetAdmission:
    made = TargetAdmission(max_rows)
    for _ in range(MIN_SAMPLES):
        made.record_search(1, service_s)
        made.record_round("nobody", tokens, 0.03)
    return made


def test_as_many_come_as_pay():
    """3 tokens a round, 10 ms a draft, 20 ms a token without: N_max = 6."""
    admission = measured()
    most = max_targets(0.010, 0.030, 3.0, 0.020)
    for number in range(most):
        assert admission.admit(f"t{number}", plain_s=0.020, verify_s=0.030) == ""
    why = admission.admit("late", plain_s=0.020, verify_s=0.030)
    assert most == 6 and "6 targets are served, 1 requests each, and the most that pay are 6" in why
    assert "a request of this target would get 42.9 tokens/s" in why  # 3 tokens in 7 drafts of 10 ms
    assert "drafts of 10.00 ms, and has 50.0 tokens/s by plain decoding" in why
    assert admission.admit("t3", plain_s=0.020, verify_s=0.030) == ""  # is there
    admission.leave("t3")
    admission.leave("t3")
    assert admission.admit("late", plain_s=0.020, verify_s=0.030) == ""


def test_one_that_would_be_alone_is_never_refused():
    """Or what was measured in a bad hour would keep it out for ever, since nothing would be measured again."""
    admission = measured()
    times = {"plain_s": 0.012, "verify_s": 0.030}  # 40 ms for 3 tokens, 36 without
    assert admission.admit("a", **times) == ""
    why = admission.admit("b", **times)
    assert "1 targets are served" in why and "the most that pay are 0" in why
    admission.leave("a")
    assert admission.admit("b", **times) == ""


def test_who_is_there_is_not_made_slower_than_without():
    admission = measured()
    for number in range(5):
        assert admission.admit(f"t{number}", plain_s=0.0167, verify_s=0.030) == ""  # 50 ms are worth while
    why = admission.admit("patient", plain_s=1.0, verify_s=0.030)
    assert "a request of a target that is here would get 50.0 tokens/s" in why


def test_who_does_not_profit_anyway_keeps_nobody_out():
    admission = measured()
    assert admission.admit("slow", plain_s=0.0167, verify_s=0.030) == ""
    admission.admit("slow", plain_s=0.001, verify_s=0.030)  # says now that it is faster without
    assert admission.admit("other", plain_s=0.020, verify_s=0.030) == ""


@pytest.mark.parametrize("times", [{"plain_s": 0.0, "verify_s": 0.03}, {"plain_s": 0.001, "verify_s": 0.0}])
def test_what_is_not_known_keeps_nobody_out(times: dict):
    admission = measured()
    assert all(admission.admit(f"t{number}", **times) == "" for number in range(40))
    assert all(TargetAdmission(1).admit(f"t{number}", plain_s=1e-6, verify_s=1.0) == "" for number in range(40))


def test_times_are_measured_as_they_come():
    admission = TargetAdmission(1)
    admission.admit("a", plain_s=0.05, verify_s=0.5)
    for search_s, tokens, back_s in ((0.02, 4, 0.04), (0.03, 2, 0.06)):
        for _ in range(200):
            admission.record_search(1, search_s)
            admission.record_round("a", tokens, back_s)
    assert admission.tokens == pytest.approx(2.0)
    assert [admission.admit(name, plain_s=0.0, verify_s=0.0) for name in "bc"] == ["", ""]
    why = admission.admit("d", plain_s=0.0, verify_s=0.0)  # 4 drafts of 30 ms; by verify_s "a" would never profit
    assert "a target that is here would get 16.7 tokens/s with drafts of 30.00 ms" in why


def test_targets_with_more_requests_are_fewer():
    admission = measured()
    for number in range(3):
        assert admission.admit(f"t{number}", plain_s=0.020, verify_s=0.030, requests=2 * number) == ""
    why = admission.admit("late", plain_s=0.020, verify_s=0.030, requests=6)
    assert "3 targets are served, 2 requests each, and the most that pay are 3" in why
    assert "would get 37.5 tokens/s" in why  # 3 tokens in 8 drafts


def test_batched_more_come():
    alone, together = measured(), measured(max_rows=8)
    for _ in range(MIN_SAMPLES):
        together.record_search(8, 0.017)
    counts = []
    for admission in (alone, together):
        number = 0
        while number < 200 and not admission.admit(f"t{number}", plain_s=0.020, verify_s=0.030):
            number += 1
        counts.append(number)
    assert counts == [6, 28]  # 60 ms are worth while: 28 in 3.5 full batches of 17 ms


def test_a_service_learns_its_times_from_what_it_does_and_refuses_by_them():
    """Drafts of 10 ms, 20 ms until the target asks again, two tokens a round of which one is the draft's."""
    service = ToyService("", core={"admission": TargetAdmission(1), "batching": False})
    (welcome,) = service.say("a", hello("a", plain_s=0.03))
    assert isinstance(welcome, Welcome)
    service.say("a", opened(1, 0, [1]))
    for number in range(MIN_SAMPLES + 4):
        service.say("a", draft(1, 0, number, max(2 * number - 1, 0) + (number == 0), [2, 3] if number else [], depth=2))
        assert len(service.run(0.010)[1]) == 1
        service.now += 0.020
    # A round of two takes 30 ms for 2 tokens: 66 tokens/s; of seven 70 ms.
    assert isinstance(service.say("b", hello("b", plain_s=0.02, verify_s=0.02))[0], Welcome)
    (refused,) = service.say("c", hello("c", plain_s=0.0149, verify_s=0.02))
    assert isinstance(refused, Refused) and refused.code == "full" and refused.retry_after_s > 0
    assert "2 targets are served" in refused.message and "66.7 tokens/s with drafts of 10.00 ms" in refused.message
    service.core.disconnect("b", service.now)
    assert isinstance(service.say("c", hello("c", plain_s=0.0151, verify_s=0.02))[0], Welcome)
