"""One protocol for every mixer by construction: runs of a setting in a host differ in the declared factors only."""

import itertools
import json
import re
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from chasm.common import extensions
from chasm.common.extensions import load_extensions
from chasm.mixers import MIXERS
from chasm.studies import STUDIES, Grid, collect, list_studies, load_plan, make_plan, register_study
from chasm.studies.agreement import FACTORS
from chasm.studies.factors import ARMS, DATASETS, HOSTS, MULTIPLIERS, SETTINGS, get_arm
from chasm.studies.plan import PROTOCOLS, missing_paths, part_of, save_plan
from chasm.studies.records import ArmInfo
from chasm.studies.transfer import sizes_of
from chasm.studies.tuning import assume_choices
from chasm.surgery.param_groups import param_groups
from chasm.train.run import build_model


def flat(value, prefix=""):
    """a.b -> value; the mixer as one value, for it is one factor."""
    if isinstance(value, dict) and prefix != "mixer":
        return {k: v for key, item in value.items() for k, v in flat(item, f"{prefix}.{key}".strip(".")).items()}
    return {prefix: value}


@pytest.mark.parametrize("scale", ["tiny", "proxy", "full"])
@pytest.mark.parametrize("name", STUDIES)
def test_runs_differ_in_declared_factors_only(name, scale):
    places = defaultdict(list)
    plan = assume_choices(make_plan(name, scale, "tuned", seeds=(0, 1)))
    for cell in plan.runs:
        places[cell.setting, cell.host].append(flat(cell.config.model_dump(mode="json")))
    for configs in places.values():
        first = configs[0]
        for other in configs[1:]:
            assert first.keys() == other.keys()
            assert {k for k in first if first[k] != other[k]} <= set(FACTORS)


def test_same_host_weights_and_same_batches():
    """With the arms of Table 1: equal weights outside the slots, equal rows, equal inputs and targets."""
    from chasm.train.schedule import rows_of_step

    seen = {}
    image = torch.rand(2, 1, 32, 32)
    for cell in make_plan("cc359", "tiny").runs:
        task = cell.config.task.create()
        model = build_model(cell.config, task, (1, 32, 32))
        host = {k: v for k, v in model.state_dict().items() if not k.startswith("slots.") and ".attention." not in k}
        batch = task.prepare(image)
        rows = [rows_of_step(s, 16, cell.config.train.batch, cell.config.seed) for s in range(6)]
        first = seen.setdefault((cell.setting, cell.host), (host, batch, rows))
        assert host.keys() == first[0].keys()
        for k in host:
            assert torch.equal(host[k], first[0][k]), f"{cell.key}: {k}"
        assert torch.equal(batch.input, first[1].input)
        assert torch.equal(batch.target, first[1].target)
        assert torch.equal(batch.mask, first[1].mask)
        assert rows == first[2]
    assert len(seen) == 6


@pytest.mark.parametrize("arm", ARMS)
def test_only_arms_with_spectral_parameters_are_tuned(arm):
    study = next(s for s in STUDIES.values() for g in s.grids if arm in g.arms and s.kind == "train")
    plan = make_plan(study.name, "tiny", "tuned")
    config = next(run.config for run in assume_choices(plan).runs if run.arm == arm)
    groups = param_groups(build_model(config, config.task.create(), (1, 32, 32)), lr=1.0)
    spectral = "spectral" in {g["name"] for g in groups}
    assert spectral == ARMS[arm].spectral
    tried = [run.multiplier for run in plan.selection_runs if run.arm == arm]
    assert set(tried) == (set(MULTIPLIERS) if spectral else set())
    assert {run.multiplier for run in plan.runs if run.arm == arm} == (set() if spectral else {1})


def test_the_papers_protocol_at_full_scale():
    for cell in make_plan("cc359", "full", paths={"cc359": "x"}).runs:
        train = cell.config.train
        assert (train.lr, train.batch, train.epochs, train.spectral_multiplier) == (5e-4, 8, 100, 1.0)


def test_grids_have_the_size_of_their_tables():
    count = {name: len(make_plan(name, "full").runs) for name in STUDIES}
    assert count == {
        "cc359": 54, "fastmri": 18, "ade20k": 9, "imagenet": 9, "brats": 18, "random-mask": 128, "basis": 5, "axes": 5,
        "seeds": 24, "seeds-basis": 6, "flops": 27, "parameters": 9, "wrapper": 9, "budget": 24, "evidence": 26,
        "hifi": 14, "hifi-random": 56, "bins": 3, "readings": 7, "sampling": 72, "noise": 27, "hosts": 28, "health": 27,
        "resolution": 18, "volume": 10,
    }  # fmt: skip
    tuned = make_plan("cc359", "full", "tuned")
    assert (len(tuned.points), len(tuned.runs), len(tuned.selection_runs)) == (54, 6, 6 * 8 * 4)


def test_other_data_or_another_host_takes_the_label_and_not_the_papers_numbers(tmp_path):
    plain = make_plan("cc359", overrides=["train.steps=8", "data.path=here"])
    assert plain.quotes == plain.study.quotes
    assert plain.setting_title("cc359-x8") == "CC359 ×8"
    plan = make_plan("cc359", overrides=["data.name=phantom", "backbone.name=mine", "backbone.options.width=8"])
    assert plan.quotes == {}
    assert plan.setting_title("cc359-x8") == "phantom ×8"
    assert plan.host_label("vit") == "mine, width 8"
    results = collect(make_plan("basis", overrides=["backbone.name=unet", "backbone.options={}"]), tmp_path)
    assert results.hosts == {"hifi-mamba": "unet"}
    assert results.paper == {}


def test_options_of_mixers_are_set_where_a_mixer_has_them(tmp_path):
    plan = make_plan("hifi", overrides=["mixer.options.bins=12", "train.steps=2"])
    options = {run.arm: run.config.mixer.options for run in plan.runs}
    assert options["chasm"] == {"bins": 12, "step_scale": 30.0}
    assert options["chasm-untied"]["bins"] == 12
    assert "bins" not in options["gfnet"]
    assert collect(plan, tmp_path).arms["chasm"].label == "CHASM (bins=12)"
    assert make_plan("basis", overrides=["mixer.options.bins=12"]).quotes == {}
    bins = make_plan("bins", overrides=["mixer.options.bins=12"])  # arms that are about bins keep theirs
    assert [run.config.mixer.options["bins"] for run in bins.runs] == [16, 12, 256]
    with pytest.raises(ValueError, match=r"mixer\.options\.bin: no mixer of the study has this option"):
        make_plan("basis", overrides=["mixer.options.bin=12"])
    with pytest.raises(ValueError, match=r"the runs of a study differ in mixer\.options\.step_scale"):
        make_plan("basis", overrides=["mixer.options.step_scale=1"])


@pytest.mark.parametrize(
    ("setting", "overrides", "title"),
    [
        ("cc359-x8", ["data.options.part=tumour_lgg_flair", "data.options.crop=128"], "tumour lgg flair ×8, 128 x 128"),
        ("cc359-x8-128", ["data.options.crop=64"], "CC359 ×8, 64 x 64"),
        ("cc359-x8-random-2", ["task.options.sampling.kind=gaussian"], "CC359 ×8, gaussian mask"),
        ("cc359-x8-random-2", ["task.options.sampling.acceleration=6"], "CC359 ×6, random mask 2"),
        ("fastmri-x4", ["task.options.snr_db=20.0"], "fastMRI knee ×4, SNR 20 dB"),
        ("fastmri-x4", ["task.options.masks=epoch"], "fastMRI knee ×4, masks drawn per epoch"),
        ("cc359-volume-x4-poisson-2d", ["data.depth=6"], "CC359 volumes ×4, poisson-2d mask, 6 slices a volume"),
        ("brats-x4", ["data.options.part=[a, b]", "data.options.phase=true"], "a b ×4, phase on"),
    ],
)  # fmt: skip
def test_labels_say_what_ran_in_words(setting, overrides, title):
    plan = replace(make_plan("cc359"), overrides=tuple(overrides))
    assert plan.setting_title(setting) == title


def test_a_run_shared_by_two_studies_is_one_run():
    main, basis = make_plan("cc359", "full"), make_plan("basis", "full")
    shared = [c for c in main.runs if c.key in {b.key for b in basis.runs}]
    assert [c.key for c in shared] == ["cc359-x8.hifi-mamba.chasm.m30.s0"]
    assert shared[0].config == next(c.config for c in basis.runs if c.key == shared[0].key)


def test_same_key_same_config_over_all_studies():
    seen = {}
    for name, protocol in itertools.product(STUDIES, PROTOCOLS):
        plan = assume_choices(make_plan(name, "proxy", protocol))
        for cell in (*plan.runs, *plan.selection_runs):
            assert seen.setdefault(cell.key, cell.config) == cell.config


def test_overrides_apply_to_all_but_not_to_factors():
    plan = make_plan("basis", overrides=["train.steps=2", "data.options.cases=8"])
    assert {(c.config.train.steps, c.config.data.options["cases"]) for c in plan.runs} == {(2, 8)}
    for factor in ("mixer.name=ffc", "mixer=ffc", "seed=3", "train.spectral_multiplier=10", "train={}", "name=x"):
        with pytest.raises(ValueError, match="differ in"):
            make_plan("basis", overrides=[factor])


def test_any_registered_mixer_can_stand_beside_the_others(tmp_path, monkeypatch):
    class Mine(MIXERS.get("gfnet")):
        spectral_parameters = ("weight",)

    monkeypatch.setitem(MIXERS._classes, "mine", Mine)
    plan = make_plan("basis", protocol="tuned", arms=("mine", "wrapper", "chasm"))
    count = Counter(c.arm for c in (*plan.runs, *plan.selection_runs))
    assert (count["mine"], count["wrapper"], count["chasm"]) == (4, 1, 4)  # chasm was there, and is once
    mine = next(c for c in plan.selection_runs if c.arm == "mine")
    assert (mine.key, mine.config.mixer.name) == ("cc359-x8.hifi-mamba.mine.m1.s0.select", "mine")
    save_plan(plan, tmp_path)
    assert load_plan(tmp_path, "basis", protocol="tuned") == plan
    assert collect(plan, tmp_path).arms["mine"] == ArmInfo("mine", "mine", {})
    with pytest.raises(ValueError, match="unknown arm or mixer 'chazm': did you mean 'chasm'"):
        make_plan("basis", arms=("chazm",))


def test_unknown_words_suggest_the_near_one():
    for words in (("bassis", "tiny"), ("basis", "tinny"), ("basis", "tiny", "matchd")):
        with pytest.raises(ValueError, match="did you mean"):
            make_plan(*words)


def test_paths_that_are_still_needed():
    assert missing_paths(make_plan("random-mask", "full")) == ["cc359", "fastmri"]
    assert missing_paths(make_plan("random-mask", "full", paths={"cc359": "a"})) == ["fastmri"]
    assert missing_paths(make_plan("random-mask", "proxy")) == ["proxy"]
    assert missing_paths(make_plan("random-mask", "tiny")) == missing_paths(make_plan("flops", "full")) == []


def test_a_plan_is_remembered(tmp_path):
    plan = make_plan(
        "basis", "proxy", "tuned", seeds=(3,), paths={"proxy": "p"}, overrides=["train.steps=9"], selection_steps=5
    )
    save_plan(plan, tmp_path)
    assert load_plan(tmp_path, "basis", "proxy", "tuned") == plan
    with pytest.raises(FileNotFoundError, match="chasm study run basis"):
        load_plan(tmp_path, "basis", "tiny")


def test_rivals_come_near_the_parameters_of_chasm():
    """AFNO and SpectFormer can; the others cannot go below their smallest form."""
    from chasm.surgery.count import count_parameters

    sizes = {}
    for cell in make_plan("budget", "tiny").runs:
        model = build_model(cell.config, cell.config.task.create(), (1, 32, 32))
        sizes[cell.host, cell.arm] = count_parameters(model.slots)[1]
    for host in ("hifi-mamba", "unet", "vit"):
        for arm in ("afno-budget", "spectformer-budget"):
            assert 0.7 < sizes[host, arm] / sizes[host, "chasm"] < 1.3, (host, arm, sizes)


@pytest.mark.parametrize("study", ["seeds", "evidence", "parameters"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_points_are_what_cells_are_made_of(study, protocol):
    plan = assume_choices(make_plan(study, protocol=protocol, arms=["wrapper"]))
    assert [(c.setting, c.host, c.arm, c.multiplier, c.seed) for c in plan.runs] == plan.points


def test_protocols_differ_in_the_step_of_spectral_parameters_only():
    """The scale is the mixer's where it has one, and the optimiser's elsewhere; shared points are one run."""

    def steps(protocol, arm):
        plan = make_plan("hifi", "proxy", protocol)
        cells = [c for c in (*plan.selection_runs, *plan.runs) if c.arm == arm]
        return [(c.config.mixer.options.get("step_scale"), c.config.train.spectral_multiplier) for c in cells]

    assert (steps("matched", "chasm"), steps("default", "chasm")) == ([(1, 1)], [(30, 1)])
    assert steps("tuned", "chasm") == [(m, 1) for m in MULTIPLIERS]
    assert (steps("matched", "gfnet"), steps("default", "gfnet")) == ([(None, 1)], [(None, 1)])
    assert steps("tuned", "gfnet") == [(None, m) for m in MULTIPLIERS]
    for protocol in PROTOCOLS:
        assert steps(protocol, "baseline") == steps(protocol, "wrapper") == [(None, 1)]


def test_draws_of_the_random_mask_are_different_masks():
    plan = make_plan("hifi-random", "proxy")
    masks = {c.setting: c.config.task.create().sampling.mask(256).columns for c in plan.runs}
    assert len(set(masks.values())) == len(masks) == 4
    assert {len(columns) for columns in masks.values()} == {32}


def test_a_part_of_a_study_is_saved_as_the_whole(tmp_path):
    whole = make_plan("cc359", "tiny")
    part = part_of(whole, ["host=unet,arm=chasm,gfnet", "setting=cc359-x8"])
    assert [c.key for c in part.runs] == ["cc359-x8.unet.gfnet.m1.s0", "cc359-x8.unet.chasm.m30.s0"]
    save_plan(part, tmp_path)
    assert load_plan(tmp_path, "cc359").runs == whole.runs
    assert part_of(whole, []).runs == whole.runs


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["arm=chasmm"], "arm=chasmm: no run of the study has it: did you mean 'chasm'"),
        (["mixer=chasm"], "unknown factor 'mixer'"),
        (["chasm"], "write it as factor=value"),
    ],
)
def test_a_wrong_part_is_named(only, message):
    with pytest.raises(ValueError, match=message):
        part_of(make_plan("cc359"), only)


def test_an_arm_takes_options():
    plan = make_plan("bins", arms=["chasm( bins = 5 )", "fno-d(modes=[3, 5])"])
    options = {run.arm: run.config.mixer.options for run in plan.runs}
    assert options["chasm(bins=5)"] == {"bins": 5, "step_scale": 30.0}
    assert options["fno-d(modes=[3,5])"] == {"modes": [3, 5]}
    only = part_of(plan, ["arm=fno-d(modes=[3,5]),chasm"])
    assert [run.arm for run in only.runs] == ["chasm", "fno-d(modes=[3,5])"]
    assert get_arm("chasm(bins=5)").label == "CHASM (bins=5)"
    for text, message in (
        ("chasm(bin=5)", "no option 'bin': did you mean 'bins'"),
        ("chasm(bins=5", "write options in brackets"),
        ("chasm(bins)", "write bins as option=value"),
        ("chsm(bins=5)", "did you mean 'chasm'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_plan("bins", arms=[text])


@pytest.fixture
def own_names(no_loaded_files):
    """Studies, settings, hosts, arms and datasets as they were, afterwards."""
    known = (STUDIES, SETTINGS, HOSTS, ARMS, DATASETS)
    before = [dict(names) for names in known]
    yield
    for names, stored in zip(known, before, strict=True):
        names.clear()
        names.update(stored)


def test_a_study_of_ones_own_with_its_host_setting_and_arm(own_names, tmp_path):
    file = tmp_path / "study_of_mine.py"
    file.write_text(
        "from chasm.studies import Arm, Grid, Host, Setting, Study, register_study\n"
        "from chasm.train.config import Part\n"
        "grid = Grid(('knee-x2',), ('small',), ('baseline', 'wide', 'chasm(bins=3)'))\n"
        "register_study(Study('mine', 'Mine', 'not in the paper', 'Which?', (grid,), {}),\n"
        "    settings=[Setting('knee-x2', 'Knee x2', 'fastmri', 'reconstruction', ('psnr', 'ssim'), 2)],\n"
        "    hosts={'small': Host('Small', 'unet', {'width': 8}, {'width': 8, 'depth': 2, 'levels': [1]})},\n"
        "    arms={'wide': Arm('Wide', Part(name='chasm', options={'bins': 99}))})\n"
    )
    load_extensions([file])
    plan = make_plan("mine")
    assert [run.key for run in plan.runs] == [
        "knee-x2.small.baseline.m1.s0", "knee-x2.small.wide.m30.s0", "knee-x2.small.chasm(bins=3).m30.s0",
    ]  # fmt: skip
    assert plan.runs[1].config.mixer.options["bins"] == 99
    assert collect(plan, tmp_path).hosts == {"small": "Small"}
    with pytest.raises(ValueError, match="a host named 'vit' is already there"):
        register_study(STUDIES["mine"], hosts={"vit": HOSTS["small"]})
    with pytest.raises(ValueError, match="unknown setting 'cc359-x9': did you mean"):
        register_study(replace(STUDIES["mine"], name="other", grids=(Grid(("cc359-x9",), ("vit",), ("chasm",)),)))


def test_a_study_of_an_installed_package_is_listed_and_planned(own_names, tmp_path, monkeypatch):
    info = tmp_path / "study_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: study-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chasm.studies]\npacked = study_pack\n")
    (tmp_path / "study_pack.py").write_text(
        "from chasm.studies import Grid, Study, register_study\n"
        "grid = Grid(('cc359-x8',), ('vit',), ('chasm(bins=3)',))\n"
        "register_study(Study('packed', 'Packed', 'not in the paper', 'Which?', (grid,), {}))\n"
    )
    monkeypatch.setattr(extensions, "_plugins", {})
    monkeypatch.syspath_prepend(tmp_path)
    assert "packed" in [study.name for study in list_studies()]
    assert [run.key for run in make_plan("packed").runs] == ["cc359-x8.vit.chasm(bins=3).m30.s0"]


def test_the_resolution_study_trains_small_and_declares_where_it_is_tested():
    tiny, full = make_plan("resolution"), make_plan("resolution", "full", paths={"cc359": "x", "fastmri": "y"})
    assert sizes_of(tiny) == [64, 80]  # two and two and a half times 32, as 256 and 320 of 128
    assert sizes_of(full) == [256, 320]
    assert {run.config.data.options["crop"] for run in full.runs} == {128}
    assert {run.config.data.options["size"] for run in tiny.runs} == {32}
    assert tiny.setting_title("cc359-x8-128") == "CC359 ×8, 32 x 32"
    assert full.setting_title("cc359-x8-128") == "CC359 ×8, 128 x 128"


@pytest.mark.parametrize("seeds", [{"a": 1}, "01", [0.5], [True], 3])
def test_seeds_of_another_shape_in_a_saved_plan_are_one_line(seeds, tmp_path):
    save_plan(make_plan("basis"), tmp_path)
    (saved,) = tmp_path.rglob("basis.default.json")
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "seeds": seeds}))
    with pytest.raises(ValueError, match=r"basis\.default\.json: not a plan that chasm wrote"):
        load_plan(tmp_path, "basis")
