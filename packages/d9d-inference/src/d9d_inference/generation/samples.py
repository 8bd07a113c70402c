"""Subscriber ``samples``: continuations of fixed prompts during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from d9d_core import events as ev
from d9d_core.errors import JobError
from d9d_core.forward import ForwardPass
from d9d_core.inference import Continuation
from d9d_core.job_file.job import JobConfig
from d9d_core.topology import Topology
from d9d_engine.joining import print_note
from d9d_engine.step.randomness import derive_seed
from d9d_engine.trackers.lines import LineFile

from d9d_inference.generation.config import SamplesConfig
from d9d_inference.generation.decoder import Decoder, padded_prompts
from d9d_inference.generation.prompts import read_prompts
from d9d_inference.generation.tokenizer_files import ends_of_text, tokenizer_of

_SUBSCRIBER = "subscriber samples"
_FILE = "samples.jsonl"
#: Largest number of characters of a prompt, and of a continuation, in a printed line.
_SHOWN = 60


@dataclass(frozen=True)
class _Encoded:
    """Prompt as written in the job, with its token ids."""

    given: str | list[int]
    ids: list[int]


class Samples:
    """Continues fixed prompts before the first step, after each ``every`` steps, and after the last step.

    Losses, weights, random numbers and data order are the same as without this subscriber. The time of the generation
    counts as part of the step.

    Args:
        config: prompts, interval and sampling settings.
    """

    def __init__(self, config: SamplesConfig) -> None:
        self._config = config
        self._job: JobConfig | None = None
        self._prompts: list[_Encoded] = []
        self._stop: frozenset[int] = frozenset()
        self._tokenizer: Any | None = None
        self._model: tuple[ForwardPass, Topology] | None = None
        self._file: LineFile | None = None
        self._total = 0

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the events of a training run."""
        return [
            (ev.JobConfigured, self._configure),
            (ev.DataReady, self._encode),
            (ev.ForwardReady, self._take_model),
            (ev.TrainingStarts, self._start),
            (ev.StepEnds, self._step),
            *((end, self._close) for end in (ev.TrainingFinished, ev.TrainingStopped, ev.TrainingFailed)),
        ]

    def _configure(self, event: ev.JobConfigured) -> None:
        if not isinstance(event.job, JobConfig):
            raise JobError(f"{_SUBSCRIBER} observes training only; remove it, or use the task 'generations'")
        if event.job.mesh.cp > 1:
            raise JobError(
                f"{_SUBSCRIBER} needs full prompts, but mesh.cp is {event.job.mesh.cp}, so each rank "
                "computes a part of their positions; remove the subscriber, or mesh.cp"
            )
        mask = getattr(event.job.model, "attention_mask", "causal")
        if mask != "causal":
            raise JobError(
                f"{_SUBSCRIBER} continues texts with causal attention, but model.attention_mask is {mask}; remove the "
                "subscriber"
            )
        self._job = event.job

    def _encode(self, event: ev.DataReady) -> None:
        """Encode the prompts, and check that the model has enough positions.

        Raises:
            JobError: the run has no tokenizer for a text, or a prompt is too long.
            DataError: the file of prompts is invalid.
        """
        assert self._job is not None
        config = self._config
        self._tokenizer = tokenizer_of(self._job, event.stream, _SUBSCRIBER)
        self._prompts = [self._encoded(prompt) for prompt in self._given()]
        longest = max(self._prompts, key=lambda prompt: len(prompt.ids))
        positions = getattr(self._job.model, "max_positions", None)
        if isinstance(positions, int) and len(longest.ids) + config.max_new_tokens > positions:
            raise JobError(
                f"{_SUBSCRIBER}: the prompt {_short(longest.given)} has {len(longest.ids)} tokens, and with "
                f"max_new_tokens {config.max_new_tokens} exceeds the model's {positions} positions; lower "
                "max_new_tokens, or shorten the prompt"
            )
        self._stop = ends_of_text(self._job, event.stream.facts) if config.stop is None else frozenset(config.stop)

    def _given(self) -> list[str | list[int]]:
        if self._config.file is None:
            return list(self._config.prompts)
        prompts = read_prompts(self._config.file)
        for prompt in prompts:
            if prompt.text is None:
                raise JobError(
                    f"{_SUBSCRIBER}: {prompt.where}: messages need a chat template, which is not applied here; write "
                    "the rendered text as 'prompt'"
                )
        return [prompt.text for prompt in prompts if prompt.text is not None]

    def _encoded(self, prompt: str | list[int]) -> _Encoded:
        if not isinstance(prompt, str):
            return _Encoded(prompt, prompt)
        if self._tokenizer is None:
            raise JobError(f"{_SUBSCRIBER}: the run has no tokenizer; give prompts as lists of token ids")
        ids = list(self._tokenizer.encode(prompt).ids)
        if not ids:
            raise JobError(f"{_SUBSCRIBER}: the prompt {_short(prompt)} has no token; change it")
        return _Encoded(prompt, ids)

    def _take_model(self, event: ev.ForwardReady) -> None:
        self._model = event.forward, event.topology

    def _start(self, event: ev.TrainingStarts) -> None:
        assert self._job is not None
        assert self._model is not None
        self._total = event.total_steps
        if self._model[1].rank == 0:
            self._file = LineFile(self._job.run.directory / _FILE, event.step)
        if event.step == 0:
            self._sample_or_close(0)

    def _step(self, event: ev.StepEnds) -> None:
        done = event.step + 1
        if done % self._config.every == 0 or done == self._total:
            self._sample_or_close(done)

    def _sample_or_close(self, step: int) -> None:
        try:
            self._sample(step)
        except BaseException:
            self._close(None)  # a subscriber that raised is not called again, so close now
            raise

    def _sample(self, step: int) -> None:
        """Generate continuations of all prompts. Collective over all ranks."""
        assert self._model is not None
        config, (forward, topology) = self._config, self._model
        seed = derive_seed(config.seed, "samples", step)
        continuation = Continuation(config.max_new_tokens, config.temperature, seed)
        decoder = Decoder(forward, topology, continuation, self._stop, lambda outputs: outputs.get("logits"))
        # Every rank continues all prompts, so that collectives over sharded parameters and experts match.
        count = max(forward.least_microbatches, -(-len(self._prompts) // config.rows))
        pack = padded_prompts([prompt.ids for prompt in self._prompts], count, topology.device)
        found = [ids for one in decoder.continue_all(pack) for ids in one.new.tolist()]
        if self._file is None:
            return
        # Fillers may follow the prompts in the result; zip() leaves them out.
        for number, (prompt, ids) in enumerate(zip(self._prompts, found, strict=False)):
            tokens = [token for token in ids if token >= 0]
            text = None if self._tokenizer is None else self._tokenizer.decode(tokens)
            finish = "stop" if tokens[-1] in self._stop else "length"
            line = {"step": step, "sample": number, "prompt": prompt.given, "completion": text}
            self._file.append(line | {"tokens": tokens, "finish": finish})
            if config.show:
                print_note(
                    f"sample at step {step}: {_short(prompt.given)} -> {_short(tokens if text is None else text)}"
                )

    def _close(self, _event: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
