"""The page of a verification."""

from partopt.documents.verification import Verification
from partopt.report.verification import render
from partopt.search.tables import verification_of
from partopt.search.verify import Check

HELD = Check("numbers", True, 0.3, "130 fields, priced and simulated again", [])
BROKEN = Check("request", False, 0.0, "two `stages` requested", ["stages: 2 recorded, 3 found"])


def test_checks_that_hold_and_what_is_claimed():
    assert render(verification_of([HELD], "optimal")).splitlines() == [
        "numbers  ok      130 fields, priced and simulated again (300.0 ms)",
        "verified: optimal",
    ]


def test_a_check_that_fails_shows_its_differences_and_nothing_is_claimed():
    found = verification_of([HELD, BROKEN], "optimal")
    assert (found.verified, found.claim, found.failed) == (False, "", ["request"])
    page = render(found, spell=lambda text: text.replace("`stages`", "--stages"))
    assert page.splitlines()[1:] == [
        "request  FAILED  two --stages requested",
        "         stages: 2 recorded, 3 found",
    ]


def test_the_page_of_the_saved_document_is_that_of_the_checks(tmp_path):
    live = verification_of([HELD, BROKEN], "optimal")
    live.save(str(tmp_path / "verification.json"))
    loaded = Verification.load(str(tmp_path / "verification.json"))
    assert loaded == live
    assert render(loaded) == render(live)
