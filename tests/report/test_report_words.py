"""Small parts of the report: numbers as text, names and colours, commands."""

import pytest

from zonal import mechanisms
from zonal.evaluation import Spread
from zonal.report import commands, formats, page, style, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (512, "512 B"),
        (1024, "1 KiB"),
        (140_352, "137 KiB"),
        (134_217_728, "128 MiB"),
        (5 * 2**40, "5 TiB"),
        (None, "–"),
    ],
)
def test_bytes(value, text):
    assert formats.bytes_(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.21, "8.21 s"),
        (59.99, "60 s"),
        (200, "3 min 20 s"),
        (120, "2 min"),
        (3900, "1 h 5 min"),
        (7200, "2 h"),
        (0, "0 s"),
    ],
)
def test_seconds(value, text):
    assert formats.seconds(value) == text


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (0.98123, 0.0042, "0.981 ± 0.004"),
        (0.98123, 0.00042, "0.98123 ± 0.00042"),
        (0.98123, 0.0, "0.981 ± 0.000"),
        (0.8, 1.36e-16, "0.800 ± 0.000"),  # of three seeds with 0.8
        (1e-4, 1e-8, "0.00010 ± 0.00000"),
        (4e-7, 1e-7, "4.0e-07 ± 1.0e-07"),
        (2e9, 3e8, "2.0e+09 ± 3.0e+08"),
        (1.5, None, "1.500"),
    ],
)
def test_spread_never_reads_as_zero(mean, deviation, text):
    assert formats.spread(Spread(3, mean, deviation, mean, mean, None, None)) == text
    assert formats.spread(None) == "–"


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (0.0031, 0.00015, "0.0031 ± 0.0001"),
        (0.69, 0.087, "0.69 ± 0.09"),
        (0.0, 0.0, "0"),
        (0.2, 1.3, "0.20 ± 1.30"),
        (1e-16, 0.0, "0"),
        (0.25, 2e-16, "0.25 ± 0.00"),
        (4e-7, 1e-7, "4.0e-07 ± 1.0e-07"),
        (2e9, 3e8, "2.0e+09 ± 3.0e+08"),
    ],
)
def test_margin(value, half, text):
    assert formats.margin(value, half) == text


def test_a_difference_never_reads_as_zero():
    found = [formats.difference(value) for value in (0.0, 1e-17, 4e-7, -0.0123, 0.5, 2e9)]
    assert found == ["0", "0", "4.0e-07", "0.012", "0.50", "2.0e+09"]


def test_sparkline_follows_the_curve():
    assert formats.sparkline([3, 2, 1, 0]) == "█▆▃▁"
    assert formats.sparkline([1, 1]) == "▁▁"
    assert formats.sparkline([]) == ""
    assert len(formats.sparkline(range(1000))) == 24


def test_compact_numbers():
    assert [formats.compact(value) for value in (0, 999, 12_345, 2_500_000)] == ["0", "999", "12.3k", "2.5M"]
    assert [formats.compact(value) for value in (999.4, 999.5, 999_499, -999_999)] == ["999", "1k", "999k", "-1M"]
    assert formats.rate(0.0003) == "0.0003"
    assert formats.rate(3e-5) == "3e-5"
    assert formats.tokens(131072) == "128k"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
        (["K=0, then K=1", "b"], '"K=0, then K=1" and b'),
        (["a (n=1, m=2)", "b", "c"], "a (n=1, m=2), b and c"),
        (["a", "K=0, then K=1", "c"], 'a, "K=0, then K=1" and c'),
    ],
)
def test_names_with_commas_stay_apart(names, text):
    assert formats.enumerate_names([formats.named(name) for name in names]) == text


def test_dates():
    assert formats.date("2026-01-31T12:00:00+00:00") == "31 January 2026, 12:00 UTC"
    assert formats.date("yesterday") == "yesterday"


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("softmax", "Softmax"),
        ("ska", "SKA K=1"),
        ("ska(power=0)", "Ridge (SKA K=0)"),
        ("ska(power=1)", "SKA K=1"),
        ("ska(power=5)", "SKA K=5"),
        ("sq", "Squared affine"),
        ("sko(degrees=(2, 3))", "SKO (degrees=(2, 3))"),
        ("mine", "mine"),
        ("not a spec (", "not a spec ("),
    ],
)
def test_labels(spec, label):
    assert style.label(spec) == label


def test_an_operator_keeps_its_colour_in_any_company():
    for company in (["softmax", "sko"], ["linear", "sko", "yat"], ["sko(degrees=(2,3))", "sko"], ["new", "sko"]):
        assert style.looks(company)["sko"] == style.LOOKS[1]


def test_no_two_operators_of_a_page_share_a_look():
    specs = [
        "softmax",
        "sko",
        "sko(degrees=(2,3))",
        "sko(degrees=(4,5))",
        "ska(power=0)",
        "ridge",
        "ska(power=7)",
        "mine",
    ]
    assert len(set(style.looks(specs).values())) == len(specs)


def test_every_known_operator_of_the_library_has_a_look_and_an_explanation():
    specs = [name for name in mechanisms.names() if style.explanation(name) is not None]
    assert set(mechanisms.names()) == set(specs)
    own = [name for name in specs if name in style._PLACES]
    assert own
    assert len({style.looks([name])[name] for name in own}) == len(own)


def contrast(one: str, other: str) -> float:
    """WCAG contrast of two #rrggbb colours."""

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_from_both_pages():
    for look in style.LOOKS:
        assert contrast(look.light, "#fdfcf9") >= 4, look
        assert contrast(look.dark, "#16171a") >= 4, look


def test_every_look_can_be_drawn_in_a_legend():
    template = page._environment(html=True).get_template("swatch.html.j2").module
    drawn = {str(template.swatch("o1", look)).replace(look.dash, "") for look in style.LOOKS}
    assert len({text.partition("<path")[2] for text in drawn}) == len(style.LOOKS)


def test_row_command_sets_what_differs_and_drops_places():
    command = (
        "zonal compare --task text --data 'my file.txt' --operators softmax,sko --seeds 3 --budget 10m "
        "--out runs/x --resume"
    )
    assert commands.row_command(command, "sko(degrees=(2, 3))", 0.003, 420) == (
        "zonal compare --task text --data 'my file.txt' --operators 'sko(degrees=(2, 3))' --seeds 3 "
        "--learning-rates 0.003 --steps 420"
    )


def test_commands_of_underscores_do_not_contradict_themselves():
    command = "zonal compare --task text --learning_rates 1e-3,3e-3 --steps=9 --mlp_ratio=2"
    assert commands.row_command(command, "sko", 0.003, 420) == (
        "zonal compare --task text --learning-rates 0.003 --steps 420 --mlp-ratio 2 --operators sko"
    )


def test_a_foreign_command_is_left_alone():
    assert commands.row_command("python my_script.py --x 1", "sko", 0.1, 3) == "python my_script.py --x 1"
    assert commands.fixed_command("it's broken", 3) == "it's broken"


def test_settings_have_a_row_each_and_so_has_a_list_of_records_with_the_same_fields():
    shapes = [{"kind": "mqar", "length": 64}, {"kind": "needle", "length": 512}]
    nested = {"stages": [{"start": 0, "shapes": shapes}], "betas": [0.9, 0.95], "clip": None, "none": []}
    assert table.settings(nested) == [
        ("stages[0].start", "0"),
        ("stages[0].shapes (kind, length)", "mqar 64; needle 512"),
        ("betas", "0.9, 0.95"),
        ("clip", "–"),
        ("none", ""),
    ]
    uneven = {"shapes": [{"kind": "mqar", "length": 64}, {"kind": "needle"}, 3]}
    assert table.settings(uneven) == [
        ("shapes[0].kind", "mqar"),
        ("shapes[0].length", "64"),
        ("shapes[1].kind", "needle"),
        ("shapes[2]", "3"),
    ]
