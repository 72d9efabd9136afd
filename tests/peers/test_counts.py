from peers.counts import Counts, surprises


def test_a_run_that_patched_nothing_is_a_surprise():
    assert surprises(Counts({}, {}), ["LlamaModel"]) == ["LlamaModel: none was patched"]


def test_a_refusal_is_a_surprise_unless_its_error_is_known():
    counts = Counts({"LlamaModel": 3}, {"LlamaModel: rope type 'dynamic'": 1, "LlamaModel: other": 2})
    assert surprises(counts, ["LlamaModel"], ["'dynamic'"]) == ["2 times refused, LlamaModel: other"]
