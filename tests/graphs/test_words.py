"""Numbers in answers."""

import pytest

from cast_engine.graphs.words import COUNTS, count_of, count_word


def test_every_number_is_read_as_it_is_written():
    assert [count_of(count_word(n)) for n in range(40)] == list(range(40))
    assert (COUNTS[0], count_word(10), count_word(11)) == ("zero", "ten", "11")


@pytest.mark.parametrize(
    ("answer", "count"), [("Three", 3), (" 12 ", 12), ("Yes", None), ("", None), ("-1", None), ("1" * 10, None)]
)
def test_answers_of_any_judge(answer, count):
    assert count_of(answer) == count
