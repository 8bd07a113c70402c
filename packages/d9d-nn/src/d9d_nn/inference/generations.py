"""Inference task ``generations``: continuations of prompts by a language model.

Shapes: B samples, S positions, at most N new tokens, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from d9d_core.errors import JobError
from d9d_core.inference import ROW, Columns, Continuation
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.heads.choice import check_language_model, read_output
from d9d_nn.inference.config import GenerationsConfig
from d9d_nn.inference.rows import is_packed
from d9d_nn.microbatch import stage_inputs


class Generations:
    """Inference task of generations. A row of the data is a prompt, without the token that ends its text.

    Args:
        config: config with the length of the continuations and the sampling settings.
    """

    def __init__(self, config: GenerationsConfig) -> None:
        self.config = config
        self._text_of: Callable[[Sequence[int]], str] | None = None

    @property
    def columns(self) -> Mapping[str, str]:
        return {
            ROW: "number of the row in the input, from 0",
            "prompt_tokens": "number of tokens of the prompt",
            "tokens": "ids of the new tokens, with the end token if there is one",
            "text": "the new tokens as text, without special tokens; null if the run has no tokenizer",
            "finished": "whether the model generated an end token",
        }

    @property
    def continuation(self) -> Continuation:
        """Length of the continuations, and the settings by which their tokens are sampled."""
        config = self.config
        stop = None if config.stop is None else frozenset(config.stop)
        return Continuation(config.max_new_tokens, config.temperature, config.seed, stop)

    def use_text_of(self, text_of: Callable[[Sequence[int]], str] | None) -> None:
        """Set the function that decodes token ids to text."""
        self._text_of = text_of

    def check(self, model: Any, facts: State) -> None:
        """Find the head, and compare vocabulary and positions of model and data.

        Raises:
            JobError: the head cannot be found; the data has token ids that the model does not have, or leaves no
                positions for new tokens; a sample of the data holds several rows; or attention is not causal.
        """
        check_language_model(model, "causal_lm", self.config.head, facts)
        mask = getattr(model, "attention_mask", "causal")
        if mask != "causal":
            raise JobError(
                f"task: 'generations' continues texts with causal attention, but model.attention_mask is {mask}; use "
                "another task, such as 'log_probs'"
            )
        if is_packed(facts):
            raise JobError(
                "data: a sample holds several rows, and only whole samples can be continued; use the dataset "
                "'documents', with one row per sample"
            )
        have, prompt = getattr(model, "max_positions", None), facts.get("sequence_length")
        if isinstance(have, int) and isinstance(prompt, int) and prompt + self.config.max_new_tokens > have:
            raise JobError(
                f"task.max_new_tokens: prompts of {prompt} positions (data.sequence_length) and "
                f"{self.config.max_new_tokens} new tokens are more than the model's {have} positions; lower either"
            )

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of a pipeline stage: tokens go to the first stage; all other inputs go to every stage."""
        return stage_inputs(microbatch)

    def logits(self, outputs: Mapping[str, Tensor]) -> Tensor | None:
        """Logits [B, S, V] of the head; ``None`` if the model did not return them."""
        try:
            return read_output(outputs, "logits", self.config.head)
        except JobError:
            return None

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """New tokens int64 [B, N], whether their last one is an end token, bool [B], and prompt lengths int64 [B]."""
        tokens = microbatch["tokens"]
        sizes = microbatch.get("lengths", tokens.new_full((len(tokens),), tokens.shape[1]))
        return {"new_tokens": outputs["new_tokens"], "ended": outputs["ended"], "sizes": sizes}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        tokens = [[token for token in row if token >= 0] for row in kept["new_tokens"].tolist()]
        return {
            ROW: kept["rows"].tolist(),
            "prompt_tokens": kept["sizes"].tolist(),
            "tokens": tokens,
            "text": [None if self._text_of is None else self._text_of(row) for row in tokens],
            "finished": kept["ended"].tolist(),
        }

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Number of rows, of their new tokens, and of rows in which the model generated an end token."""
        return {
            "rows": float(len(rows[ROW])),
            "tokens": float(sum(map(len, rows["tokens"]))),
            "finished": float(sum(rows["finished"])),
        }

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Summary of the pass: the number of rows, the number of new tokens, and the fraction with an end token."""
        return {
            "rows": sums["rows"],
            "new_tokens": sums["tokens"],
            "finished": sums["finished"] / max(sums["rows"], 1),
        }
