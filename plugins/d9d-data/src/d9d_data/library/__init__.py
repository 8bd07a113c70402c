"""Components for other data loaders: sharding, bucketing, padding, pooling masks, packing to fixed size."""
