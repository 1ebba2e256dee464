"""Which cases of a sweep are run."""

from types import SimpleNamespace

import draws
import pytest

pytestmark = pytest.mark.workshop


class Item(SimpleNamespace):
    """A case of a sweep that draws two, or of a test that is no sweep, as pytest collects it."""

    def __hash__(self):
        return hash(self.name)

    def get_closest_marker(self, name):
        of = {"sweep": {"draw": (2,)}, "turns": {"turn": self.callspec.params.get("turn")}}.get(self.originalname, {})
        return SimpleNamespace(args=of[name], kwargs={}) if name in of else None


def case(name, number, **params):
    return Item(originalname=name, name=f"{name}[{number}]", parent="file", callspec=SimpleNamespace(params=params))


def names(seed, monkeypatch, items, ranks=1, most=None):
    monkeypatch.setenv(draws.VARIABLE, str(seed))
    return [item.name for item in draws.drawn(items, ranks, most)]


def test_a_few_cases_in_their_order(monkeypatch):
    items = [case("sweep", number) for number in range(5)] + [case("other", number) for number in range(3)]
    every = [item.name for item in items]
    drawn = [names(seed, monkeypatch, items) for seed in range(1, 20)]
    for some in drawn:
        assert some == sorted(some, key=every.index) and len(some) == 2 + 3 and some[2:] == every[5:]
    assert drawn[3] == names(4, monkeypatch, items), "a seed always draws the same"
    assert set().union(*drawn) == set(every), "others come in turn"
    assert any(names(seed, monkeypatch, items, ranks=3) != drawn[seed - 1] for seed in range(1, 20))
    assert names(1, monkeypatch, items[:1]) == every[:1], "of what -k leaves"


@pytest.mark.parametrize(("args", "few"), [((), 5), ((2,), 2)])
def test_slow_cases_are_drawn_apart(monkeypatch, args, few):
    class Slow(Item):
        __hash__ = Item.__hash__

        def get_closest_marker(self, name):
            slow = int(self.name[-2]) >= 5
            return (
                SimpleNamespace(args=args, kwargs={"slow": 1})
                if name == "draw" or (name, slow) == ("slow", True)
                else None
            )

    items = [Slow(**vars(case("sweep", number))) for number in range(9)]
    drawn = names(3, monkeypatch, items)
    assert sum(int(name[-2]) < 5 for name in drawn) == few and len(drawn) == few + 1


def test_each_group_of_ranks_draws(monkeypatch):
    """A launch of few ranks skips the cases of more: it has some of its own."""
    items = [case("sweep", f"{number}-{ranks}", group=ranks) for number in range(4) for ranks in (2, 8)]
    drawn = names(7, monkeypatch, items)
    assert sorted(name[-2] for name in drawn) == ["2", "2", "8", "8"]


def test_no_more_than_a_number_of_each_test(monkeypatch):
    """Of a test that is no sweep too; a sweep that draws fewer stays as it is."""
    items = [case(name, number) for name in ("sweep", "other") for number in range(5)]
    for most, counts in ((1, [1, 1]), (3, [2, 3])):
        drawn = [names(seed, monkeypatch, items, most=most) for seed in range(1, 20)]
        assert all([sum(n.startswith(name) for n in some) for name in ("sweep", "other")] == counts for some in drawn)
        assert len(set().union(*drawn)) == 10, "others come in turn"


def test_turns(monkeypatch):
    items = [case("turns", f"{number}-{i}", turn=(i, 3)) for number in range(4) for i in range(3)]
    for seed in range(7):
        drawn = names(seed, monkeypatch, items)
        assert len(drawn) == 4 and {name[-2] for name in drawn} == {str(seed % 3)}


def test_the_seed_is_of_the_commit_or_given(monkeypatch, tmp_path):
    monkeypatch.setenv(draws.VARIABLE, "12")
    assert draws.seed() == 12
    monkeypatch.delenv(draws.VARIABLE)
    monkeypatch.setattr(draws, "__file__", str(tmp_path / "tests" / "draws.py"))
    assert draws.seed() == 1, "where there is no commit"
    monkeypatch.delenv(draws.VARIABLE)
    monkeypatch.setattr(draws, "_of_the_commit", lambda: 99)
    assert draws.seed() == draws.seed() == 99
