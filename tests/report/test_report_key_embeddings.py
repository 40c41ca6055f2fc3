"""Where keys lie and what became of the distances: from files to the page; refused where it makes no sense."""

import json

import pytest
from report.comparison_folder import SLUGS, drawn, edited, write_comparison

from zonal import report
from zonal.errors import FileFormatError
from zonal.report import key_embeddings

SPACES = (("Euclidean", 0), ("Sphere", 1), ("Hyperbolic", -1))


def placed(layers=2, heads=2, tokens=9):
    def space(name, curvature, shift):
        return {
            "space": name,
            "curvature": curvature,
            "share": 0.75,
            "points": [[0.1 * i - 0.4, 0.05 * shift] for i in range(tokens)],
        }

    found = [
        {"layer": layer, "heads": [[space(*each, layer + head) for each in SPACES] for head in range(heads)]}
        for layer in range(layers)
    ]
    return {
        "schema": 1,
        "groups": ["key", "value"],
        "group": [i % 2 for i in range(tokens)],
        "tokens": [f"<{i}" for i in range(tokens)],
        "layers": found,
    }


def geometry(step):
    share = step / 30
    return [
        {"layer": 1, "weights": {"Sphere": [1.0, 1 + share], "Hyperbolic": [1.0, 1 - share]}, "curvature": [0.0, share]}
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = write_comparison(tmp_path_factory.mktemp("placed"), operators=("softmax", "sko"), rates=(0.001,), steps=30)
    run = found / "runs" / SLUGS["sko"] / "seed-0-lr-0.001"
    (run / "witnesses.json").write_text(json.dumps(placed()))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({**line, **({"geometry": geometry(line["step"])} if line["kind"] == "eval" else {})}) + "\n"
            for line in lines
        )
    )
    with edited(run / "run.json") as record:
        for key, step in (("learned_before", 0), ("learned", 30)):
            record[key][1] |= geometry(step)[0]
    report.write(found)
    return found


def operators(folder):
    return {each["label"]: each for each in drawn(folder / "report.html")[0]["operators"]}


def test_the_page_has_the_points_of_each_head_and_space(folder):
    found = operators(folder)
    assert found["Softmax"]["embeddings"] is None
    drawn, file = found["SKO"]["embeddings"], placed()
    assert drawn["groups"] == ["key", "value"]
    assert drawn["group"] == file["group"]
    assert drawn["tokens"] == file["tokens"]
    assert [(s["layer"], s["head"], s["name"], s["curvature"]) for s in drawn["spaces"]] == [
        (la, h, *s) for la in (1, 2) for h in (1, 2) for s in SPACES
    ]
    last = file["layers"][1]["heads"][1][2]
    assert [list(point) for point in zip(drawn["spaces"][-1]["x"], drawn["spaces"][-1]["y"], strict=True)] == last[
        "points"
    ]


def test_the_page_has_weights_from_before_training_to_its_end(folder):
    drawn = operators(folder)["SKO"]["geometry"]
    assert drawn["steps"][0] == 0
    assert drawn["steps"][-1] == 30
    assert sorted(set(drawn["steps"])) == drawn["steps"]
    (layer,) = drawn["layers"]
    assert layer["layer"] == 2
    assert layer["weights"]["Sphere"] == [
        [1.0] * len(drawn["steps"]),
        [pytest.approx(1 + step / 30, rel=1e-3) for step in drawn["steps"]],
    ]
    assert layer["curvature"][1][-1] == 1.0
    assert operators(folder)["Softmax"]["geometry"] is None


def test_page_and_twin_say_what_was_learned(folder):
    page, twin = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert "What became of the distances" in page
    assert "Where keys lie" in page
    assert page.count("Head 2</span>") == 1
    table = twin[twin.index("| Operator | Layer |") :].splitlines()
    head, row = table[0], next(line for line in table if line.startswith("| SKO | 2 |"))
    learned = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert [float(value) for value in learned["weight of Sphere"].split()] == [1, 2]
    assert [float(value) for value in learned["curvature"].strip(" |").split()] == [0, 1]


def test_a_page_without_distances_does_not_speak_of_them(tmp_path):
    found = write_comparison(tmp_path, operators=("softmax", "linear"), rates=(0.001,), steps=30)
    report.write(found)
    assert "data-embeddings" not in (found / "report.html").read_text()
    assert "data-geometry" not in (found / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(schema=2), "schema 1"),
        (lambda record: record.pop("groups"), "lacks the key 'groups'"),
        (lambda record: record["layers"][0]["heads"][0][0].update(points=[[0, 1, 2]] * 9), "must have 2 entries"),
        (lambda record: record["layers"][1]["heads"][0][1]["points"].pop(), "a point in every space"),
        (lambda record: record.update(group=[0] * 8 + [2]), "count the 2 names"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(change, message, tmp_path):
    record = placed()
    change(record)
    (tmp_path / "witnesses.json").write_text(json.dumps(record))
    with pytest.raises(FileFormatError, match=message):
        key_embeddings.load(tmp_path)
