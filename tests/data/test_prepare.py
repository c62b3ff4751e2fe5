"""A corpus is made once on a machine, whole, and never waited for in vain."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from parallel3d.data import TokenFiles, TokenStore, prepare
from parallel3d.data import build as module
from parallel3d.data.sources import Source

# A fork starts at once; the children touch no torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    for number in range(30):
        (path / f"{number:02}.txt").write_text(f"this is text {number}\n" * 3)
    return path


def slowly(
    monkeypatch: pytest.MonkeyPatch, log: Path, seconds: float, started: Callable[[], None]
) -> None:
    """Make each build write a line into ``log`` and take a while."""
    build = module._build

    def slow(source: Source, tokenizer: str, folder: Path, shown_as: str | None) -> None:
        with log.open("a") as file:
            file.write(f"{folder.parent.name}\n")
        folder.mkdir()
        (folder / "half").touch()
        started()
        time.sleep(seconds)
        build(source, tokenizer, folder, shown_as)

    monkeypatch.setattr(module, "_build", slow)


def prepared(text: Path, out: Path) -> BaseProcess:
    """A process that prepares, opens and checks the corpus."""

    def body() -> None:
        store = prepare(f"text:{text}", "bytes", out, progress=False)
        assert store.num_documents == 30
        TokenFiles(out, 8, 4).train(0, range(4))

    process = FORK.Process(target=body)
    process.start()
    return process


def ended(*processes: BaseProcess) -> list[int | None]:
    for process in processes:
        process.join(20)
    return [process.exitcode for process in processes]


def test_a_corpus_is_made_and_found_again(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    store = prepare(f"text:{text}", "bytes", out, progress=False)
    assert store.num_tokens == sum(path.stat().st_size for path in text.iterdir())
    assert store.meta["source"] == f"text:{text}"
    assert store.meta["tokenizer"] == "bytes"
    inode = (out / "tokens.bin").stat().st_ino
    prepare(f"text:{text}", "bytes", out, progress=False)
    assert (out / "tokens.bin").stat().st_ino == inode
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.lock", "out"]


@pytest.mark.report("axolotl-ai-cloud/axolotl#3690")
@pytest.mark.parametrize("change", ["source", "tokenizer", "file"])
def test_a_corpus_of_other_inputs_is_not_taken_for_it(
    text: Path, tmp_path: Path, change: str
) -> None:
    out = tmp_path / "out"
    prepare(f"text:{text}", "bytes", out, progress=False)
    source, tokenizer = f"text:{text}", "bytes"
    if change == "file":
        os.utime(text / "00.txt", ns=(0, 0))
    elif change == "source":
        source = f"text:{text / '00.txt'}"
    else:
        tokenizer = "bpe:300"
    with pytest.raises(ValueError, match=r"choose another out="):
        prepare(source, tokenizer, out, progress=False)


def test_a_folder_of_something_else_is_left_alone(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"has no meta\.json"):
        prepare(f"text:{text}", "bytes", out, progress=False)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_failed_build_leaves_no_folder(text: Path, tmp_path: Path) -> None:
    (text / "99.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"99.txt is not UTF-8"):
        prepare(f"text:{text}", "bytes", tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "text"]


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="has no text"):
        prepare(f"text:{tmp_path / 'empty.txt'}", "bytes", tmp_path / "out", progress=False)


@pytest.mark.report("NVIDIA/Megatron-LM#907")
@pytest.mark.report("NVIDIA/Megatron-LM#356")
@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#5107")
@pytest.mark.report("NVIDIA-NeMo/Speech#6715")
@pytest.mark.report("deepspeedai/Megatron-DeepSpeed#356")
def test_each_node_builds_once_and_nobody_reads_a_part(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, tmp_path / "log", 0.3, lambda: None)
    outs = [tmp_path / node / "out" for node in ("a", "b")]
    assert ended(*[prepared(text, out) for out in outs for _ in range(2)]) == [0] * 4
    assert sorted((tmp_path / "log").read_text().split()) == ["a", "b"]
    one, two = map(TokenStore, outs)
    assert one.meta["content"] == two.meta["content"]


@pytest.mark.report("deepspeedai/Megatron-DeepSpeed#356")
def test_when_the_builder_is_killed_another_takes_over(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = FORK.Event()
    with monkeypatch.context() as patched:
        slowly(patched, tmp_path / "log", 60, started.set)
        builder = prepared(text, tmp_path / "out")
    assert started.wait(20)
    waiting = [prepared(text, tmp_path / "out") for _ in range(2)]
    time.sleep(0.2)
    assert all(process.is_alive() for process in waiting)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    assert ended(builder, *waiting) == [-signal.SIGKILL, 0, 0]
    assert not (tmp_path / ".out.partial").exists()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["meta.json", "offsets.bin", "tokens.bin"]


def test_the_tool_prepares_what_it_is_asked_for(text: Path, tmp_path: Path) -> None:
    done = tool(f"source=text:{text}", "tokenizer=bytes", f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert "30 documents, 1,410 tokens, vocabulary 256" in done.stdout
    assert TokenStore(tmp_path / "out").num_documents == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sauce=stdlib"], "sauce is not a key; did you mean source?"),
        (["source=stdlib", "out=x"], "tokenizer= is missing"),
        (["source=stdlib", "source=stdlib"], "source is given twice"),
        (["source"], "source has no value: write source=VALUE"),
        (["source=stdlb", "tokenizer=bytes", "out=x"], "source=stdlb must be stdlib, text:PATH"),
    ],
)
def test_the_tool_refuses_wrong_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main()(arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def main() -> Callable[[list[str]], int]:
    import runpy

    return runpy.run_path(str(TOOL))["main"]


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
