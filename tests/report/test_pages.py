"""The page of a verification."""

from partopt.documents.tables import Verification, VerificationRow
from partopt.report.pages import render_verification as render

HELD = VerificationRow(
    check="numbers",
    passed=True,
    took_s=0.3,
    text="130 fields, priced and simulated again",
    differences=[],
)
BROKEN = VerificationRow(
    check="request",
    passed=False,
    took_s=0.0,
    text="two `stages` requested",
    differences=["stages: 2 recorded, 3 found"],
)
FAILED = Verification(verified=False, claim="", checks=[HELD, BROKEN])


def test_checks_that_hold_and_what_is_claimed():
    held = Verification(verified=True, claim="optimal", checks=[HELD])
    assert render(held).splitlines() == [
        "numbers  ok      130 fields, priced and simulated again (300.0 ms)",
        "verified: optimal",
    ]


def test_a_check_that_fails_shows_its_differences_and_nothing_is_claimed():
    assert FAILED.failed == ["request"]
    page = render(FAILED, spell=lambda text: text.replace("`stages`", "--stages"))
    assert page.splitlines()[1:] == [
        "request  FAILED  two --stages requested",
        "         stages: 2 recorded, 3 found",
    ]


def test_the_page_of_the_saved_document_is_that_of_the_checks(tmp_path):
    FAILED.save(str(tmp_path / "verification.json"))
    loaded = Verification.load(str(tmp_path / "verification.json"))
    assert loaded == FAILED
    assert render(loaded) == render(FAILED)
