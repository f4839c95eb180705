"""The items of a shard: their bytes, and where each lies in the file."""
