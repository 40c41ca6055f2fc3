"""``zonal tasks``: the list, and one task with its examples."""

import pytest
from cli.commands import refused

from zonal import tasks
from zonal.cli import main


def test_the_list_names_every_task(capsys):
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(tasks.names())
    assert all(about in line for line, about in zip(lines, tasks.names().values(), strict=True))


def test_a_task_is_shown_with_what_it_asks(capsys):
    assert main(["tasks", "show", "first-token", "--length", "16", "--count", "2"]) == 0
    about, metric, tokens, *examples = capsys.readouterr().out.splitlines()
    assert about.startswith("first-token: the first word; 3 to 15 items in 16 tokens")
    guess = tasks.resolve("first-token", tasks.TaskSettings(length=16)).guess()
    assert metric == f"metric  accuracy; a guess {guess.value:.3f}"
    assert tokens == "tokens  36 different ones; up to 16 in a sequence"
    found = [line.split() for line in examples if line]
    assert len(found) == 2
    for words in found:
        *read, marker, asked = words
        assert marker == ">"
        assert asked == f"[{next(word for word in read if word != '·')}]"


def test_a_guess_of_what_was_trained_says_so(capsys):
    """Trained pairs hold the word itself, which is found by equality; those that are held out do not."""
    assert main(["tasks", "show", "hypernyms", "--subset", "carnivore", "--count", "1"]) == 0
    about, metric, *_ = capsys.readouterr().out.splitlines()
    assert about.endswith("where a guess among the labels in the context is right in 12.5%.")
    assert metric == "metric  accuracy; a guess 0.417 on what was trained (pairs trained)"


def test_text_is_shown_as_text(capsys):
    assert main(["tasks", "show", "text", "--length", "40", "--count", "1"]) == 0
    assert "[" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show", "tasks: show requires the name of a task"),
        ("show srot", "unknown task 'srot'. Did you mean 'sort'?"),
        ("list sort", "tasks: list takes no name. Run: zonal tasks show sort"),
        ("show sort --pairs 3", "'sort' takes no pairs"),
        ("show sort --count 0", "count"),
    ],
)
def test_a_mistake_is_told(words, message, capsys):
    refused(f"tasks {words}", capsys, message)
