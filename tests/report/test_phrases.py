"""What a page says of estimated times."""

from partopt.report.phrases import basis_lines, basis_of_several

H100 = "times estimated for H100-80GB: nothing was measured"
A100 = "times estimated for A100-80GB: nothing was measured"


def test_measured_times_are_not_mentioned() -> None:
    assert basis_lines(None) == []
    assert basis_of_several([("a", None), ("b", None)]) == []


def test_profiles_estimated_for_one_device_are_not_named() -> None:
    assert basis_lines("H100-80GB") == [("rests on", H100)]
    assert basis_of_several([("a", "H100-80GB"), ("b", "H100-80GB")]) == [("rests on", H100)]


def test_profiles_are_named_by_device_where_not_all_are_for_one() -> None:
    profiles = [("a", "H100-80GB"), ("b", None), ("c", "A100-80GB"), ("d", "H100-80GB")]
    assert basis_of_several(profiles) == [("rests on", f"a, d: {H100}"), ("", f"c: {A100}")]
