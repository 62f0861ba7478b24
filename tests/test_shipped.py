import pytest

from partopt.documents.files import find_shipped, shipped_folder, shipped_names
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from tests.helpers import uniform_profile


def test_a_shipped_name_is_the_path_of_its_file_and_a_file_comes_before_it(tmp_path, monkeypatch):
    path = shipped_folder("topologies") / "v100-pcie.yaml"
    assert find_shipped("v100-pcie", "topologies") == str(path)
    assert find_shipped("-", "profiles") == "-"
    assert find_shipped("dgx-h100", "profiles", "topologies").endswith("dgx-h100.yaml")
    assert shipped_names("topologies") == sorted(shipped_names("topologies"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v100-pcie").touch()
    assert find_shipped("v100-pcie", "topologies") == "v100-pcie"


def test_what_is_neither_is_refused_with_the_nearest_name():
    for given in ("dgx-h10", "/no/such/dgx-h100", "x" * 300, "a\0b"):
        with pytest.raises(PartoptError) as error:
            find_shipped(given, "profiles", "topologies")
        told = f"{given}: no such file, and no shipped profile or topology of that name"
        assert error.value.message.replace("\\x00", "\0") == told
        assert given != "dgx-h10" or error.value.hint == 'did you mean "dgx-h100"?'


def test_every_shipped_profile_loads():
    for name in shipped_names("profiles"):
        assert Profile.load(find_shipped(name, "profiles")).layers


def test_a_profile_is_found_by_its_digest_among_those_that_are_shipped(tmp_path):
    shipped = Profile.load("gnmt.v100-published.float32")
    assert Profile.find(shipped.sha256()) == shipped
    assert Profile.find("0" * 64) is None
    own = uniform_profile(2)
    own.save(str(tmp_path / "own.json"))
    assert Profile.find(shipped.sha256(), tmp_path / "own.json") == own
