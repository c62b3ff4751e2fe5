from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallel3d.verify import presets
from parallel3d.verify.command import main, read
from parallel3d.verify.suites import SCHEDULES, Choices, full, num_stages, quick

WRONG = {
    "layout=1x1x2": "layout is not an argument; did you mean layouts?",
    "colour=red": "colour is not an argument; there are layouts, zero, schedule",
    "steps": "steps has no value: write steps=VALUE",
    "num_chunks=0": "num_chunks=0: a number of chunks is a whole number from 1 up",
    "steps=0": "steps=0: a number of steps is a whole number from 1 up",
    "steps=many": "steps=many: a number of steps is a whole number",
    "layouts=2x2": "layout '2x2' must be pp x dp x tp",
    "layouts=1x1x0": "topology.tp = 0 must be a whole number from 1 up",
    "zero=4": "zero=4 is not one of 0, 1, 2, 3",
    "reduce=never": "reduce=never is not one of each, last",
    "zero=0,,1": "zero=0,,1 has an empty place",
    "schedule=1f1": "schedule=1f1 is not one of gpipe, 1f1b, interleaved, ",
    "recompute=all": "recompute=all is not one of none, full, selective",
    "tolerance=-1": "tolerance=-1: a tolerance is a number, 0 or more",
    "tolerance=nan": "tolerance=nan: a tolerance is a number, 0 or more",
    "suite=fast": "suite=fast is not one of quick, full",
    "part=5/4": "part=5/4: a part is K/N with K from 1 to N",
    "part=0/4": "part=0/4: a part is K/N",
    "model=gpt_tinny": "did you mean gpt_tiny? A model of your own is model=MODULE:NAME",
    "model=nowhere:at_all": "model=nowhere:at_all cannot be imported (No module named 'nowhere')",
    "model=math:pi": "model=math:pi is a float, not a parallel3d.verify.Subject",
}


@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_argument_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    said = capsys.readouterr()
    assert WRONG[argument] in said.err and said.out == ""


def test_an_argument_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps=1", "steps=2"]) == 2
    assert "steps is given twice, as 1 and 2" in capsys.readouterr().err


def test_a_layout_that_the_model_cannot_have_is_a_wrong_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["model=tests.verify.subjects:GPT", "layouts=1x1x3"]) == 2
    assert "num_heads" in capsys.readouterr().err


def test_the_default_is_suite_quick() -> None:
    assert read([]).work == read(["suite=quick"]).work == quick(Choices())


def test_suite_full_is_every_combination_and_a_choice_narrows_it() -> None:
    assert read(["suite=full"]).work == full(Choices())
    (cases,) = read(["suite=full", "zero=0", "model=gpt_deep", "layouts=4x2x1"]).work.values()
    assert len(cases) == 3 * len(SCHEDULES)


def test_parts_of_a_suite_are_all_of_it() -> None:
    parts = [read(["suite=full", f"part={at}/3"]).work for at in (1, 2, 3)]
    for name, cases in full(Choices()).items():
        assert set().union(*(part[name] for part in parts)) == set(cases)


def test_what_a_model_has_too_few_units_for_is_left_out_of_a_suite_and_told() -> None:
    request = read(["suite=full", "model=gpt_tiny", "layouts=2x1x1,4x1x1", "zero=1"])
    (cases,) = request.work.values()
    every = full(Choices(model=["gpt_tiny"], layouts=["2x1x1", "4x1x1"], zero=[1]))["gpt_tiny"]
    too_deep = [case for case in every if num_stages(case) > 6]
    assert cases == [case for case in every if case not in too_deep] and too_deep
    told = f"but {len(too_deep)} of more stages than gpt_tiny has units, 6"
    assert told in request.covers.splitlines()


def test_a_batch_has_a_sample_for_every_microbatch_of_the_widest_dp_and_one_more() -> None:
    request = read(["layouts=1x1x1,2x5x1"])
    m = request.setting.num_microbatches
    for subject in request.subjects.values():
        x, target = subject.batch(0)
        assert len(x) == len(target) == 5 * m + 1
        assert len(subject.batch(1)) == 5 * m


def test_with_a_choice_every_combination_of_what_is_given_is_proved() -> None:
    arguments = ["layouts=2x1x1,1x2x1", "zero=0,1", "schedule=interleaved", "num_chunks=2,3"]
    (cases,) = read([*arguments, "model=mlp"]).work.values()
    assert len(cases) == 8
    assert {case.schedule for case in cases} == {"interleaved"}
    assert {case.recompute for case in cases} == {"none"}


def test_a_table_in_plain_text_and_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    model, layouts = "tests.verify.subjects:SUBJECT", "layouts=1x1x1,2x1x1"
    assert main([f"model={model}", layouts, "zero=0", "steps=1"]) == 0
    *covers, header, first, second, summary = capsys.readouterr().out.splitlines()
    assert covers[:2] == ["2 cases: every combination of", f"  model      {model}"]
    assert header.split()[:5] == ["model", "layout", "zero", "schedule", "recompute"]
    assert first.split()[:4] == [model, "1x1x1", "0", "1f1b"]
    assert [row.split()[-2] for row in (first, second)] == ["first", "equal"]
    assert (
        summary
        == "2 of 2 cases keep their promises, tolerance 1e-12 (1e-10 for weights after AdamW)"
    )


def test_exit_code_1_names_parameter_error_layout_and_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["model=tests.verify.subjects:GPT", "layouts=1x1x2", "zero=1", "tolerance=0"]
    assert main([*arguments, "steps=1"]) == 1
    said = capsys.readouterr().out
    assert "1 of 1 cases break a promise; the first, 1x1x2 zero=1 schedule=1f1b" in said
    assert re.search(r"gradient of 0\.token\.weight is \d\.\de-\d+ off, tolerance 0", said)


def test_presets_are_the_models_of_the_configuration() -> None:
    folder = Path(__file__).parents[2] / "conf" / "model"
    found = [name for name in presets.PRESETS if (folder / f"{name}.yaml").exists()]
    assert {"gpt_tiny", "llama_tiny", "mlp"} <= set(found)
    for name in found:
        module, sizes = presets.PRESETS[name]
        lines = (folder / f"{name}.yaml").read_text().splitlines()
        given = dict(line.split(": ") for line in lines if not line.startswith("#"))
        assert given["_target_"] == f"{module}.build"
        for key, value in sizes.items():
            assert given[key] in (str(value), "null"), (name, key)
