"""Container of a model's heads. Shapes: B samples, S positions, H features, V vocabulary size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_nn.heads.classification import ClassificationHead
from d9d_nn.heads.config import (
    ClassificationHeadConfig,
    EmbeddingHeadConfig,
    HeadConfig,
    HeadSizes,
    HiddenStatesHeadConfig,
    PluginHeadConfig,
    TokenClassificationHeadConfig,
    head_reads,
)
from d9d_nn.heads.embedding import EmbeddingHead
from d9d_nn.heads.hidden_states import HiddenStatesHead
from d9d_nn.heads.layer_mean import Layers
from d9d_nn.heads.token_classification import TokenClassificationHead


class Heads(nn.ModuleDict):
    """Heads of a model by name, each with its choice of hidden states.

    Args:
        configs: configs of the heads, by name.
        hidden_size: H.
        vocabulary: V.
        num_layers: number of layers of the whole model.
        std: standard deviation of the initial weights.
        tied: whether causal_lm heads take the embedding's weight.
        added_tokens: last token ids with separate parameters in a causal_lm head.
        softcap: soft cap of the logits of causal_lm heads; ``None`` for no cap.

    Raises:
        BuildError: the name of a head, or of a group of added tokens, is already an attribute of modules; or the plugin
            of a head is not installed.
    """

    def __init__(
        self,
        configs: Mapping[str, HeadConfig | PluginHeadConfig],
        *,
        hidden_size: int,
        vocabulary: int,
        num_layers: int,
        std: float,
        tied: bool = False,
        added_tokens: int | Mapping[str, int] = 0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self._reads: dict[str, tuple[Layers, ...]] = {}
        self._apart = frozenset(name for name, config in configs.items() if _returns_each(config))
        for name, config in configs.items():
            if hasattr(self, name):
                raise BuildError(f"model.heads: '{name}' is an attribute of modules; give the head another name")
            self._reads[name] = head_reads(config, num_layers)
            if isinstance(config, ClassificationHeadConfig):
                self[name] = ClassificationHead(
                    hidden_size, config.num_classes, pooling=config.pooling, std=std, dropout=config.dropout
                )
            elif isinstance(config, TokenClassificationHeadConfig):
                self[name] = TokenClassificationHead(hidden_size, config.num_classes, std=std)
            elif isinstance(config, EmbeddingHeadConfig):
                self[name] = EmbeddingHead(
                    pooling=config.pooling,
                    normalize=config.normalize,
                    dim=config.dim,
                    hidden_size=hidden_size,
                    projection=config.projection,
                    std=std,
                )
            elif isinstance(config, HiddenStatesHeadConfig):
                self[name] = HiddenStatesHead()
            elif isinstance(config, PluginHeadConfig):
                self[name] = config.build(HeadSizes(hidden_size, vocabulary, std))
            else:
                self[name] = CausalLMHead(
                    hidden_size, vocabulary, std=std, tied=tied, added_tokens=added_tokens, softcap=softcap
                )

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Tensor-parallel styles of the heads.

        A causal_lm head without added tokens splits the vocabulary; all other heads are replicated.
        """
        return {
            name: TensorStyle.VOCAB if isinstance(head, CausalLMHead) and not head.split else TensorStyle.WHOLE
            for name, head in self.items()
        }

    def forward(
        self,
        final: Tensor,
        means: Mapping[Layers, Tensor],
        *,
        targets: Tensor | None = None,
        lengths: Tensor | None = None,
        ends: Tensor | None = None,
        pooling_mask: Tensor | None = None,
        tied_weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run the heads.

        If there are several heads, one of kind causal_lm runs only with targets: unused logits would be the largest
        tensor of the step. To get logits, call the head directly.

        Args:
            final: normalised output of the last layer, [B, S, H].
            means: mean of the normalised outputs of each set of layers that a head reads, [B, S, H]; see
                :mod:`d9d_nn.heads.layer_mean`.
            targets: int64 [B, S]; -100 where nothing is predicted.
            lengths: int64 [B], tokens of each right-padded sample; ``None`` if there is no padding.
            ends: int64 [B, N], where each row of packed samples ends, for heads that pool; see
                :func:`~d9d_nn.heads.pooling.pool`. ``None`` pools samples.
            pooling_mask: [B, S], for heads with masked pooling.
            tied_weight: [V, H] for tied heads.

        Returns:
            Outputs of a single head under their own names, of several heads under ``"<head>/<name>"``.
        """
        outputs: dict[str, Tensor] = {}
        for name, head in self.items():
            read = [means[layers] for layers in self._reads[name]] or [final]
            hidden = torch.stack(read, dim=2) if name in self._apart else read[0]
            if isinstance(head, TokenClassificationHead | HiddenStatesHead):
                mine = head(hidden)
            elif not isinstance(head, CausalLMHead):
                mine = head(hidden, lengths, ends, pooling_mask)
            elif targets is not None or len(self) == 1:
                mine = head(hidden, targets, tied_weight)
            else:
                continue
            outputs |= mine if len(self) == 1 else {f"{name}/{key}": tensor for key, tensor in mine.items()}
        return outputs


def _returns_each(config: HeadConfig | PluginHeadConfig) -> bool:
    return isinstance(config, HiddenStatesHeadConfig) and config.aggregation == "none"
