"""Pieces of data pipelines that can be used alone: sharding, bucketing, padding, pooling masks, packs of fixed size."""
