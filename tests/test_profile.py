import hashlib
import json

import pytest

from partopt import documents
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from tests.helpers import (
    chain_profile,
    changed,
    measurement,
    out_of_memory,
    profile_of,
    uniform_profile,
)

CHAIN = documents.encode(
    chain_profile(
        [0.001, 0.002, 0.003],
        output_bytes=[10, 20, 30],
        parameter_bytes=[100, 200, 300],
        tensors=[(0, [1, 2], 10), (1, [2], 20)],
        stash_groups=[([0, 1], 15)],
        shared=[("tied", [0, 2], 50)],
    )
)
LAYERS = ("measurements", 0, "layers")


def faults(content):
    with pytest.raises(PartoptError) as error:
        Profile.parse(content, "p")
    return [part.message for part in error.value.parts]


def test_a_chain_with_everything_round_trips():
    assert documents.encode(Profile.parse(CHAIN)) == CHAIN


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("layers",), [], "layers: expected a list of length >= 1"),
        (("measurements",), [], "measurements: expected a list of length >= 1"),
        (("layers", 0, "call"), -1, "layers[0].call: expected a whole number >= 0"),
        (("layers", 1, "name"), "layer0", 'layers[1]: "layer0" call 0 is listed twice'),
        (
            ("layers", 0, "shared_parameters", 0, "bytes"),
            101,
            "layers[0].shared_parameters: more bytes than parameter_bytes",
        ),
        (
            ("layers", 0, "frozen_bytes"),
            51,
            "layers[0].frozen_bytes: 51 bytes frozen of 100, of which 0 are shared and frozen, "
            "50 shared and not",
        ),
        (
            ("measurements", 0, "microbatch_size"),
            1.5,
            "measurements[0].microbatch_size: expected a whole number, found a number",
        ),
        (("measurements", 0, "step_s"), -1.0, "measurements[0].step_s: expected a number >= 0.0"),
        (
            ("measurements", 0, "out_of_memory"),
            True,
            "measurements[0].layers: given although the size ran out of memory",
        ),
        (
            (*LAYERS, 2, "backward_s"),
            True,
            "measurements[0].layers[2].backward_s: expected a number, found true or false",
        ),
        (
            (*LAYERS, 2, "output_bytes"),
            -30,
            "measurements[0].layers[2].output_bytes: expected a whole number >= 0",
        ),
        (
            (*LAYERS, 0, "backward_input_s"),
            1.0,
            (
                "measurements[0].layers[0].backward_input_s: longer than backward_s, of "
                "which it is a part"
            ),
        ),
        (LAYERS, [], "measurements[0].layers: 0 measurements for 3 layers"),
        (
            ("measurements", 0, "tensors", 0, "producer"),
            3,
            "measurements[0].tensors[0]: there is no layer 3",
        ),
        (
            ("measurements", 0, "tensors", 1, "consumers"),
            [9],
            "measurements[0].tensors[1]: there is no layer 9",
        ),
        (
            ("measurements", 0, "tensors", 1, "consumers"),
            [1],
            "measurements[0].tensors[1]: consumed by layer 1, before it is made",
        ),
        (
            ("measurements", 0, "tensors", 1, "consumers"),
            [],
            "measurements[0].tensors[1].consumers: expected a list of length >= 1",
        ),
        (
            ("measurements", 0, "stash_groups", 0, "layers"),
            [0, 7],
            "measurements[0].stash_groups[0]: there is no layer 7",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path, value, message):
    assert f"p: {message}" in faults(changed(CHAIN, *path, to=value))


def test_faults_of_meaning_are_told_together():
    document = json.loads(CHAIN)
    document["layers"][1]["name"] = "layer0"
    document["measurements"][0]["tensors"][0]["consumers"] = [4, 5]
    assert len(faults(json.dumps(document).encode())) == 3


@pytest.mark.parametrize(("sizes", "shown"), [((2, 1), r"\[2, 1\]"), ((1, 1), r"\[1, 1\]")])
def test_microbatch_sizes_ascend(sizes, shown):
    content = documents.encode(
        profile_of([measurement([1.0], microbatch_size=size) for size in sizes])
    )
    with pytest.raises(PartoptError, match=f"microbatch sizes {shown} are not ascending"):
        Profile.parse(content)


def test_some_size_must_fit():
    content = changed(CHAIN, "measurements", to=[{"microbatch_size": 4, "out_of_memory": True}])
    assert faults(content) == ["p: measurements: every microbatch size ran out of memory"]


def test_some_layer_must_take_time_and_none_a_thousand_years():
    assert faults(documents.encode(chain_profile([0.0, 0.0]))) == [
        "p: measurements[0].layers: no layer takes any time"
    ]
    expected = [
        f"p: measurements[0].layers[0].{part}_s: expected a number <= 1000000000.0"
        for part in ("forward", "backward")
    ]
    assert faults(documents.encode(chain_profile([1e308]))) == expected


def test_sizes_that_ran_out_of_memory_are_results_and_are_not_planned_with():
    loaded = Profile.parse(documents.encode(profile_of([measurement([1.0]), out_of_memory(2)])))
    assert [each.microbatch_size for each in loaded.measurements] == [1, 2]
    assert [each.microbatch_size for each in loaded.measured()] == [1]


def test_the_digest_is_of_the_content_not_of_the_layout():
    compact = json.dumps(json.loads(CHAIN)).encode()
    assert Profile.parse(compact).sha256() == Profile.parse(CHAIN).sha256()
    assert (
        Profile.parse(compact).sha256()
        != Profile.parse(changed(CHAIN, *LAYERS, 0, "forward_s", to=0.0011)).sha256()
    )
    assert len(bytes.fromhex(Profile.parse(CHAIN).sha256())) == hashlib.sha256().digest_size


def test_calls_of_one_module_are_layers_of_their_own():
    content = changed(changed(CHAIN, "layers", 1, "name", to="layer0"), "layers", 1, "call", to=1)
    assert [(layer.name, layer.call) for layer in Profile.parse(content).layers[:2]] == [
        ("layer0", 0),
        ("layer0", 1),
    ]


def test_ten_thousand_layers_load(tmp_path):
    path = tmp_path / "large.json"
    uniform_profile(10_000).save(str(path))
    assert len(Profile.load(str(path)).layers) == 10_000
