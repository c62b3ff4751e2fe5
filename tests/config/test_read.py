from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from parallel3d import config
from parallel3d.config import compose


def test_the_default_configuration_is_typed() -> None:
    read = compose()
    assert read.optim.lr == 1e-3
    assert read.optim.betas == (0.9, 0.95)
    assert read.topology.dp is None
    assert read.model["_target_"] == "models.gpt.build"


def test_yaml_of_a_run_reads_back_equal() -> None:
    read = compose("optim.momentum=0.9", "optim.name=sgd", "data.validation_share=0.1", "name=a")
    assert config.read(OmegaConf.create(config.to_yaml(read))) == read


WRONG = [
    ("zero.stagee=1", r"zero\.stagee is not a key; did you mean zero\.stage\?"),
    ("zero.stages=2", r"zero\.stages is not a key; did you mean zero\.stage\?"),
    ("lr=1", r"lr is not a key; did you mean optim\.lr\?"),
    ("optimm.lr=1", r"optimm is not a key; did you mean optim\?"),
    ("optim.learning_rat=1e-4", r"optim\.learning_rat is not a key of torch\.optim"),
    ("model.widht=64", r"model\.widht is not a key of models.*did you mean model\.width\?"),
    ("data.seq_length=64", r"data\.seq_length is not a key.*did you mean data\.seq_len\?"),
    ("log.wandb.projct=x", r"log\.wandb\.projct is not a key; did you mean log\.wandb\.project\?"),
    ("zero.stage=two", r"zero\.stage = 'two' is not one of 0, 1, 2, 3"),
    ("zero.stage=7", r"zero\.stage = 7 is not one of 0, 1, 2, 3"),
    ("zero.stage=true", r"zero\.stage = true is not one of 0, 1, 2, 3"),
    ("zero=1", r"zero = 1 is not a group of keys: set zero\.stage"),
    ("zero.reduce=never", r"zero\.reduce = 'never' is not one of each, last"),
    ("precision=fp9", r"precision = 'fp9' is not one of fp32, bf16, fp16, fp64"),
    ("train.steps=many", r"train\.steps = 'many' is not a whole number"),
    ("train.steps=1.5", r"train\.steps = 1\.5 is not a whole number"),
    ("optim.lr=fast", r"optim\.lr = 'fast' is not a finite number"),
    ("optim.lr=nan", r"optim\.lr = nan is not a finite number"),
    ("optim.betas=[0.9]", r"optim\.betas = \[0\.9\] is not a list of 2, each a finite number"),
    ("compile=maybe", r"compile = 'maybe' is not true or false"),
    ("topology.pp=0", r"topology\.pp = 0 is below 1"),
    ("topology.tp=half", r"topology\.tp = 'half' is not a whole number or null"),
    ("~zero.stage", r"zero\.stage is missing"),
    ("name=${nothing}", r"name: .*nothing"),
]


@pytest.mark.report("MakazhanAlpamys/Soup#627")
@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_wrong_key_or_value_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(override)


def test_numbers_keep_their_kind_and_pass_where_texts_are_wanted() -> None:
    read = compose("optim.lr=1", "name=2024", "pipeline.partition=[1,3]")
    assert isinstance(read.optim.lr, float)
    assert read.name == "2024"
    assert read.pipeline.partition == [1, 3]
