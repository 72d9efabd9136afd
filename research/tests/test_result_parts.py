"""Parts of a run are found once, by key, and those before a new beginning count no more."""

from result_parts import Parts


def test_what_is_known_is_not_found_again(tmp_path):
    file, found = tmp_path / "parts.jsonl", []

    def find(value):
        return lambda: (found.append(value), value)[1]

    one, other = Parts(file, {"arm": "a", "seed": 0}), Parts(file, {"arm": "a", "seed": 1})
    assert one.get("loss", find([1.5])) == one.get("loss", find(None)) == [1.5]
    assert other.get("loss", find({"x": 2})) == {"x": 2}
    assert Parts(file, {"arm": "a", "seed": 0}).get("loss", find(None)) == [1.5]
    assert found == [[1.5], {"x": 2}]
    one.begin()
    assert one.get("loss", find(3)) == Parts(file, {"arm": "a", "seed": 0}).get("loss", find(None)) == 3
    assert Parts(file, {"arm": "a", "seed": 1}).known == {"loss": {"x": 2}}


def test_without_a_file_nothing_is_kept(tmp_path):
    parts = Parts(None, {"arm": "a"})
    parts.begin()
    assert parts.get("loss", lambda: 1) == parts.get("loss", lambda: 2) == 1
    assert Parts(None, {"arm": "a"}).known == {} and not list(tmp_path.iterdir())
