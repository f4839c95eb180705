"""Replicas of fresh checkpoints on other nodes, until shared storage has them."""
