from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallel3d.verify import LAYOUTS, presets
from parallel3d.verify.command import main, read

WRONG = {
    "layout=1x1x2": "layout is not an argument; did you mean layouts?",
    "colour=red": "colour is not an argument; there are layouts, zero, schedule",
    "steps": "steps has no value: write steps=VALUE",
    "steps=0": "steps=0: a number of steps is a whole number from 1 up",
    "steps=many": "steps=many: a number of steps is a whole number",
    "layouts=2x2": "layout '2x2' must be pp x dp x tp",
    "layouts=1x1x0": "topology.tp = 0 must be a whole number from 1 up",
    "zero=2": "zero=2 is not one of 0, 1",
    "zero=0,,1": "zero=0,,1 has an empty place",
    "schedule=1f1": "interleaved, looped-bfs, zb-h1, zbv; did you mean 1f1b?",
    "recompute=all": "recompute=all is not one of none, full",
    "tolerance=-1": "tolerance=-1: a tolerance is a number, 0 or more",
    "tolerance=nan": "tolerance=nan: a tolerance is a number, 0 or more",
    "suite=fast": "suite=fast is not one of quick, full",
    "part=5/4": "part=5/4: a part is K/N with K from 1 to N",
    "part=0/4": "part=0/4: a part is K/N",
    "model=gpt_tinny": "model=gpt_tinny is not one of gpt_tiny, llama_tiny, mlp; did you mean gpt_",
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


def test_the_default_is_every_layout_of_1_and_2_twice() -> None:
    cases = read([]).cases
    assert {str(case.grid) for case in cases} == set(LAYOUTS) and len(cases) == 16


def test_suite_full_is_every_combination_and_a_choice_narrows_it() -> None:
    assert len(read(["suite=full"]).cases) == 64
    assert len(read(["suite=full", "zero=0"]).cases) == 32
    assert len(read(["suite=full", "part=1/4"]).cases) == 16


def test_a_batch_has_a_sample_for_every_microbatch_of_the_widest_dp_and_one_more() -> None:
    request = read(["layouts=1x1x1,2x5x1"])
    x, target = request.subject.batch(0)
    assert len(x) == len(target) == 5 * request.setting.num_microbatches + 1


def test_with_a_choice_every_combination_of_what_is_given_is_proved() -> None:
    cases = read(["layouts=2x1x1,1x2x1", "zero=0,1", "schedule=gpipe"]).cases
    assert len(cases) == 4
    assert {case.schedule for case in cases} == {"gpipe"}
    assert {case.recompute for case in cases} == {"none"}


def test_a_table_in_plain_text_and_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = "layouts=1x1x1,2x1x1"
    assert main(["model=tests.verify.subjects:SUBJECT", layouts, "zero=0", "steps=1"]) == 0
    header, *rows, summary = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["layout", "zero", "schedule", "recompute"]
    assert [row.split()[0] for row in rows] == ["1x1x1", "2x1x1"]
    assert [row.split()[-2] for row in rows] == ["first", "equal"]
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
    for name, (module, sizes) in presets.PRESETS.items():
        lines = (folder / f"{name}.yaml").read_text().splitlines()
        given = dict(line.split(": ") for line in lines if not line.startswith("#"))
        assert given["_target_"] == f"{module}.build"
        for key, value in sizes.items():
            assert given[key] in (str(value), "null"), (name, key)
