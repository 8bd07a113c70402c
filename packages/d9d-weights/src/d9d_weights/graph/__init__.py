"""State graphs: how the tensors of one checkpoint layout become those of another.

A :class:`~d9d_weights.graph.base.Mapper` is a description, composed of elementary ones. Bound to names and shapes of a
checkpoint it becomes a :class:`~d9d_weights.graph.graph.StateGraph`, which knows before any tensor is read what each
output consists of, which outputs belong together and in which order they come. Most mappers invert by themselves::

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
