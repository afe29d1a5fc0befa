"""Configurations, key=value overrides, recipes."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.after.augment import ColorJitter
from fastvid.load.clips.crops import CenterCrop, Resize
from fastvid.load.clips.timed_sampling import AtFps
from fastvid.train.__main__ import main as train_main
from fastvid.train.config import config as recipes
from fastvid.train.config import overrides
from fastvid.train.config.config import OptimConfig, flatten, to_json
from fastvid.train.run.assemble import make_loader
from tests import datasets
from tests.train import toy


@pytest.fixture
def config():
    return toy.toy_config(Path("out"))


def test_values_are_parsed_by_the_type_of_the_field(config):
    changed = overrides.apply(
        config,
        [
            "optim.base_lr=1e-2",
            "optim.nesterov=true",
            "optim.milestones=20,40.5",
            "optim.clip_norm=none",
            "run.micro_batch_size=4",
            "data.eval_split=none",
            "data.path=s3://bucket/a=b",
            "data.generation=paper",
            "sync=kavg",
            "sync_options.k=8",
            "model.options.dropout=0.8",
            "model.options.non_local=gaussian",
            "model.options.recompute=true",
        ],
    )
    assert (changed.optim.base_lr, changed.optim.nesterov, changed.optim.clip_norm) == (0.01, True, None)
    assert (changed.optim.milestones, changed.run.micro_batch_size) == ((20.0, 40.5), 4)
    found = (changed.data.eval_split, changed.data.path, changed.data.generation)
    assert found == (None, "s3://bucket/a=b", "paper")
    assert overrides.apply(config, ["data.generation=12"]).data.generation == 12
    assert changed.sync == "kavg"
    assert changed.sync_options == {"k": 8}
    assert changed.model.options == {"dropout": 0.8, "non_local": "gaussian", "recompute": True}
    # No other value has changed, and the original is unchanged.
    before, after = flatten(to_json(config)), flatten(to_json(changed))
    moved = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert len(moved) == 15, moved
    assert config.optim.base_lr == 0.05


def test_values_only_valid_together_can_be_set_together(config):
    changed = overrides.apply(config, ["data.frames.num_segments=16", "data.eval_frames.num_segments=16"])
    assert changed.data.frames.num_frames == changed.data.eval_frames.num_frames == 16


@pytest.mark.parametrize("name", ["frames", "eval_frames", "spatial", "eval_spatial"])
def test_clips_of_different_shapes_are_refused_by_name(config, name):
    value = AtFps(2) if "frames" in name else (Resize(short_side=64),)
    with pytest.raises(UsageError, match=rf"clips of data.{name}=.* differ in") as caught:
        dataclasses.replace(config.data, **{name: value})
    assert caught.value.hint is not None
    assert dataclasses.replace(config.data, frames=AtFps(2, 16, 16), eval_frames=AtFps(2, 16, 16)).num_frames == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.base_rl=1", "optim.base_rl is not a setting"),
        ("optm.base_lr=1", "optm is not a setting"),
        ("base_lr=1", "base_lr is not a setting"),
        ("optim.base_lr=fast", "optim.base_lr is 'fast', expected a number"),
        ("optim.base_lr=nan", "expected a number"),
        ("run.epochs=1.5", "run.epochs is '1.5', expected a whole number"),
        ("run.epochs=0", "run.epochs is 0, expected at least 1"),
        ("run.epochs=none", "expected a whole number"),
        ("run.peak_tflops=-1", "run.peak_tflops is -1.0, expected at least 0"),
        ("run.resume=yes", "expected true or false"),
        ("optim.beta2=1", "optim.beta2 is 1.0, expected 0 <= x < 1"),
        ("optim.nesterov=true optim.momentum=0", "optim.nesterov is set, but optim.momentum is 0"),
        ("optim.decay=linear", "optim.decay is 'linear'"),
        ("optim.milestones=40,20", "expected ascending epochs"),
        ("optim=fast", "optim contains several values"),
        ("run.epochs.more=1", "run.epochs is a single value"),
        ("data.spatial=crop", "data.spatial cannot be set on the command line"),
        ("optim.base_lr", "'optim.base_lr' is not key=value"),
        ("=1", "'=1' is not key=value"),
        ("optim.=1", "'optim.=1' is not key=value"),
        ("run.epochs=1 run.epochs=2", "'run.epochs' is given twice"),
        ("run=1 run.epochs=2", "inside a key"),
        ("data.frames.num_segments=16", "samples 16 frames per clip"),
    ],
)
def test_an_invalid_override_raises_usage_error(config, change, message):
    with toy.refused(message):
        overrides.apply(config, change.split())


def test_values_of_a_recipe_are_among_those_of_their_type(config):
    wrong = {"data.dtype": "int8", "data.last": "pad", "data.workers": "fork", "optim.groups": "tms", "run.amp": "fp8"}
    for key, value in wrong.items():
        section, name = key.split(".")
        with toy.refused(f"{key} is {value!r}", "use one of "):
            dataclasses.replace(getattr(config, section), **{name: value})


@pytest.mark.parametrize(
    ("key", "value", "expected", "hint"),
    [
        ("run.out", Path("out"), "a text", ""),
        ("run.epochs", 1.5, "a whole number", ""),
        ("optim.no_decay", "tokens", "a tuple", "write ('tokens',)"),
        ("optim.clip_norm", "1", "a number or none", ""),
        ("optim.clip_norm", math.nan, "a number or none", ""),
        ("data.spatial", CenterCrop(4), "a tuple", "write (CenterCrop("),
        ("model.options", None, "a mapping", ""),
        ("model.compile", "no", "true or false", ""),
        ("task.label_smoothing", "0.1", "a number", ""),
    ],
)
def test_values_of_a_recipe_have_the_types_of_their_fields(config, key, value, expected, hint):
    section, name = key.split(".")
    with toy.refused(f", expected {expected}", hint):
        dataclasses.replace(getattr(config, section), **{name: value})


def test_an_unknown_key_lists_the_known_ones(config):
    for field in dataclasses.fields(OptimConfig):
        with toy.refused("is not a setting", f"optim.{field.name}"):
            overrides.apply(config, ["optim.base_rl=1"])
    for change, hint in (
        ("optim.base_rl=1", "did you mean optim.base_lr? known are optim.base_lr, "),
        ("lr=1", "did you mean optim.base_lr? `fastvid train RECIPE --show` lists all"),
        ("data.frames.stride=2", "data.frames.num_segments"),
    ):
        with toy.refused("is not a setting", hint):
            overrides.apply(config, [change])


def test_every_listed_key_can_be_set_or_raises_usage_error(config):
    refused = set()
    for key in overrides.keys(config):
        value = flatten(to_json(config)).get(key)
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        text = text.lower() if value is None or isinstance(value, bool) else text
        try:
            assert overrides.apply(config, [f"{key}={text}"]) == config
        except UsageError as error:
            assert "cannot be set on the command line" in str(error)  # noqa: PT017
            refused.add(key)
    assert refused == {"data.spatial", "data.eval_spatial"}


def test_the_configuration_is_json_and_its_transforms_reach_the_training_loader_alone(config, tmp_path):
    def shade(clip):
        return clip / 2

    pictures = datasets.make_clip(tmp_path / "clip.mp4", frames=8, size="48x48")
    columns = {"split": ["train"] * 4 + ["val"] * 4}
    datasets.pack(tmp_path / "shards", [[(f"clip{n}", pictures, 0) for n in range(8)]], columns=columns)
    after = (ColorJitter(hue=0.1), shade)
    data = dataclasses.replace(config.data, after=after, global_batch_size=4, eval_batch_size=4)
    config = dataclasses.replace(config, data=data)
    record = json.loads(json.dumps(to_json(config)))
    assert record["data"]["frames"] == {"type": "Segments", "num_segments": 2, "jitter": True, "length": 1}
    assert (record["data"]["spatial"][0]["type"], record["run"]["epochs"]) == ("CenterCrop", toy.EPOCHS)
    jitter, text = record["data"]["after"]
    assert (jitter["type"], jitter["hue"]) == ("ColorJitter", [-0.1, 0.1])
    assert text.endswith("shade>")
    with toy.refused("data.after cannot be set on the command line"):
        overrides.apply(config, ["data.after=shade"])
    whole, member = Dataset(str(tmp_path / "shards")), toy.ALONE
    train = make_loader(config, whole, member, train=True).state_dict()["fingerprint"]
    assert "ColorJitter" in train["after"]
    assert "shade" in train["after"]
    assert "after" not in make_loader(config, whole, member).state_dict()["fingerprint"]


def test_a_file_without_a_recipe_is_refused_and_a_missing_package_is_not_hidden(tmp_path):
    path = tmp_path / "no.py"
    for text, message in (("x = 1", "has no function recipe"), ("def recipe(): return 1", "returned int")):
        path.write_text(text)
        with toy.refused(message):
            recipes.load(str(path))
    path.write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        recipes.load(str(path))
    with toy.refused("unknown recipe 'kinetics'", "motion_tsm"):
        recipes.load("kinetics")
    with toy.refused("does not exist"):
        recipes.load("no/such.py")


@pytest.mark.parametrize("sweep", ["", "def sweep(): return [recipe(), recipe()]"])
def test_a_recipe_is_executed_once(sweep, tmp_path):
    path, seen = tmp_path / "own.py", tmp_path / "seen"
    seen.mkdir()
    head = f"import tempfile\nfrom pipelines.motion_tsm import recipe\ntempfile.mkdtemp(dir={str(seen)!r})\n"
    path.write_text(head + sweep)
    configs = recipes.load_all(str(path), ["run.seed=7"])
    assert [config.run.seed for config in configs] == [7] * (2 if sweep else 1)
    assert len(list(seen.iterdir())) == 1


def test_overrides_are_accepted_anywhere_on_the_command_line(tmp_path, capsys):
    for place in ("motion_tsm {} {} --show", "motion_tsm {} --show {}", "--show motion_tsm {} --world 2 {}"):
        assert main(["train", *place.format("run.seed=7", "optim.base_lr=0.5").split()]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["run"]["seed"], shown["optim"]["base_lr"]) == (7, 0.5)
    words = ["motion_tsm", "run.seed=7", "--dry-run", f"data.path={tmp_path / 'nowhere'}", "optim.base_lr=0.5"]
    assert train_main(words) == 1
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
    # An argument after two dashes is not an option.
    assert main(["train", "--show", "--", "motion_tsm", "--run.seed=7"]) == 2
    assert "--run is not a setting" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Own:
    """Mappings as a user's task may declare them."""

    plain: dict = dataclasses.field(default_factory=dict)
    optional: dict[str, int] | None = dataclasses.field(default_factory=dict)


def test_entries_of_mappings_without_a_type_are_set():
    changed = overrides.apply(Own(), ["plain.a=1", "plain.b=text", "optional.c=2"])
    assert changed == Own({"a": 1, "b": "text"}, {"c": 2})
