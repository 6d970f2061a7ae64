import shutil

import pytest
import torch

from zaya.errors import UserError
from zaya.training.checkpoint import manifest
from zaya.training.checkpoint.reader import latest, open_checkpoint
from zaya.training.checkpoint.retention import prune, sweep
from zaya.training.checkpoint.writer import Writer, checkpoint_bytes
from zaya.training.models import zaya_model
from zaya.training.optim.zero1 import Zero1
from zaya.training.parallel.group import Group
from zaya.training.recipe import load_recipe


@pytest.fixture
def run(tiny, tiny_data, tmp_path):
    """A model, its optimizer after one step, and a writer."""
    recipe = load_recipe(tiny)
    model = zaya_model(recipe)
    optimizer = Zero1(model, recipe.train, Group())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(1.0)
    writer = Writer(tmp_path / "run", Group(), 2, tiny_data / "tokenizer", {"arm": "zaya", "seed": 0})
    return model, optimizer, writer


def test_what_is_written_is_what_is_read(run, tiny):
    model, optimizer, writer = run
    path = writer.save(model, optimizer, 7, 448)
    found = open_checkpoint(writer.run)
    assert (found.path, found.step, found.tokens, found.arm) == (path, 7, 448, "zaya")
    assert found.config["model_type"] == "zaya"
    assert (found.tokenizer / "tokenizer.json").is_file()
    assert found.weight_bytes() > 4 * sum(p.numel() for p in model.parameters())
    tensors = dict(found.tensors())
    expected = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied: stored once
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[k], v) for k, v in expected.items())
    other = Zero1(zaya_model(load_recipe(tiny)), load_recipe(tiny).train, Group())
    other.load_state_tensors(dict(found.optimizer()))
    restored, state = other.state_tensors(), optimizer.state_tensors()
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[k], state[k]) for k in state)
    assert torch.equal(found.rng()[0], torch.get_rng_state())
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert size < checkpoint_bytes(model) < 4 * size + 4_000_000


def test_the_same_state_gives_the_same_bytes(run):
    model, optimizer, writer = run
    first = open_checkpoint(writer.save(model, optimizer, 3, 0)).digest()
    shutil.rmtree(writer.run)
    assert open_checkpoint(writer.save(model, optimizer, 3, 0)).digest() == first


def test_the_untrained_and_the_newest_are_kept(run):
    model, optimizer, writer = run
    for step in (0, 4, 8, 12, 10):
        writer.save(model, optimizer, step, 0)
    assert list(manifest.steps(writer.run)) == [0, 10, 12]
    assert prune(writer.run, 1) == [10]
    assert sorted(p.name for p in (writer.run / "checkpoints").iterdir()) == ["step-000000", "step-000012"]


def test_damaged_and_half_written_checkpoints_are_passed_over(run, caplog):
    model, optimizer, writer = run
    for step in (0, 4, 8):
        writer.save(model, optimizer, step, 0)
    damaged = writer.run / "checkpoints" / "step-000008" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert latest(writer.run).step == 8
    assert latest(writer.run, intact=True).step == 4
    assert "falling back from step 8" in caplog.text
    (writer.run / "checkpoints" / "step-000008" / "manifest.json").unlink()
    assert latest(writer.run).step == 4
    with pytest.raises(UserError, match="not whole"):
        open_checkpoint(writer.run / "checkpoints" / "step-000008")
    (writer.run / "checkpoints" / "step-000004" / "config.json").unlink()
    assert latest(writer.run).step == 0


def test_leftovers_are_swept_and_strangers_are_left(run):
    model, optimizer, writer = run
    writer.save(model, optimizer, 4, 0)
    folder = writer.run / "checkpoints"
    (folder / ".step-000008.tmp-abc").mkdir()
    (folder / "notes").mkdir()
    sweep(writer.run)
    assert sorted(p.name for p in folder.iterdir()) == ["notes", "step-000004"]
    assert latest(writer.run).step == 4


def test_a_full_disk_is_refused_and_leaves_nothing(run, monkeypatch):
    model, optimizer, writer = run
    writer.save(model, optimizer, 4, 0)
    monkeypatch.setenv("ZAYA_FREE_BYTES", "1000")
    with pytest.raises(UserError, match="GB are free"):
        writer.save(model, optimizer, 8, 0)
    assert [p.name for p in (writer.run / "checkpoints").iterdir()] == ["step-000004"]


def test_a_write_that_fails_leaves_nothing(run, monkeypatch):
    model, optimizer, writer = run
    monkeypatch.setattr(
        "zaya.training.checkpoint.writer.write_manifest", lambda *a: (_ for _ in ()).throw(OSError(28, ""))
    )
    with pytest.raises(OSError, match="28"):
        writer.save(model, optimizer, 8, 0)
    assert list((writer.run / "checkpoints").iterdir()) == []


def test_no_checkpoint_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no checkpoint here"):
        open_checkpoint(tmp_path)
