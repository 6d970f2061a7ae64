import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from tests.training.conftest import RECIPE, write_recipe
from zaya.errors import UserError
from zaya.training.recipe import Recipe, load_recipe

MINI = Path(__file__).parents[2] / "training" / "recipes" / "mini.yaml"

RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_keep_every_mechanism_on(path):
    recipe = load_recipe(path)
    assert recipe.train.ranks == 2
    assert recipe.model.num_hidden_layers >= 2  # depth averaging starts at the second layer
    assert recipe.model.num_experts >= 4
    assert recipe.train.balance.learning_rate > 0
    assert recipe.baseline is not None


@pytest.mark.parametrize(
    ("override", "needle"),
    [
        ("train.stepz=3", "unknown key train.stepz; did you mean steps?"),
        ("train.muon.learning_rat=1", "did you mean learning_rate?"),
        ("baseline.hidden_siz=1", "did you mean hidden_size?"),
        ("nam=x", "did you mean name?"),
        ("train.steps=many", "train.steps: "),
        ("train.steps=true", "train.steps: "),
        ("train.steps=0", "train.steps: "),
        ("train.batch_sequences=3", "batch_sequences must be a multiple of ranks"),
        ("train.microbatch_sequences=3", "microbatch_sequences must divide"),
        ("train.schedule.warmup_steps=11", "longer than steps"),
        ("model.vocab_size=321", "do not match"),
        ("model.num_key_value_heads=3", "must be a multiple"),
        ("model.layer_types=[hybrid]", "layer_types needs"),
        ("train.sequence_length=65", "longer than model.max_position_embeddings"),
        ("train.precision=fp8", "train.precision: "),
        ("train", "is not key=value"),
        ("train.steps.more=1", "holds a value"),
        ("train.steps=[", "not valid YAML"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_names_it(tiny, override, needle):
    with pytest.raises(UserError) as error:
        load_recipe(tiny, [override])
    assert needle in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_and_bad_files_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match="not valid YAML"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(UserError, match="mapping"):
        load_recipe(tmp_path / "list.yaml")
    with pytest.raises(UserError, match="corpus is missing"):
        load_recipe(write_recipe(tmp_path, corpus=None) and _without(tmp_path, "corpus"))


def _without(folder: Path, key: str) -> Path:
    path = folder / "without.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in RECIPE.items() if k != key}))
    return path


def test_overrides_change_nested_keys_and_corpus_paths_start_at_the_recipe(tiny):
    recipe = load_recipe(tiny, ["train.muon.learning_rate=0.5", "score.limit=null"])
    assert recipe.train.muon.learning_rate == 0.5
    assert recipe.score.limit is None
    assert recipe.corpus.sources == [str(tiny.parent / "text/*.txt")]


def test_every_field_is_documented():
    def walk(section: type[BaseModel]):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no text under it"
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                walk(field.annotation)

    walk(Recipe)


def test_checking_a_recipe_needs_no_torch(tiny):
    code = (
        "import sys\nfrom training.recipe import load_recipe\nimport training.cli\n"
        f"load_recipe({str(tiny)!r})\nprint([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\nseed: 2\n", "the key seed is given twice; remove one of the two, line"),
        ("train: {steps: 5, steps: 6}\n", "the key steps is given twice"),
        ("a: " + "[" * 3000, "not valid YAML"),
    ],
)
def test_yaml_that_says_two_things_is_refused(tmp_path, text, told):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as error:
        load_recipe(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.clip_norm=.inf", "finite"),
        ("train.balance.initial_skip_bias=.nan", "finite"),
        ("verify.atol=.inf", "finite"),
        ("seed=99999999999999999999", "seed"),
        ("model.head_dim=31", "head_dim x partial_rotary_factor"),
        ("model.partial_rotary_factor=0.001", "head_dim x partial_rotary_factor"),
        ("baseline.num_key_value_heads=3", "multiple of num_key_value_heads"),
        ("baseline.head_dim=31", "must be even"),
        ("serve.concurrency=[2, 2]", "use different numbers"),
    ],
)
def test_numbers_that_would_fail_late_fail_at_once(change, told):
    with pytest.raises(UserError, match=told):
        load_recipe(MINI, [change])
