"""Division of a decoder's layers into pipeline stages."""

from __future__ import annotations

from d9d_core.model import Stage

from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.decoder.flops import further_parameters, head_parameters, layer_parameters
from d9d_nn.stages import stage_layers

#: Estimated cost of the embedding in a step, as a fraction of the cost of a head over the same vocabulary V. For each
#: token a head takes 6 V H floating point operations, a look-up almost none. But the embedding's gradient is dense: for
#: each microbatch V H numbers are set to zero, read, and added to another V H, which are read and written. In float32
#: these are 16 V H bytes. On a device that does 200 operations while it moves a byte, that takes as long as 3,200 V H
#: operations, or 1/15 of a head's for a microbatch of 8,192 tokens.
_EMBEDDING_PER_HEAD = 1 / 16


def layers_of(config: DecoderConfig, stage: Stage) -> range:
    """Layers of a stage, chosen so that all stages cost about the same, including heads and embedding.

    The costs are estimated from the matmul parameters that a token uses. The cost of attention scores is left out,
    since the sequence length is unknown; layers therefore cost more than assumed. All layers count as equally costly.

    Args:
        config: config of the whole model.
        stage: pipeline stage.

    Raises:
        BuildError: the layers cannot be split over the stages in the requested way.
    """
    layer = layer_parameters(config) / config.num_layers
    embedding = _EMBEDDING_PER_HEAD * config.vocab_size * config.hidden_size
    last = head_parameters(config, config.max_positions) + further_parameters(config)
    if config.multi_token().depths:  # then the last stage looks up the later tokens' embeddings
        last += embedding
    return stage_layers(config.num_layers, stage, first=embedding / layer, last=last / layer)
