import hashlib
import json
from ast import literal_eval

import pytest
from msgspec.structs import replace

from partopt import documents
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from tests.helpers import chain_profile, changed, measurement, out_of_memory, profile_of, rows

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
LAYERS = "measurements[0].layers"


def faults(content):
    with pytest.raises(PartoptError) as error:
        Profile.parse(content, "p")
    return [part.message for part in error.value.parts]


WRONG = rows("""
    layers | [] | layers: expected a list of length >= 1
    measurements | [] | measurements: expected a list of length >= 1
    layers[0].call | -1 | layers[0].call: expected a whole number >= 0
    layers[1].name | 'layer0' | layers[1]: "layer0" call 0 is listed twice
    layers[0].shared_parameters[0].bytes | 101 |
        layers[0].shared_parameters: more bytes than parameter_bytes
    layers[0].frozen_bytes | 51 |
        layers[0].frozen_bytes: 51 bytes frozen of 100, of which 0 are shared and frozen, 50 shared
        and not
    layers[1].measured_as | 3 | layers[1].measured_as: there is no layer 3
    layers[2].shared_parameters[0].bytes | 51 |
        layers[2].shared_parameters: "tied" has 51 bytes here and 50 before
    layers[2].shared_parameters[0].frozen | True |
        layers[2].shared_parameters: "tied" is frozen in one layer and not in another
    measurements[0].microbatch_size | 1.5 |
        measurements[0].microbatch_size: expected a whole number, found a number
    measurements[0].step_s | -1.0 | measurements[0].step_s: expected a number >= 0.0
    measurements[0].out_of_memory | True |
        measurements[0].layers: given although the size ran out of memory
    measurements[0].layers[2].backward_s | True |
        measurements[0].layers[2].backward_s: expected a number, found true or false
    measurements[0].layers[2].output_bytes | -30 |
        measurements[0].layers[2].output_bytes: expected a whole number >= 0
    measurements[0].layers[0].backward_input_s | 1.0 |
        measurements[0].layers[0].backward_input_s: longer than backward_s, of which it is a part
    measurements[0].layers | [] | measurements[0].layers: 0 measurements for 3 layers
    measurements[0].tensors[0].producer | 3 | measurements[0].tensors[0]: there is no layer 3
    measurements[0].tensors[1].consumers | [9] | measurements[0].tensors[1]: there is no layer 9
    measurements[0].tensors[1].consumers | [1] |
        measurements[0].tensors[1]: consumed by layer 1, before it is made
    measurements[0].tensors[1].consumers | [] |
        measurements[0].tensors[1].consumers: expected a list of length >= 1
    measurements[0].stash_groups[0].layers | [0, 7] |
        measurements[0].stash_groups[0]: there is no layer 7
    measurements[0].stash_groups[0].layers | [0, 3] |
        measurements[0].stash_groups[0]: there is no layer 3
""")


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_wrong_value_is_named_with_its_place(path, value, message):
    assert f"p: {message}" in faults(changed(CHAIN, path, to=literal_eval(value)))


def test_all_that_is_shared_and_frozen_is_frozen():
    """Two of 50 bytes in each layer."""
    plain = chain_profile([1.0] * 2, parameter_bytes=[150] * 2, shared=[("a", [0, 1], 50)])
    shared = [
        replace(own, name=n, frozen=True) for n in "ab" for own in plain.layers[0].shared_parameters
    ]
    for frozen, refused in ((99, True), (100, False), (150, False), (151, True)):
        layers = [
            replace(each, shared_parameters=shared, frozen_bytes=frozen) for each in plain.layers
        ]
        found = [fault.message for fault in replace(plain, layers=layers).faults()]
        assert [*found] == refused * [
            f"layers[{n}].frozen_bytes: {frozen} bytes frozen of 150, of which 100 are shared and "
            "frozen, 0 shared and not"
            for n in range(2)
        ]


def test_what_is_just_possible_is_no_fault():
    for path, value in (
        ("layers[1].measured_as", 2),
        ("layers[0].frozen_bytes", 50),  # all but what is shared and has a gradient
        ("layers[0].shared_parameters[0].bytes", 50),
        (f"{LAYERS}[0].backward_input_s", 0.001),
        ("measurements[0].stash_groups[0].layers", [0, 2]),
        (LAYERS, [{"forward_s": 0, "backward_s": 1e-9, "output_bytes": 0}] * 3),
    ):
        Profile.parse(changed(CHAIN, path, to=value), "p")


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({}, (550, 1, None)),
        ({"group": {"ranks": 2}}, (550, 2, None)),
        ({"estimated": {"device": "H100", "sha256": "0"}}, (550, 1, "H100")),
    ],
)
def test_what_a_profile_is_of(fields, known):
    own = Profile.parse(json.dumps(json.loads(CHAIN) | fields).encode())
    assert (own.parameter_bytes(), own.group_ranks, own.estimated_for) == known


def test_faults_of_meaning_are_told_together():
    document = json.loads(CHAIN)
    document["layers"][1]["name"] = "layer0"
    document["measurements"][0]["tensors"][0]["consumers"] = [4, 5]
    assert len(faults(json.dumps(document).encode())) == 3


def test_microbatch_sizes_ascend_and_some_fit():
    for sizes in ([2, 1], [1, 1]):
        made = profile_of([measurement([1.0], microbatch_size=size) for size in sizes])
        [fault] = faults(documents.encode(made))
        assert f"microbatch sizes {sizes} are not ascending" in fault
    content = changed(CHAIN, "measurements", to=[{"microbatch_size": 4, "out_of_memory": True}])
    assert faults(content) == ["p: measurements: every microbatch size ran out of memory"]
    loaded = Profile.parse(documents.encode(profile_of([measurement([1.0]), out_of_memory(2)])))
    assert [each.microbatch_size for each in loaded.measurements] == [1, 2]
    assert [each.microbatch_size for each in loaded.measured()] == [1]


def test_some_layer_must_take_time_and_none_a_thousand_years():
    assert faults(documents.encode(chain_profile([0.0, 0.0]))) == [
        "p: measurements[0].layers: no layer takes any time"
    ]
    expected = [
        f"p: measurements[0].layers[0].{part}_s: expected a number <= 1000000000.0"
        for part in ("forward", "backward")
    ]
    assert faults(documents.encode(chain_profile([1e308]))) == expected


def test_the_digest_is_of_the_content_not_of_the_layout():
    def digest(content):
        return Profile.parse(content).sha256()

    assert documents.encode(Profile.parse(CHAIN)) == CHAIN
    assert digest(json.dumps(json.loads(CHAIN)).encode()) == digest(CHAIN)
    assert digest(changed(CHAIN, f"{LAYERS}[0].forward_s", to=0.0011)) != digest(CHAIN)
    assert len(bytes.fromhex(digest(CHAIN))) == hashlib.sha256().digest_size


def test_calls_of_one_module_are_layers_of_their_own():
    content = changed(changed(CHAIN, "layers[1].name", to="layer0"), "layers[1].call", to=1)
    assert [(layer.name, layer.call) for layer in Profile.parse(content).layers[:2]] == [
        ("layer0", 0),
        ("layer0", 1),
    ]
