"""State graphs: mappings between the tensors of two checkpoint layouts.

A :class:`~d9d_weights.graph.base.Mapper` is a description, composed of elementary mappers. Bound to names and shapes of
a checkpoint, it becomes a :class:`~d9d_weights.graph.graph.StateGraph`, which knows, before any tensor is read, the
inputs of each output, the groups of dependent outputs, and their order. Most mappers have an inverse::

    def from_hugging_face(layers: int) -> Mapper:
        return Parallel(
            Rename("model.embed_tokens.weight", "embedding.weight"),
            Rename("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.norm.weight"),
            *(
                Stack([f"model.layers.{n}.experts.{e}.up.weight" for e in range(8)], f"layers.{n}.experts.up")
                for n in range(layers)
            ),
        )

    to_hugging_face = from_hugging_face(2).inverse()
"""
