"""The table of scores that others published: its schema, and a few cells against what the sources say."""

from zaya.leaderboards.page import published_rows


def test_every_row_has_a_protocol_a_source_and_a_percentage():
    rows = published_rows()
    assert len(rows) > 100
    for row in rows:
        assert list(row) == ["benchmark", "model", "score_percent", "protocol", "source", "url"]
        assert all(value and value == value.strip() for value in row.values()), row
        assert 0 < float(row["score_percent"]) < 100, row
        assert row["url"].startswith("https://"), row


def test_no_number_appears_twice_under_one_source():
    keys = [(r["source"], r["benchmark"], r["model"]) for r in published_rows()]
    assert len(keys) == len(set(keys))


def test_a_source_names_one_protocol_per_benchmark():
    protocols: dict = {}
    for r in published_rows():
        protocols.setdefault((r["source"], r["benchmark"]), set()).add(r["protocol"])
    assert all(len(p) == 1 for p in protocols.values())


def test_one_model_keeps_the_different_numbers_of_different_sources():
    gemma = {r["source"]: r for r in published_rows() if (r["benchmark"], r["model"]) == ("GSM8K", "Gemma-3-4B")}
    scores = sorted((r["score_percent"], r["protocol"]) for r in gemma.values())
    assert scores == [("38.4", "8-shot"), ("43.97", "4-shot CoT")]
