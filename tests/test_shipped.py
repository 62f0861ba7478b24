import pytest

from partopt.documents.files import find_shipped, shipped_folder, shipped_names
from partopt.documents.profile import Profile
from partopt.errors import PartoptError


def test_a_shipped_name_is_the_path_of_its_file():
    assert find_shipped("v100-pcie", "topologies") == str(
        shipped_folder("topologies") / "v100-pcie.yaml"
    )


def test_a_file_comes_before_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v100-pcie").touch()
    assert find_shipped("v100-pcie", "topologies") == "v100-pcie"


def test_standard_input_is_no_name():
    assert find_shipped("-", "profiles") == "-"


def test_several_kinds_are_searched():
    assert find_shipped("dgx-h100", "profiles", "topologies").endswith("dgx-h100.yaml")


@pytest.mark.parametrize("given", ["dgx-h10", "/no/such/dgx-h100", "x" * 300, "a\0b"])
def test_what_is_neither_is_refused(given):
    with pytest.raises(PartoptError, match="no such file, and no shipped topology of that name"):
        find_shipped(given, "topologies")


def test_the_nearest_name_is_in_the_hint():
    with pytest.raises(PartoptError) as error:
        find_shipped("dgx-h10", "profiles", "topologies")
    assert (
        error.value.message
        == "dgx-h10: no such file, and no shipped profile or topology of that name"
    )
    assert error.value.hint == 'did you mean "dgx-h100"?'


def test_every_shipped_profile_loads():
    for name in shipped_names("profiles"):
        assert Profile.load(find_shipped(name, "profiles")).layers


def test_names_are_sorted():
    assert shipped_names("topologies") == sorted(shipped_names("topologies"))
    assert "workstation-2" in shipped_names("topologies")
