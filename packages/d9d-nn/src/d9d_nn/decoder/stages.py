"""Division of a decoder's layers into pipeline stages."""

from __future__ import annotations

from d9d_core.model import Stage

from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.decoder.flops import head_parameters, layer_parameters
from d9d_nn.stages import stage_layers

#: What the embedding costs in a step, as a part of what a head over the same words costs: an estimate. For each token a
#: head takes 6 V H floating point operations, and a look-up next to none. But the embedding's gradient is dense: for
#: each microbatch V H numbers are set to zero, read, and added to another V H, which are read and written. In float32
#: these are 16 V H bytes. On a device that does 200 operations while it moves a byte, that is the time of 3,200 V H
#: operations, or 1/15 of a head's for a microbatch of 8,192 tokens.
_EMBEDDING_PER_HEAD = 1 / 16


def layers_of(config: DecoderConfig, stage: Stage) -> range:
    """Layers of a stage, such that stages cost about the same, heads and embedding included.

    An estimate from the matmul parameters that a token uses. Scores of attention are left out, since the sequence's
    length is unknown: they make layers cost more, next to a head, than is assumed here. Layers count as alike.

    Args:
        config: config of the whole model.
        stage: pipeline stage.

    Raises:
        BuildError: the layers cannot be split over the stages, or not in the way that the job asks for.
    """
    layer = layer_parameters(config) / config.num_layers
    embedding = _EMBEDDING_PER_HEAD * config.vocab_size * config.hidden_size
    head = head_parameters(config, config.max_positions)
    return stage_layers(config.num_layers, stage, first=embedding / layer, last=head / layer)
