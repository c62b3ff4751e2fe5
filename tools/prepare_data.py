"""Text to token files.

    python tools/prepare_data.py source=SOURCE tokenizer=TOKENIZER out=DIR

    source     stdlib | text:PATH | jsonl:PATH | hf:NAME_OR_FOLDER
    tokenizer  bytes | bpe:SIZE | hf:NAME_OR_FOLDER
    out        the folder to make

Train on it with `data.path=DIR`.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel3d.data import prepare

KEYS = ("source", "tokenizer", "out")


def parse(arguments: list[str]) -> dict[str, str]:
    """The values by key; ValueError for an unknown, missing, repeated or malformed argument."""
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
            raise ValueError(f"{key} is not a key; {hint}")
        if not equals or not value:
            raise ValueError(f"{argument} has no value: write {key}=VALUE")
        if key in values:
            raise ValueError(f"{key} is given twice, as {values[key]} and as {value}")
        values[key] = value
    missing = [key for key in KEYS if key not in values]
    if missing:
        raise ValueError(f"{missing[0]}= is missing: give {' '.join(f'{key}=' for key in KEYS)}")
    return values


def main(arguments: list[str]) -> int:
    """Prepare, print what was made, and return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    try:
        store = prepare(**parse(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(
        f"{store.folder}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, "
        f"vocabulary {store.vocab_size:,}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
