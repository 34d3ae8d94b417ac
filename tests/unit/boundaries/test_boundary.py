"""The hint holds the positions that save the most, and no more than its budget."""

from proxy.boundaries.boundary import Boundary, worth_sending


def at(tokens, kind="system"):
    return Boundary(tokens, kind, b"")


def test_all_are_sent_where_there_is_room():
    assert worth_sending([at(100), at(400, "history"), at(420, "turn")], 16, 6) == (100, 400, 420)


def test_what_saves_most_goes_first():
    many = [at(1000), at(1100, "history"), at(5000, "turn"), at(1050, "explicit")]
    assert worth_sending(many, 16, 1) == (5000,)
    assert worth_sending(many, 16, 2) == (1000, 5000)


def test_a_state_is_one_however_many_positions_lie_in_its_unit():
    assert worth_sending([at(160), at(163, "history"), at(300, "turn")], 16, 2) == (160, 163, 300)


def test_what_is_below_the_match_unit_is_not_sent():
    assert worth_sending([at(9), at(12, "turn")], 16, 6) == ()


def test_the_engine_takes_sixteen():
    assert len(worth_sending([at(16 * number + part) for number in range(1, 10) for part in range(3)], 16, 16)) == 16
