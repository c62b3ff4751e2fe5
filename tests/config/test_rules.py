from __future__ import annotations

import pytest

from parallel3d import config
from parallel3d.config import compose, settle

WRONG = [
    ("pipeline.num_microbatches=0", r"pipeline\.num_microbatches = 0 is below 1"),
    ("data.seq_len=100000", r"data\.seq_len = 100000 is above model\.max_seq_len = 256: set"),
    ("pipeline.schedule=2f2b", r"pipeline\.schedule = '2f2b' is not one of gpipe, 1f1b"),
    ("pipeline.partition=[3,1]", r"pipeline\.partition = \[3, 1\]: cuts .* ascending"),
    ("optim.name=adamv", r"optim\.name = 'adamv' is not .*did you mean optim\.name=adam"),
    ("optim.momentum=0.9", r"optim\.momentum is not a key of torch\.optim\.adamw\.AdamW"),
    ("optim.betas=[0.9,1.0]", r"optim\.betas = \[0\.9, 1\.0\]: each must be in 0 <= beta < 1"),
    ("optim.min_lr_ratio=2", r"optim\.min_lr_ratio = 2\.0 is above 1"),
    ("optim.lr=-1", r"optim\.lr = -1\.0 is below 0"),
    (
        "fp16.window=5",
        r"fp16\.window = 5 is of precision=fp16, but precision = fp32: leave it 1000",
    ),
    (
        "precision=fp16 fp16.scale=128 fp16.window=5",
        r"fp16\.window = 5 is of a scale that moves, but fp16\.scale = 128.* is a fixed one",
    ),
    ("precision=fp16 fp16.scale=-1", r"fp16\.scale = -1\.0 is not in 0 < fp16\.scale <= 2\^64"),
    ("precision=fp16 fp16.min_scale=1e6", r"initial_scale = 65536\.0 is below fp16\.min_scale = "),
    ("zero.reduce_dtype=fp64", r"zero\.reduce_dtype = 'fp64' is not one of fp32, bf16, fp16"),
    ("model.width=wide", r"model\.width = 'wide' is not a whole number"),
    ("model._target_=models.gpt.bild", r"model\._target_ = 'models\.gpt\.bild' does not exist"),
    ("model._target_=build", r"model\._target_ = 'build' names no callable"),
    ("~model.width", r"model\.width is missing: model\._target_ needs it"),
    ("loss.reductoin=sum", r"loss\.reductoin is not a key.*did you mean loss\.reduction\?"),
    ("name=a/b", r"name = 'a/b' is not the plain name of a folder"),
    ("train.steps=0", r"train\.steps = 0 is below 1: the least is train\.steps=1"),
    ("topology.pp=null", r"topology\.pp and topology\.dp are null: at most one"),
    ("pipeline.num_microbatches=null", r"are both null: set one of them"),
    ("recompute.mode=all", r"recompute\.mode = 'all' is not one of none, full, selective"),
    ("recompute.every=0", r"recompute\.every = 0 is below 1: the least is recompute\.every=1"),
    ("recompute.every=2", r"every = 2, but recompute\.mode = none repeats no unit: set"),
    ("recompute.partition=true", r"partition = true .* that is none: set recompute\.mode=full"),
    ("offload.activations=gpu", r"offload\.activations = 'gpu' is not one of none, cpu, disk"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_broken_rule_names_value_rule_and_way_out(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(*override.split())


NOT_BUILT = {
    "offload.parameters=disk": "offload.parameters=cpu",
    "offload.activations=disk": "offload.activations=cpu",
}


@pytest.mark.report("EleutherAI/gpt-neox#199")
@pytest.mark.parametrize("override", NOT_BUILT)
def test_what_is_not_built_is_refused_with_the_nearest_that_works(override: str) -> None:
    key, value = override.split("=")
    message = f"{key} = {value} is not built yet: the nearest that works is {NOT_BUILT[override]}"
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        compose(override)


@pytest.mark.report("OpenRLHF/OpenRLHF#1291")
@pytest.mark.parametrize(
    ("batch", "micro", "dp", "count"), [(12, 3, 2, 2), (12, 3, 1, 4), (64, 1, 8, 8)]
)
def test_microbatches_are_counted_from_their_size(
    batch: int, micro: int, dp: int, count: int
) -> None:
    read = compose(f"data.global_batch_size={batch}", f"data.microbatch_size={micro}")
    assert settle(read, pp=2, dp=dp, tp=2).pipeline.num_microbatches == count


@pytest.mark.report("deepspeedai/DeepSpeed#17")
@pytest.mark.parametrize(
    ("batch", "micro", "dp", "message"),
    [
        (12, 3, 8, r"data\.global_batch_size = 12 .* 8 \* 3 = 24: set data.global_batch_size=24"),
        (10, 2, 2, r"data\.global_batch_size = 10 .* 2 \* 2 = 4: .*=8 or 12"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(
    batch: int, micro: int, dp: int, message: str
) -> None:
    read = compose(f"data.global_batch_size={batch}", f"data.microbatch_size={micro}")
    with pytest.raises(ValueError, match=message):
        settle(read, pp=1, dp=dp, tp=1)


def test_num_microbatches_times_dp_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match=r"= 7 .* pipeline\.num_microbatches = 4 \* 4 = 16: .*=16"):
        settle(compose("data.global_batch_size=7"), pp=1, dp=4, tp=1)


def test_size_and_number_of_microbatches_must_agree_when_both_are_given() -> None:
    both = ("data.global_batch_size=12", "data.microbatch_size=3")
    agreed = compose(*both, "pipeline.num_microbatches=2")
    assert settle(agreed, pp=1, dp=2, tp=1).pipeline.num_microbatches == 2
    with pytest.raises(ValueError, match=r"num_microbatches = 4, but .* = 12 / \(2 \* 3\) = 2"):
        settle(compose(*both, "pipeline.num_microbatches=4"), pp=1, dp=2, tp=1)


def test_inputs_are_cut_over_more_than_one_rank_of_tp_only() -> None:
    read = compose("recompute.mode=full", "recompute.partition=true")
    assert settle(read, pp=1, dp=2, tp=2).recompute.partition
    with pytest.raises(ValueError, match=r"partition = true cuts over tp, but topology\.tp = 1: "):
        settle(read, pp=1, dp=4, tp=1)


def test_operations_of_compiled_units_cannot_be_chosen_from() -> None:
    with pytest.raises(ValueError, match=r"mode = selective .* set recompute\.mode=full, or comp"):
        compose("recompute.mode=selective", "compile=true")


def test_heads_must_divide_over_tp() -> None:
    read = compose("model.num_heads=3", "model.width=96")
    with pytest.raises(ValueError, match=r"model\.num_heads = 3 .* topology\.tp = 4: .*heads=4"):
        settle(read, pp=1, dp=1, tp=4)


@pytest.mark.report("deepspeedai/DeepSpeed#6914")
def test_the_check_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compose()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert compose() == before


def test_a_layout_may_change_on_resume_and_a_seed_may_not() -> None:
    saved = compose("name=a")
    layout = ("topology.tp=2", "zero.stage=0", "train.steps=9", "log.every=1", "precision=bf16")
    config.check_resume(saved, compose("name=a", *layout))
    for key, value in {"seed": 1, "model.width": 64, "data.seq_len": 64, "optim.lr": 1.0}.items():
        with pytest.raises(ValueError, match=f"{key} = .*, but the run to resume has"):
            config.check_resume(saved, compose("name=a", f"{key}={value}"))


def test_an_optimizer_gets_the_shared_keys_that_it_takes() -> None:
    sgd = compose("optim.name=SGD", "optim.momentum=0.9").optim
    assert config.optimizer_keys(sgd) == {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9}
    adam = compose("optim._target_=torch.optim.Adam").optim
    assert config.optimizer_keys(adam).keys() == {"lr", "betas", "eps", "weight_decay"}


def test_a_misspelt_key_of_an_optimizer_by_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.amsgrid .*did you mean optim\.amsgrad"):
        compose("optim._target_=torch.optim.Adam", "optim.amsgrid=true")


def test_the_keys_that_a_class_takes_are_told_in_order() -> None:
    with pytest.raises(
        ValueError, match=r"it takes (.*); ~optim\.zzz takes the key away"
    ) as caught:
        compose("optim.zzz=1")
    told = str(caught.value).partition("it takes ")[2].partition(";")[0].split(", ")
    assert told == sorted(told) and "amsgrad" in told and "warmup_steps" in told


def test_a_target_is_called_with_its_keys_and_what_it_takes_of_the_offered() -> None:
    group = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": None}
    assert config.call(group, "model", denominator=2, topology=None).denominator == 2
