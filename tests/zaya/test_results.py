"""Result files: schema, provenance, and digests that do not depend on when they were made."""

import datetime
import json
import subprocess

import pytest

from zaya import results
from zaya.errors import UserError


def make(value=0.5, **fields):
    began = datetime.datetime.now(datetime.UTC)
    metric = results.Metric(name="acc", value=value, unit="fraction", stderr=0.1, n=100)
    fields = {"kind": "quality", "name": "piqa", "subject": "zaya", "metrics": [metric]} | fields
    return results.Result(provenance=results.provenance(began, seed=1), **fields)


def test_round_trip_and_provenance(tmp_path):
    path = results.save(tmp_path, make())
    back = results.load(path)
    assert back.metrics[0].value == 0.5
    p = back.provenance
    assert p.versions["torch"].startswith("2.")
    assert p.hardware["cores"] >= 1
    assert p.seed == 1
    assert p.git_commit is None or len(p.git_commit) == 40
    assert [r.name for r in results.load_all(tmp_path)] == ["piqa"]


@pytest.mark.parametrize(
    ("below", "ours"), [(".venv/lib/python3.11/site-packages", False), (".", True), ("src", False)]
)
def test_the_commit_is_of_our_own_checkout_only(tmp_path, monkeypatch, below, ours):
    """An environment inside a user's repository has the user's commit above it."""
    (tmp_path / below / "zaya").mkdir(parents=True, exist_ok=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "zaya"\n')
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "theirs"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(results, "__file__", str(tmp_path / below / "zaya" / "results.py"))
    results._git.cache_clear()
    results._checkout.cache_clear()
    try:
        made = make().provenance
        assert (made.git_commit is not None, made.git_dirty) == ((True, False) if ours else (False, None))
    finally:
        results._git.cache_clear()
        results._checkout.cache_clear()


def test_digest_ignores_provenance_only(tmp_path):
    one = results.save(tmp_path / "1", make())
    two = results.save(tmp_path / "2", make())
    other = results.save(tmp_path / "3", make(value=0.6))
    assert one.read_text() != two.read_text() or results.sha256_file(one) == results.sha256_file(two)
    assert results.digest(one) == results.digest(two) != results.digest(other)


def test_other_settings_are_another_file(tmp_path):
    assert results.save(tmp_path, make(settings={"shots": 0})) != results.save(tmp_path, make(settings={"shots": 5}))


@pytest.mark.parametrize("change", [{"kind": "speed"}, {"surprise": 1}, {"metrics": [{"name": "acc"}]}])
def test_bad_file_names_file_and_field(tmp_path, change):
    path = results.save(tmp_path, make())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"{path.name}: field {next(iter(change))}"):
        results.load(path)


def test_hostile_names_stay_in_the_folder(tmp_path):
    path = results.save(tmp_path, make(subject="../../etc/x y"))
    assert path.parent == tmp_path


def test_empty_store(tmp_path):
    with pytest.raises(UserError, match="no result files"):
        results.load_all(tmp_path)
