"""CUDA graph of a decoding step of transformers' ``generate``.

A decoding step launches a dozen small kernels for each layer, which takes the host longer than they take the GPU. Their
shapes are the same in each step if the cache of keys and values has its final size from the start, so one step is
captured and replayed. Unlike compilation, a capture takes as long as one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.trees import flatten
from torch import Tensor

Forward = Callable[..., Any]
#: Function that captures a call, without its effect, and returns a function that replays it and returns its outputs.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
#: Settings of transformers for a cache of final size, whose forwards it does not compile.
SETTINGS = {"cache_implementation": "static", "disable_compile": True}
#: Generation setting that changes or reorders the cache -> its values that leave the cache as it is.
_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "cache_implementation": (None,),
    "cache_config": (None,),
    "use_cache": (None, True),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "prefill_chunk_size": (None,),
    "compile_config": (None,),
}
#: Eager decoding steps before the capture, in which libraries allocate their workspaces.
_WARM_UP = 2


def suits(model: Any, settings: Any, new: int) -> bool:
    """Whether decoding steps of a model can be captured.

    Each step must run the same kernels: all layers attend to all positions, and there are no experts, whose numbers of
    rows depend on the tokens. A capture saves time only if more than a few tokens are generated.

    Args:
        model: model of transformers.
        settings: its ``GenerationConfig`` for this call.
        new: largest number of new tokens.
    """
    if model.device.type != "cuda" or new <= 2 * _WARM_UP:
        return False
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        hasattr(config, "num_attention_heads")
        and kinds == {"full_attention"}
        and not any("experts" in name and not name.startswith("_") for name in vars(config))
        and all(getattr(settings, name, None) in plain for name, plain in _OTHERS.items())
    )


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call as a CUDA graph (:data:`Capture`). The call is not executed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


class StepReplays:
    """Replacement of a model's ``forward``, which replays one captured decoding step.

    A call with another cache or other shapes, such as a new batch of prompts, captures a new step. A replay overwrites
    the outputs of the replay before.

    Args:
        forward: forward of the model.
        capture: captures a call.
    """

    def __init__(self, forward: Forward, capture: Capture = captured) -> None:
        self._forward = forward
        self._capture = capture
        self._key: object = None
        self._warm = 0
        self._inputs: list[Any] = []
        self._replay: Callable[[], Any] | None = None

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Run the forward, or replay it if it is a decoding step."""
        ids = given.get("input_ids")
        if args or ids is None or ids.shape[1] != 1:
            return self._forward(*args, **given)
        values, structure = flatten(given)  # flattened, as the attention mask may be a dict by kind of layer
        kinds = [(one.shape, one.dtype) if isinstance(one, Tensor) else id(one) for one in values]
        key = (structure, kinds)
        if key != self._key:
            self._key, self._warm, self._replay = key, 0, None
        if self._warm < _WARM_UP:
            self._warm += 1
            return self._forward(**given)
        if self._replay is None:
            self._inputs = [one.clone() if isinstance(one, Tensor) else one for one in values]
            fixed = structure.unflatten(self._inputs)
            self._replay = self._capture(lambda: self._forward(**fixed))
        for held, new in zip(self._inputs, values, strict=True):
            if isinstance(new, Tensor):
                held.copy_(new)
        return self._replay()


@contextmanager
def replayed_steps(model: Any, capture: Capture = captured) -> Iterator[None]:
    """Inside the block, replay a captured graph for the decoding steps of a model of transformers."""
    before = vars(model).get("forward")
    model.forward = StepReplays(model.forward, capture)
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
