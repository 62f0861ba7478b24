"""Device files: what is shipped, and what is refused."""

import pytest
import yaml

from partopt.documents.device import Roofline, read_device, same_device
from partopt.documents.files import shipped_folder, shipped_names
from partopt.documents.topology import Topology
from partopt.errors import PartoptError

FILE = (shipped_folder("devices") / "a100.yaml").read_text()


@pytest.mark.parametrize("name", shipped_names("devices"))
def test_every_shipped_device_loads(name):
    made = Roofline.load(name)
    assert made.peaks_flops["float16"] > made.peaks_flops["float32"] > 1e12
    assert made.memory_bytes >= 16e9
    assert 1e11 < made.bandwidth_bytes_per_s < 1e13


def test_devices_are_named_as_those_of_topologies_are_and_have_as_much_memory():
    devices = [Topology.load(name).device for name in shipped_names("topologies")]
    files = {made.name: made for made in map(Roofline.load, shipped_names("devices"))}
    found = {own.name: own.memory_bytes for own in devices}
    assert found.pop("CPU") and found.keys() <= files.keys()
    assert found == {name: files[name].memory_bytes for name in found}
    assert {"A100-80GB", "H100-80GB", "H200-141GB", "B200", "GB200", "GB300"} <= found.keys()


def test_numbers_are_those_of_the_data_sheet():
    made = Roofline.load("a100")
    assert made.peaks_flops["bfloat16"] == 312e12
    assert made.bandwidth_bytes_per_s == pytest.approx(0.85 * 2039e9)
    assert made.launch_s == 4e-6


def test_the_digest_is_of_the_numbers():
    def digest(text):
        return Roofline.of(read_device(text.encode(), "a100")).sha256

    assert digest(FILE.replace("data sheet", "leaflet")) == digest(FILE)
    assert digest(FILE.replace("312 T", "0.312 P")) == digest(FILE)
    assert digest(FILE.replace("312 T", "313 T")) != digest(FILE)


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("312 Tflop/s", "312 TB/s", "peaks.bfloat16.value: '312 TB/s': 'TB/s' is not a unit of"),
        ("2039 GB/s", "2039", "bandwidth.value: '2039' has no unit"),
        ("4 us", "0 us", "launch.value: '0 us' is zero"),
        ("value: 0.82", "value: 1.2", "efficiency.matmul.value: expected a number <= 1.0"),
        ("bfloat16:", "bfloat61:", 'peaks: "bfloat61" is not a number format'),
        ("    bfloat16:", "    fp6:", 'training.products: "fp6" is not a number format'),
        (
            "share: [0.61, 0.53]",
            "share: [0.61, 1.3]",
            "training.attention.cudnn.share[1]: expected",
        ),
        ("limit: {value: 400 W", "limit: {value: 400", "training.limit.value: '400' has no unit"),
        ("value: 108", "value: 0", "training.multiprocessors.value: expected a whole number >= 1"),
        ("assumed: ", "because: ", "unknown key"),
        ("bandwidth:", "bandwith:", "unknown key"),
    ],
)
def test_faults_are_at_their_place(wrong, right, message):
    with pytest.raises(PartoptError) as failed:
        Roofline.of(read_device(FILE.replace(wrong, right).encode(), "mine.yaml"))
    assert f"mine.yaml: {message}" in failed.value.message or message in failed.value.message


@pytest.mark.parametrize("given", [{}, {"source": "a", "assumed": "b"}])
def test_a_number_has_one_origin(given):
    raw = yaml.safe_load(FILE)
    raw["launch"] = {"value": "4 us", **given}
    with pytest.raises(PartoptError, match="launch: needs a source or an assumption"):
        read_device(yaml.safe_dump(raw).encode(), "mine.yaml")


def test_all_faults_of_a_file_are_reported_together():
    raw = yaml.safe_load(FILE.replace("4 us", "4").replace("2039 GB/s", "2039 GB"))
    raw["peaks"]["bfloat61"] = {"value": "1 Pflop/s", "source": "a", "assumed": "b"}
    raw["efficiency"]["matmul"]["value"] = 2
    with pytest.raises(PartoptError) as refused:
        read_device(yaml.safe_dump(raw, sort_keys=False).encode(), "mine.yaml")
    assert [part.message.split(": ")[1] for part in refused.value.parts] == [
        *("bandwidth.value", "launch.value", "efficiency.matmul.value", "peaks.bfloat61", "peaks")
    ]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("h100", "H100-80GB", True),
        ("H100-80GB", "A100-80GB", False),
        ("mine", "mine", True),
        ("mine", "h100", False),
        ("mine", "yours", False),
    ],
)
def test_two_names_of_one_device(first, second, same):
    assert same_device(first, second) == same


def test_a_format_without_a_peak_is_refused_with_those_that_have_one():
    made = Roofline.load("a100")
    for dtype in ("bfloat16", "float32"):
        made.check_dtype(dtype)
    with pytest.raises(PartoptError, match="`weights=float8`: A100-80GB has no peak for it") as no:
        made.check_dtype("float8", "weights")
    assert no.value.hint == "it has bfloat16, float16, float32, float64"
    fields = {"option": "weights", "value": "float8", "device": made.name}
    assert (no.value.code, no.value.fields) == ("unsupported-dtype", fields)
