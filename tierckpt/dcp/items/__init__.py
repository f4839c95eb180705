"""The items of a shard: their bytes and positions."""
