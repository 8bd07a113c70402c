"""Completion of a file of prompts, in order, which continues after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.files.atomic import move, sync, write_json
from d9d_weights.files.lock import exclusive

from d9d_inference.generation.language_model import Decoding, LanguageModel, row_of
from d9d_inference.generation.prompts import Prompt


@dataclass(frozen=True)
class FileJob:
    """Job that completes all prompts of a file.

    The output file appears when it is complete. Until then ``OUTPUT.partial`` has the lines of finished batches, and
    ``OUTPUT.partial.json`` describes the job; the same command continues after these lines. Each batch has its own
    seed, so interrupted and uninterrupted commands write the same lines.

    Attributes:
        prompts: prompts of the file.
        output: file of JSON lines to write.
        batch: number of prompts that are completed together.
        overwrite: whether to replace an existing output, or unfinished output of another command.
        settings: name -> value of every other setting that the completions depend on.
    """

    prompts: Sequence[Prompt]
    output: Path
    batch: int
    overwrite: bool
    settings: Mapping[str, Any]

    @property
    def _partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")

    @property
    def _facts(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial.json")

    def check(self) -> None:
        """Check, before a model is loaded, that the output can be written.

        Raises:
            DataError: the output exists, its directory does not exist, or an unfinished output is of another command or
                damaged.
        """
        if self.output.is_dir() or not self.output.parent.is_dir():
            raise DataError(f"--output: {self.output} cannot be a file there; name one in a directory that exists")
        if self.overwrite:
            return
        if self.output.exists():
            raise DataError(f"--output: {self.output} exists; name another file, or replace it with --overwrite")
        self._begun()

    def run(
        self, model: LanguageModel, ids: Sequence[Sequence[int]], decoding: Decoding, note: Callable[[str], None]
    ) -> None:
        """Complete all prompts.

        Args:
            model: model that completes the prompts.
            ids: token ids of each prompt.
            decoding: decoding settings.
            note: prints a line.

        Raises:
            CheckpointError: another command is writing this output.
            DataError: an unfinished output is of another command or damaged.
            BuildError: the model cannot generate.
        """
        lock = self.output.with_name(f".{self.output.name}.lock")
        with exclusive(lock, f"--output: another command is writing {self.output}"):
            done = 0 if self.overwrite else self._begun()
            self._cut(done)
            if done:
                note(f"{done} of {len(self.prompts)} completions exist; continuing")
            write_json(self._facts, self._described())
            with self._partial.open("ab") as file:
                for start in range(done, len(self.prompts), self.batch):
                    end = min(start + self.batch, len(self.prompts))
                    found = model.complete(ids[start:end], decoding, _seed(decoding.seed, start))
                    rows = [
                        row_of(prompt, one, model) for prompt, one in zip(self.prompts[start:end], found, strict=True)
                    ]
                    file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
                    file.flush()
            sync(self._partial)
            move(self._partial, self.output)
            self._facts.unlink()
            lock.unlink()
        note(f"{len(self.prompts)} completions in {self.output}")

    def _described(self) -> dict[str, Any]:
        text = json.dumps([prompt.fields for prompt in self.prompts], sort_keys=True)
        return {"prompts": hashlib.sha256(text.encode()).hexdigest(), "batch": self.batch, **self.settings}

    def _begun(self) -> int:
        """Count the completions, in finished batches, that an earlier start of this command wrote."""
        if not self._partial.exists() or not self._facts.exists():
            return 0
        try:
            facts = parse_json(read_regular(self._facts))
            lines = self._partial.read_bytes().count(b"\n")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self._partial} cannot be continued ({error}); start from scratch with --overwrite"
            ) from error
        described = json.loads(json.dumps(self._described()))
        if facts != described:
            known = facts if isinstance(facts, dict) else {}
            other = ", ".join(name for name in described if known.get(name) != described[name])
            raise DataError(
                f"{self._partial} was started with other {other or 'settings'}: repeat that command to continue it, "
                "use another --output, or start from scratch with --overwrite"
            )
        return min(lines, len(self.prompts)) // self.batch * self.batch

    def _cut(self, rows: int) -> None:
        """Cut the partial output to its first ``rows`` lines."""
        if not self._partial.exists():
            return
        with self._partial.open("r+b") as file:
            for _ in range(rows):
                file.readline()
            file.truncate(file.tell())


def _seed(seed: int, start: int) -> int:
    """Seed of the batch that starts with prompt number ``start``."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{start}".encode()).digest()[:7], "big")
