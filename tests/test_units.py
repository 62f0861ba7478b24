import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_number,
    format_rate,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_power,
    parse_price,
    parse_seconds,
    parse_share,
)
from tests.examples import examples

PARSERS = [parse_bytes, parse_bandwidth, parse_flops, parse_seconds, parse_power]
PARSERS += [parse_share, parse_price]

READ = [
    (parse_bytes, "16 GB", 16 * 10**9),
    (parse_bytes, "80 GiB", 80 * 2**30),
    (parse_bytes, "1.5 MB", 1_500_000),
    (parse_bytes, "0 B", 0),
    (parse_bytes, "512kB", 512_000),
    (parse_bytes, " 2e3 TB ", 2 * 10**15),
    # rates count bits and bytes
    (parse_bandwidth, "200 Gb/s", 25e9),
    (parse_bandwidth, "25 GB/s", 25e9),
    (parse_bandwidth, "10 Gbps", 1.25e9),
    (parse_bandwidth, "8 b/s", 1.0),
    (parse_bandwidth, "1 KiB/s", 1024.0),
    (parse_bandwidth, "0.5 MBps", 5e5),
    (parse_seconds, "50 us", 50e-6),
    (parse_seconds, "50µs", 50e-6),
    (parse_seconds, "1.5 ms", 1.5e-3),
    (parse_seconds, "2 s", 2.0),
    (parse_seconds, "3e1 ns", 30e-9),
    (parse_flops, "312 Tflop/s", 312e12),
    (parse_flops, "1.5 Pflop/s", 1.5e15),
    (parse_flops, "900 Gflop/s", 9e11),
    (parse_flops, "5e6 flop/s", 5e6),
    (parse_power, "700 W", 700.0),
    (parse_power, "1.2 kW", 1200.0),
    (parse_share, "5%", 0.05),
    (parse_share, " 1.5e1 % ", 0.15),
    (parse_price, "2.50 per hour", 2.5),
    (parse_price, " 1e1  per hour ", 10.0),
]


@pytest.mark.parametrize(("parse", "text", "value"), READ)
def test_quantities_are_read_in_base_units(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-15)


NEVER = ["", " ", "GB", "nan GB", "inf GB", "-1 GB", "+1 GB", "1,5 GB", "1 2 GB", "0x10 GB"]
NEVER += ["1e GB", [], ["16 GB"], {}, None, "16 GB extra"]
BARE = ["200", "0", "1e9", 200, 0, 12.5, True, float("nan"), -3]


@pytest.mark.parametrize("parse", PARSERS)
def test_what_is_no_quantity_is_refused(parse):
    for text in (*NEVER, *BARE):
        with pytest.raises(PartoptError) as error:
            parse(text)
        assert error.value.hint.startswith("write ")
        assert error.value.exit_code == 2
    for text in BARE:
        with pytest.raises(PartoptError, match=r"has no unit|is not a (quantity|share|price)"):
            parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "message", "hint"),
    [
        (parse_bytes, "16 Gb", "'16 Gb' is in bits", 'write "16 GB" (bytes)'),
        (parse_bytes, "16 GB/s", "'16 GB/s' is a rate, not a size", 'write "16 GB"'),
        (parse_bytes, "16 Gbps", "'16 Gbps' is a rate, not a size", 'write "16 Gb"'),
        (parse_bandwidth, "25 GB", "'25 GB' is a size, not a rate", 'write "25 GB/s"'),
        (parse_bytes, "16 gb", "'16 gb': 'gb' is not a unit of data", "k M G T and Ki Mi Gi Ti"),
        (parse_bytes, "16 KB", "'16 KB': 'KB' is not a unit of data", "k M G T and Ki Mi Gi Ti"),
        (parse_bytes, "16 EB", "'16 EB': 'EB' is not a unit of data", "k M G T and Ki Mi Gi Ti"),
        (parse_bandwidth, "25 GB/h", "'25 GB/h' is not a quantity", "200 Gb/s"),
        (parse_bandwidth, "1 s", "'1 s': 's' is not a unit of data", "200 Gb/s"),
        (parse_seconds, "5 min", "'5 min': 'min' is not a unit of time", "50 us"),
        (parse_seconds, "5 GB", "'5 GB': 'GB' is not a unit of time", "50 us"),
        (parse_bytes, "1e400 GB", "'1e400 GB' is too large", "finite"),
        (parse_bandwidth, "1e308 GB/s", "'1e308 GB/s' is too large", "finite"),
        (parse_seconds, "1e309 s", "'1e309 s' is too large", "finite"),
        (parse_flops, "5 TB", "'5 TB': 'TB' is not a unit of computing speed", "312 Tflop/s"),
        (parse_flops, "1e309 flop/s", "'1e309 flop/s' is too large", "finite"),
        (parse_power, "5 J", "'5 J': 'J' is not a unit of power", '"700 W" or "1.2 kW"'),
        (parse_power, "1e306 kW", "'1e306 kW' is too large", "finite"),
        (parse_share, " 5 ", "'5' is not a share in percent", 'write "5%"'),
        (parse_share, "half", "'half' is not a share in percent", 'write "5%"'),
        (parse_share, "1e309%", "'1e309%' is too large", "finite"),
        (parse_price, " 3 ", "'3' has no unit", 'write "3 per hour", in any currency'),
        (parse_price, "$3 per hour", "'$3 per hour' is not a price", 'write "2.50 per hour"'),
        (parse_price, "1e309 per hour", "'1e309 per hour' is too large", "finite"),
    ],
)
def test_the_wrong_unit_is_refused_with_the_right_one(parse, text, message, hint):
    with pytest.raises(PartoptError) as error:
        parse(text)
    assert error.value.message == message
    assert hint in error.value.hint


PRINTED = {
    format_bytes: {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        999_500: "1 MB",
        28_900_000_000: "28.9 GB",
        1_234_567: "1.23 MB",
        10**18: "1 EB",
    },
    format_bandwidth: {12.5e9: "12.5 GB/s"},
    format_flops: {312e12: "312 Tflop/s"},
    format_count: {0: "0", 14_100_000: "14.1 M", 1e21: "1e+03 E"},
    format_number: {
        0.5: "0.5000",
        0.99996: "1.00",
        12.345: "12.35",
        99.996: "100.0",
        100: "100.0",
        999.94: "999.9",
        999.96: "1,000",
        1e3: "1,000",
    },
    lambda value: format_rate(value, "samples"): {
        975.61: "975.6 samples/s",
        12.345: "12.35 samples/s",
        0.01234: "0.0123 samples/s",
        1_234_567: "1,234,567 samples/s",
    },
    format_seconds: {
        0: "0 s",
        0.04234: "42.34 ms",
        0.00014: "140.0 us",
        3e-9: "3.00 ns",
        1e-12: "0.00 ns",
        1.0: "1.00 s",
        0.99996: "1.00 s",
    },
}


def test_quantities_print_with_three_digits_in_the_unit_that_suits():
    for write, texts in PRINTED.items():
        for value, text in texts.items():
            assert write(value) == text


@given(st.integers(0, 10**18), st.floats(1e-9, 1e6))
def test_what_is_printed_reads_back_to_three_digits(size, seconds):
    text = format_bytes(size)
    # more than a device has: printed, and no unit that people write
    if not text.endswith(("PB", "EB")):
        assert parse_bytes(text) == pytest.approx(size, rel=5.1e-3, abs=0.5)
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=5.1e-3)


@examples(40)
@given(st.text() | st.integers() | st.floats() | st.lists(st.text()))
def test_anything_at_all_is_a_finite_quantity_or_an_error(given_text):
    for parse in PARSERS:
        try:
            assert 0 <= parse(given_text) < float("inf")
        except PartoptError as error:
            assert error.hint
