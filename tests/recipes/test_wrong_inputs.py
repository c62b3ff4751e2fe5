from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from parallel3d.topology import Topology
from tests.data.corpus import write
from tests.start import ROOT, torchrun
from tests.world import run_on

# What is typed, and what the message must hold: value, rule, way out.
WRONG = {
    "topology.tp=3": r"topology\..* 3.*2 processes.*change topology",
    "topology.pp=8": r"topology\..* 8.*2 processes.*change topology",
    "topology.pp=0": r"topology\.pp = 0 is below 1: the least is topology\.pp=1",
    "topology.tp=two": r"topology\.tp = 'two' is not a whole number or null",
    "topology.pp=null": r"at most one degree is inferred .* set topology\.dp=1",
    "topology.dp=4": r"topology\..* 4.*2 processes.*change topology",
    "topology.tp=2 model.num_heads=3 model.width=96": r"num_heads = 3 .*set model\.num_heads=4",
    "zero.stage=7": r"zero\.stage = 7 is not one of 0, 1, 2, 3",
    "zero.stagee=1": r"zero\.stagee is not a key; did you mean zero\.stage\?",
    "zero.shard_size=3": r"shard_size = 3 does not divide topology\.dp = 2: set .*=2, or null",
    "zero.shard_size=1 zero.stage=0": r"shard_size = 1 says .* set zero\.stage=1 or more, or",
    "pipeline.num_microbatches=0": r"num_microbatches = 0 is below 1: .*num_microbatches=1",
    "pipeline.num_microbatches=3": r"global_batch_size = 32 .* 2 \* 3 = 6: set .*=30 or 36",
    "pipeline.schedule=2f2b": r"pipeline\.schedule = '2f2b' is not one of gpipe, 1f1b",
    "pipeline.schedule=mine.txt": r"schedule = 'mine\.txt': there is no such file",
    "pipeline.partition=[2,1]": r"partition = \[2, 1\]: cuts are .* for example \[2,4\]",
    "topology.pp=2 pipeline.partition=[9]": r"partition.*9",
    "topology.pp=2 pipeline.partition=[0]": r"partition = \[0\]: cuts are",
    "data.global_batch_size=7 topology.dp=2": r"global_batch_size = 7 .* set .*=8",
    "data.microbatch_size=3 topology.dp=2": r"data\.global_batch_size = 32 .*=30 or 36",
    "data.seq_len=100000": r"seq_len = 100000 is above model\.max_seq_len = 256: set",
    "data.path=nowhere": r"nowhere",
    "data._target_=parallel3d.data.Tokens": r"'parallel3d\.data\.Tokens' does not exist: it must",
    "precision=fp9": r"precision = 'fp9' is not one of fp32, bf16, fp16, fp64",
    "fp16.window=0": r"fp16\.window = 0 is below 1: the least is fp16\.window=1",
    "fp16.scale=128": r"fp16\.scale = 128\.0 is of precision=fp16, but precision = fp32: .* null",
    "recompute.mode=some": r"recompute\.mode = 'some' is not one of none, full, selective",
    "offload.optimizer=disk": r"offload\.optimizer = disk, but offload\.path is null: set it to",
    "offload.path=/tmp": r"offload\.path = /tmp, but nothing goes to disk: set offload\.optimizer",
    "offload.parameters=cpu": r"offload\.parameters = cpu, but zero\.stage = 1 keeps .*stage=3",
    "zero.stage=3 offload.parameters=disk": r"parameters = disk is not built yet: .*ers=cpu",
    "optim.state_dtype=fp8": r"optim\.state_dtype = 'fp8' is not one of bf16",
    "optim.state_dtype=bf16 optim.betas=[0.9,0.999]": r"betas = \(0\.9, 0\.999\) and optim\.st",
    "deepspeed=ds.json": r"deepspeed = 'ds\.json' cannot be read .*path of a JSON",
    "model=gpt_tinny": r"model = 'gpt_tinny' is not one of .*did you mean model=gpt_tiny\?",
    "model.widht=64": r"model\.widht is not a key .*did you mean model\.width\?",
    "model.vocab_size=10": r"vocab_size.*10",
    "optim.name=adamv": r"optim\.name = 'adamv' is not .* did you mean optim\.name=adamw?\?",
    "optim.lr=nan": r"optim\.lr = nan is not a finite number",
    "optim.momentum=0.9": r"optim\.momentum is not a key of torch\.optim\.adamw\.AdamW",
    "optim.lr_schedule=square": r"lr_schedule = 'square' is not one of constant, linear, cosine",
    "train.steps=0": r"train\.steps = 0 is below 1: the least is train\.steps=1",
    "checkpoint.resume=/none": r"checkpoint\.resume = '/none' does not exist: it is never, auto",
    "log.wandb.mode=online": r"log\.wandb\.mode = online, but no login .*wandb login",
    "name=a/b": r"name = 'a/b' is not the plain name of a folder",
    "lr=1": r"lr is not a key; did you mean optim\.lr\?",
}


def messages(topology: Topology, inputs: list[str], root: Path, corpus: Path) -> list[str]:
    """What the recipe raises for each input, on this rank."""
    from parallel3d.job import start
    from recipes.pretrain import main

    fixed = [f"run_root={root}", "name=bad", f"data.path={corpus}", "train.steps=2"]
    found = []
    for line in inputs:
        sys.argv = ["recipes/pretrain.py", *fixed, *line.split()]
        try:
            start(main, ROOT / "conf", "pretrain")
            found.append("accepted")
        except (SystemExit, RuntimeError) as error:
            found.append(str(error))
    return found


def test_each_wrong_input_is_refused_on_every_rank_and_leaves_no_folder(
    tmp_path: Path,
) -> None:
    corpus = write(tmp_path / "corpus", [range(256)] * 40, 256)
    env = dict.fromkeys(("WANDB_API_KEY", "WANDB_MODE"), "") | {"NETRC": os.devnull}
    ranks = run_on(
        2, messages, inputs=list(WRONG), root=tmp_path / "runs", corpus=corpus, env=env, timeout=90
    )
    faults = []
    for line, told in zip(WRONG, zip(*ranks, strict=True), strict=True):
        faults += [f"{line}: {message}" for message in told if not re.search(WRONG[line], message)]
    assert not faults, "\n".join(faults)
    assert not (tmp_path / "runs" / "bad").exists()


@pytest.mark.report("Lightning-AI/pytorch-lightning#20391")
def test_the_launcher_says_why_all_ranks_ended(tmp_path: Path) -> None:
    arguments = ["recipes/pretrain.py", f"run_root={tmp_path}", "name=bad", "topology.tp=3"]
    ended = torchrun(arguments, 4, timeout=30)
    assert ended.code == 1
    assert "4 processes were started" in "\n".join(ended.output.splitlines()[-6:])
    assert list(tmp_path.iterdir()) == []
